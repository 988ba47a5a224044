// The turns of a conversation on the screen: questions, answers as they grow, and what went wrong.

import { button, copyButton, duration, el, number, rate } from "./dom.js";
import { showMarkdown } from "./markup.js";
import { thumbnail } from "./pictures.js";

const TICK_MILLISECONDS = 250;
const DRAW_MILLISECONDS = 60; // a long text is parsed in a few milliseconds, tokens may come faster
const seconds = (since) => (performance.now() - since) / 1000;

export function question(text, edit, pictures = []) {
  const shown = pictures.length ? el("div", { class: "line" }, ...pictures.map(thumbnail)) : null;
  const actions = el("div", { class: "actions" }, button("Edit", edit));
  return el("div", { class: "turn user" }, shown, el("div", { class: "text" }, text), actions);
}

export function failure(message, again) {
  return el("div", { class: "turn error", role: "alert" }, el("span", {}, message), button("Try again", again));
}

/** One answer. `message` is what is kept of it. */
export class Answer {
  constructor(message = { role: "assistant", content: "" }) {
    this.message = message;
    this.content = el("div", { class: "text markdown" });
    this.thoughts = el("div", { class: "text" });
    this.summary = el("summary");
    this.fold = el("details", { hidden: true }, this.summary, this.thoughts);
    this.bar = el("progress", { hidden: true, "aria-label": "prompt read" });
    this.figures = el("div", { class: "figures" });
    this.actions = el("div", { class: "actions" });
    this.node = el("div", { class: "turn assistant" }, this.fold, this.content, this.bar, this.figures, this.actions);
  }

  /** As it was kept. */
  static stored(message) {
    const answer = new Answer(message);
    showMarkdown(answer.content, message.content);
    if (message.reasoning) {
      answer.thoughts.append(message.reasoning);
      answer.summary.append(message.thought ?? "thoughts");
      answer.fold.hidden = false;
    }
    answer.figures.append(message.figures ?? "");
    return answer;
  }

  /** From here on it shows that time passes. */
  begin() {
    this.sent = performance.now();
    this.progress = null;
    this.thinking = this.first = null;
    this.pieces = { thinking: 0, content: 0 };
    this.node.setAttribute("aria-busy", "true");
    this.ticking = setInterval(() => this.tick(), TICK_MILLISECONDS);
    this.tick();
  }

  read(progress) {
    this.progress = { ...progress, at: performance.now() };
    this.begun ??= performance.now();
    this.tick();
  }

  add(delta) {
    if (!delta.content && !delta.reasoning_content) return;
    this.first ??= performance.now();
    this.bar.hidden = true;
    if (delta.reasoning_content) {
      this.thinking ??= { since: performance.now(), seconds: null };
      this.pieces.thinking += 1;
      this.message.reasoning = (this.message.reasoning ?? "") + delta.reasoning_content;
      this.fold.hidden = false;
      this.fold.classList.add("live");
      this.thoughts.append(delta.reasoning_content);
    }
    if (delta.content) {
      this.endThinking();
      this.pieces.content += 1;
      this.message.content += delta.content;
      this.drawing ??= setTimeout(() => this.draw(), DRAW_MILLISECONDS);
    }
  }

  draw() {
    clearTimeout(this.drawing);
    this.drawing = null;
    const follow = this.following?.();
    showMarkdown(this.content, this.message.content);
    follow?.();
  }

  endThinking() {
    if (this.thinking) this.thinking.seconds ??= seconds(this.thinking.since);
    this.fold.classList.remove("live");
  }

  tick() {
    if (this.thinking && this.thinking.seconds === null) {
      this.summary.textContent = `thinking · ${whole(seconds(this.thinking.since))} · about ${number(this.pieces.thinking)} tokens`;
    }
    if (this.first !== null) {
      const speed = (this.pieces.thinking + this.pieces.content) / seconds(this.first);
      this.figures.textContent = seconds(this.first) > 1 ? `about ${rate(speed)} tokens/s` : "";
    } else this.figures.textContent = this.progress ? this.reading() : `waiting for its turn · ${whole(seconds(this.sent))}`;
  }

  /** How far the prompt is, how fast it goes and how long it will take, as far as that is known. */
  reading() {
    const { total, cache, processed, time_ms: passed, at } = this.progress;
    this.bar.hidden = false;
    [this.bar.max, this.bar.value] = [total, processed];
    const parts = [`reading the prompt: ${number(processed)} of ${number(total)} tokens`];
    if (cache) parts.push(`${number(cache)} cached`);
    if (processed > cache && passed > 0) {
      const speed = (1000 * (processed - cache)) / passed;
      const left = (total - processed) / speed - seconds(at);
      parts.push(`${rate(speed)}\u00a0tokens/s`, left >= 1 ? `about ${whole(left)} left` : "nearly done");
    } else parts.push(whole(seconds(this.begun)));
    return parts.join(" · ");
  }

  /** Nothing more comes. `usage` and `finish` are null if it did not come to its end. */
  end(usage, finish, note = "") {
    clearInterval(this.ticking);
    this.draw();
    this.endThinking();
    this.bar.hidden = true;
    this.node.removeAttribute("aria-busy");
    const { message } = this;
    if (this.thinking) {
      const count = usage?.completion_tokens_details?.reasoning_tokens ?? this.pieces.thinking;
      message.thought = `thought for ${whole(this.thinking.seconds)} · ${number(count)} tokens`;
      this.summary.textContent = message.thought;
    }
    const parts = usage ? this.measured(usage) : [];
    if (!message.content && message.reasoning) parts.push("no answer behind the thinking");
    if (finish === "length") parts.push("cut at the length limit");
    else if (finish && finish !== "stop") parts.push(finish);
    if (note) parts.push(note);
    message.figures = parts.join(" · ");
    this.figures.textContent = message.figures;
  }

  measured(usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    const parts = [`${number(usage.prompt_tokens)} prompt tokens, ${number(cached)} cached`];
    if (this.first === null) return parts;
    parts.push(`first token after ${duration((this.first - this.sent) / 1000)}`);
    const passed = seconds(this.first);
    if (usage.completion_tokens > 1 && passed > 0) parts.push(`${rate((usage.completion_tokens - 1) / passed)}\u00a0tokens/s`);
    return parts;
  }

  /** What can be done with it once it has ended. `again` is null for all but the last answer. */
  offer(again) {
    const copy = this.message.content ? copyButton(() => this.message.content) : null;
    this.actions.replaceChildren(...[copy, again && button("Regenerate", again)].filter(Boolean));
  }
}

const whole = (value) => duration(Math.round(value));
