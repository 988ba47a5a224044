// The list of kept chats: open one, give it another name, delete it.

import { button, by, draw, el } from "./dom.js";
import { chats, remove, rename } from "./store.js";

/** `chat` is the conversation on the screen. */
export function showHistory(chat) {
  draw(by("history-list"), { list: chats(), open: chat.chat.id }, (place, { list, open }) => {
    by("history-count").textContent = list.length || "";
    place.replaceChildren(...list.map((each) => line(chat, each, each.id === open)));
    if (!list.length) place.append(el("p", { class: "empty" }, "None yet."));
  });
}

function line(chat, { id, title, changed }, open) {
  const name = button(title || "untitled", () => {
    chat.open(id);
    by("history").open = false;
  }, { class: "small name", title: new Date(changed).toLocaleString(), "aria-current": open ? "true" : null });
  const node = el("div", { class: "history-line" }, name, button("Rename", () => ask(node, chat, id, title)), button("Delete", () => drop(chat, id, title)));
  return node;
}

function ask(node, chat, id, title) {
  const field = el("input", { type: "text", value: title, maxLength: 120, "aria-label": "Name of the chat" });
  const done = (keep) => {
    field.onblur = null;
    if (keep) rename(id, field.value);
    if (keep && chat.chat.id === id) chat.chat.title = field.value.trim() || title;
    node.replaceWith(line(chat, { id, title: (keep && field.value.trim()) || title, changed: Date.now() }, chat.chat.id === id));
    showHistory(chat);
  };
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter" || event.key === "Escape") done(event.key === "Enter");
  });
  field.onblur = () => done(true);
  node.replaceChildren(field);
  field.select();
}

function drop(chat, id, title) {
  if (!confirm(`Delete "${title}" from this browser?`)) return;
  remove(id);
  if (chat.chat.id === id) chat.open(null);
  showHistory(chat);
}
