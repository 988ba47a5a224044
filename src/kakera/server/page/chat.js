// The chat: streams from /v1/chat/completions, folds the thinking away, says what the cache saved and how fast it was.

import { by, duration, el, number, rate } from "./dom.js";

/** The data of server-sent events, as they come. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      if (block.startsWith("data: ")) yield block.slice(6);
    }
  }
}

/** One answer on the screen. */
class Answer {
  constructor() {
    this.began = performance.now();
    this.first = null;
    this.text = "";
    this.content = el("div", { class: "text" });
    this.thoughts = el("div", { class: "text" });
    this.fold = el("details", { hidden: true }, el("summary", {}, "thinking"), this.thoughts);
    this.figures = el("div", { class: "figures" }, "waiting for the first token");
    this.node = el("div", { class: "turn assistant" }, this.fold, this.content, this.figures);
  }

  add(delta) {
    if (!delta.content && !delta.reasoning_content) return;
    if (this.first === null) {
      this.first = performance.now();
      this.figures.textContent = "";
    }
    if (delta.reasoning_content) {
      this.fold.hidden = false;
      this.thoughts.append(delta.reasoning_content);
    }
    if (delta.content) {
      this.text += delta.content;
      this.content.append(delta.content);
    }
  }

  end(usage, finish) {
    const parts = [];
    if (usage) {
      const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
      parts.push(`${number(usage.prompt_tokens)} prompt tokens, ${number(cached)} cached`);
      if (this.first !== null) {
        parts.push(`first token after ${duration((this.first - this.began) / 1000)}`);
        const seconds = (performance.now() - this.first) / 1000;
        if (usage.completion_tokens > 1 && seconds > 0) parts.push(`${rate((usage.completion_tokens - 1) / seconds)}\u00a0tokens/s`);
      }
    }
    if (!this.text && !this.fold.hidden) parts.push("no answer behind the thinking");
    if (finish && finish !== "stop") parts.push(finish);
    this.figures.textContent = parts.join(" · ");
  }

  fail(message) {
    this.figures.textContent = message;
    this.figures.classList.add("bad");
  }
}

export class Chat {
  /** `ask(path, options)` is fetch with the key. */
  constructor(ask) {
    this.ask = ask;
    this.messages = [];
    this.stop = null;
    this.log = by("chat-log");
    this.input = by("chat-input");
    by("chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    this.input.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.send();
      }
    });
    by("chat-stop").addEventListener("click", () => this.stop?.abort());
    by("chat-new").addEventListener("click", () => this.clear());
    this.clear();
  }

  clear() {
    this.stop?.abort();
    this.messages = [];
    this.log.replaceChildren(el("p", { class: "empty" }, "Nothing is stored: the conversation lives in this tab."));
    this.input.focus({ preventScroll: true });
  }

  async send() {
    const text = this.input.value.trim();
    if (!text || this.stop) return;
    if (!this.messages.length) this.log.replaceChildren();
    this.input.value = "";
    const question = { role: "user", content: text };
    const messages = this.messages;
    const answer = new Answer();
    this.log.append(el("div", { class: "turn user" }, el("div", { class: "text" }, text)), answer.node);
    this.follow(true);
    this.busy(new AbortController());
    try {
      await this.stream([...messages, question], answer);
    } catch (error) {
      answer.fail(error.name === "AbortError" ? "stopped" : error.message);
    }
    if (answer.text) messages.push(question, { role: "assistant", content: answer.text });
    this.busy(null);
  }

  async stream(messages, answer) {
    const body = {
      messages,
      stream: true,
      stream_options: { include_usage: true },
      chat_template_kwargs: { enable_thinking: by("chat-think").checked },
    };
    const response = await this.ask("/v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(body),
      signal: this.stop.signal,
    });
    if (!response.ok) {
      const problem = await response.json().catch(() => null);
      throw new Error(problem?.error?.message ?? `the server answered ${response.status}`);
    }
    let usage = null;
    let finish = null;
    for await (const data of events(response.body)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      usage = chunk.usage ?? usage;
      for (const choice of chunk.choices) {
        const atEnd = this.atEnd();
        answer.add(choice.delta);
        finish = choice.finish_reason ?? finish;
        this.follow(atEnd);
      }
    }
    answer.end(usage, finish);
    this.follow(this.atEnd());
  }

  busy(stop) {
    this.stop = stop;
    by("chat-stop").hidden = stop === null;
    by("chat-send").disabled = stop !== null;
  }

  /** Whoever scrolled up to read is left alone. */
  atEnd() {
    return this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 60;
  }

  follow(yes) {
    if (yes) this.log.scrollTop = this.log.scrollHeight;
  }
}
