// The conversation: what is sent, what becomes of it, and which of its turns are asked again or differently.

import { by, el } from "./dom.js";
import { Pictures, withPictures } from "./pictures.js";
import { keepSettings, withSettings } from "./settings.js";
import { load, save } from "./store.js";
import { complete } from "./stream.js";
import { Answer, failure, question } from "./turns.js";

const DRAFT = "kakera-draft"; // in sessionStorage: a reload keeps what was typed
const TITLE = 60;

export class Chat {
  /** `ask(path, options)` is fetch with the key; `changed()` is called when the kept chats may be others. */
  constructor(ask, changed) {
    this.ask = ask;
    this.changed = changed;
    this.stop = null;
    this.running = null; // the id of the request that streams here
    this.log = by("chat-log");
    this.input = by("chat-input");
    this.pictures = new Pictures();
    this.touch = matchMedia("(pointer: coarse)").matches; // its Enter key is the only way to a new line
    if (!this.touch) this.input.placeholder += " Shift+Enter breaks the line.";
    this.input.value = sessionStorage.getItem(DRAFT) ?? "";
    keepSettings();
    by("chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    this.input.addEventListener("input", () => this.typed());
    this.input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing || this.touch) return;
      event.preventDefault();
      this.send();
    });
    by("chat-stop").addEventListener("click", () => this.cancel());
    by("edit-cancel").addEventListener("click", () => {
      this.setInput(this.before);
      this.pictures.set(this.beforePictures);
      this.edit(null);
    });
    this.open(null);
  }

  /** Show a chat that is kept, or with null a new one. */
  open(id) {
    this.cancel();
    this.chat = (id && load(id)) || { id: crypto.getRandomValues(new Uint32Array(2)).join("-"), title: "", messages: [] };
    this.edit(null);
    this.render();
    this.follow();
    this.changed();
  }

  cancel() {
    this.stop?.abort();
  }

  typed() {
    sessionStorage.setItem(DRAFT, this.input.value);
  }

  setInput(text) {
    this.input.value = text;
    this.typed();
  }

  render() {
    const { messages } = this.chat;
    const last = messages.length - 1;
    const nodes = messages.map((message, i) => {
      if (message.role === "user") return question(message.content, () => this.edit(i), message.pictures);
      const answer = Answer.stored(message);
      answer.offer(i === last ? () => this.again() : null);
      return answer.node;
    });
    if (!messages.length) nodes.push(el("p", { class: "empty" }, "Chats are kept in this browser, and nowhere else."));
    else if (messages[last].role === "user") nodes.push(failure(messages[last].problem ?? "It has no answer.", () => this.again()));
    this.log.replaceChildren(...nodes);
  }

  /** Have a question back in the input; sending replaces it and all that came after. */
  edit(index) {
    if (index !== null && this.stop) return;
    this.editing = index;
    by("edit-note").hidden = index === null;
    if (index === null) return;
    this.before = this.input.value;
    this.beforePictures = this.pictures.urls;
    this.setInput(this.chat.messages[index].content);
    this.pictures.set(this.chat.messages[index].pictures ?? []);
    this.input.focus();
  }

  send() {
    const text = this.input.value.trim();
    if (!text || this.stop) return;
    const { messages } = this.chat;
    const last = messages[messages.length - 1];
    if (this.editing !== null) messages.length = this.editing;
    else if (last?.role === "user" && last.returned) messages.pop(); // it was given back to the input, and comes again
    const pictures = this.pictures.taken();
    messages.push({ role: "user", content: text, ...(pictures.length ? { pictures } : {}) });
    this.chat.title ||= text.replace(/\s+/g, " ").slice(0, TITLE);
    this.setInput("");
    this.edit(null);
    this.answer();
  }

  /** Ask the last question once more. */
  again() {
    if (this.stop) return;
    const { messages } = this.chat;
    while (messages.length && messages[messages.length - 1].role === "assistant") messages.pop();
    const last = messages[messages.length - 1];
    if (last.returned && this.input.value.trim() === last.content) {
      this.setInput("");
      this.pictures.set([]);
    }
    this.answer();
  }

  async answer() {
    const { chat } = this;
    const asked = chat.messages[chat.messages.length - 1];
    delete asked.problem;
    delete asked.returned;
    this.keep();
    this.render();
    if (this.log.lastChild.classList.contains("error")) this.log.lastChild.remove();
    const answer = new Answer();
    answer.following = () => (this.atEnd() ? () => this.follow() : null);
    this.log.append(answer.node);
    this.follow();
    const stop = new AbortController();
    this.busy(stop);
    answer.begin();
    const problem = await this.stream(answer, stop.signal).catch((error) => error);
    const stopped = problem?.name === "AbortError";
    if (problem) answer.end(null, null, stopped ? "stopped" : "");
    if (!problem || answer.message.content || answer.message.reasoning) chat.messages.push(answer.message);
    else Object.assign(asked, { problem: stopped ? "Stopped." : sentence(problem), ...this.giveBack(chat, asked) });
    this.busy(null, stop);
    this.keep(chat);
    if (chat !== this.chat) return; // somebody has opened another one
    const atEnd = this.atEnd();
    this.render();
    if (problem && !stopped && answer.message === chat.messages[chat.messages.length - 1]) {
      this.log.append(failure(sentence(problem), () => this.again()));
    }
    if (atEnd) this.follow();
  }

  async stream(answer, signal) {
    const messages = this.chat.messages.filter(({ content }) => content).map((each) => ({ role: each.role, content: withPictures(each) }));
    let usage = null;
    let finish = null;
    for await (const chunk of complete(this.ask, withSettings(messages), signal)) {
      const atEnd = this.atEnd();
      this.running = chunk.id;
      if (chunk.prompt_progress) answer.read(chunk.prompt_progress);
      usage = chunk.usage ?? usage;
      for (const choice of chunk.choices) {
        answer.add(choice.delta);
        finish = choice.finish_reason ?? finish;
      }
      if (atEnd) this.follow();
    }
    answer.end(usage, finish);
  }

  /** A question without an answer goes back to the input, unless something else is being written there. */
  giveBack(chat, asked) {
    if (chat !== this.chat || this.input.value.trim()) return {};
    this.setInput(asked.content);
    this.pictures.set(asked.pictures ?? []);
    return { returned: true };
  }

  keep(chat = this.chat) {
    if (chat !== this.chat && !load(chat.id)) return; // deleted while it streamed
    const kept = save(chat);
    by("chat-full").hidden = kept;
    this.changed();
  }

  busy(stop, ended = null) {
    if (ended && ended !== this.stop) return;
    this.stop = stop;
    this.running = null;
    by("chat-stop").hidden = stop === null;
    by("chat-send").hidden = stop !== null;
  }

  /** Whoever scrolled up to read is left alone. */
  atEnd() {
    return this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 60;
  }

  follow() {
    this.log.scrollTop = this.log.scrollHeight;
  }
}

function sentence(error) {
  const text = error.message || String(error);
  return `${text[0].toUpperCase()}${text.slice(1)}`;
}
