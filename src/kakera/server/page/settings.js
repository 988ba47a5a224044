// What every request of the chat says beside its messages. Empty fields leave the choice to the server and the model.

import { by } from "./dom.js";
import { loadSettings, saveSettings } from "./store.js";

const FIELDS = { system: "set-system", temperature: "set-temperature", effort: "chat-effort", length: "set-length" };

export function keepSettings() {
  const kept = loadSettings();
  for (const [name, id] of Object.entries(FIELDS)) {
    const field = by(id);
    if (typeof kept[name] === "string") field.value = kept[name];
    if (!field.value && field.tagName === "SELECT") field.selectedIndex = 0;
    field.addEventListener("change", () => {
      saveSettings(Object.fromEntries(Object.entries(FIELDS).map(([each, place]) => [each, by(place).value])));
      mark();
    });
  }
  mark();
}

/** A folded form shows that something in it is set. */
function mark() {
  const set = [by(FIELDS.system), by(FIELDS.temperature), by(FIELDS.length)].some((field) => field.value.trim());
  by("settings").dataset.set = set;
}

/** The request's fields, its messages included. */
export function withSettings(messages) {
  const system = by(FIELDS.system).value.trim();
  const body = {
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    reasoning_effort: by(FIELDS.effort).value,
  };
  const [temperature, length] = [by(FIELDS.temperature).valueAsNumber, by(FIELDS.length).valueAsNumber];
  if (Number.isFinite(temperature)) body.temperature = temperature;
  if (Number.isFinite(length)) body.max_tokens = length;
  return body;
}
