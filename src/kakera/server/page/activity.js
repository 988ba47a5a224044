// What runs and what ran: the tiles, the running requests with their progress, and the last finished ones.

import { button, by, duration, el, number, percent, rate, setText, table } from "./dom.js";

/** Rates over the last few seconds, from counters that only grow. */
export class Rates {
  constructor(seconds = 6) {
    this.seconds = seconds;
    this.seen = [];
  }

  /** Per second, by name; null until there are two samples. */
  add(clock, counters) {
    if (this.seen.length && clock < this.seen[this.seen.length - 1].clock) this.seen = []; // the server is a new one
    this.seen.push({ clock, counters });
    while (this.seen.length > 2 && clock - this.seen[1].clock >= this.seconds) this.seen.shift();
    const first = this.seen[0];
    const passed = clock - first.clock;
    if (passed <= 0) return null;
    return Object.fromEntries(Object.keys(counters).map((name) => [name, (counters[name] - first.counters[name]) / passed]));
  }
}

export function showTiles(status, rates) {
  const engine = status.engine;
  const used = engine.pages_total - engine.pages_lent - engine.pages_free;
  setText(by("t-running"), number(engine.running));
  setText(by("t-slots"), `of ${engine.slots_total - engine.slots_lent} slots`);
  setText(by("t-queue"), number(engine.waiting));
  setText(by("t-decode"), rates ? rate(rates.generated) : "–");
  setText(by("t-prefill"), rates ? rate(rates.prefilled) : "–");
  const prompts = engine.counters.prompt_tokens;
  setText(by("t-cached"), prompts ? percent(engine.counters.cached_tokens / prompts) : "–");
  setText(by("t-pages"), percent(engine.pages_total ? used / engine.pages_total : 0));
  const lent = engine.pages_lent ? `; ${number(engine.pages_lent)} given back` : "";
  setText(by("t-pages-note"), `in use; ${number(engine.pages_cached)} cached${lent}`);
}

/** `own`: the id of the request that this page's chat has sent, which `cancel` ends. */
export function showActive(place, { active, waiting, own }, cancel) {
  const focused = document.activeElement?.dataset.cancel;
  const queue = waiting ? [el("p", { class: "dim" }, `${number(waiting)} waiting for a place`)] : [];
  if (!active.length && !waiting) queue.push(el("p", { class: "empty" }, "Nothing runs."));
  place.replaceChildren(...active.map((each) => request(each, each.id === own ? cancel : null)), ...queue);
  if (focused) place.querySelector("[data-cancel]")?.focus();
}

function request(active, cancel) {
  const reading = active.generated === 0;
  const speed = active.decode_seconds > 0.2 ? ` at ${rate(active.generated / active.decode_seconds)} tokens/s` : "";
  const state = reading
    ? `reading the prompt: ${number(active.done)} of ${number(active.target)} tokens`
    : `${number(active.generated)} tokens generated${speed}`;
  const figures = `prompt ${number(active.prompt_tokens)}, cached ${number(active.cached_tokens)}, ${duration(active.seconds)}`;
  const end = cancel ? button("Cancel", cancel, { "data-cancel": "own", title: "It is this page's own" }) : null;
  const bar = el("progress", { max: active.target || 1, value: active.done, "aria-label": `prompt read, request ${short(active.id)}` });
  return el(
    "div",
    { class: "request" },
    el("div", { class: "line spread" }, el("span", {}, state), el("span", { class: "dim line" }, el("code", {}, short(active.id)), end)),
    reading ? bar : null,
    el("div", { class: "dim" }, figures),
  );
}

/** The first letters of an id are the same for all; the next ones tell requests apart. */
function short(id) {
  return id.replace(/^[a-z]+[-_]/, "").slice(0, 8);
}

export function showFinished(place, finished) {
  if (!finished.length) {
    place.replaceChildren(el("p", { class: "empty" }, "None since the start."));
    return;
  }
  const columns = [
    ["ended", ""], ["prompt", "number"], ["cached", "number"], ["not more cached because", "note"],
    ["first token", "number"], ["tokens", "number"], ["guessed", "number"], ["tokens/s", "number"], ["finish", ""],
  ];
  const rows = finished.map((line) => [
    new Date(line.at * 1000).toLocaleTimeString(),
    number(line.prompt),
    number(line.cached),
    line.miss || (line.cached ? "all that was known is used" : ""),
    duration(line.ttft_s),
    number(line.generated),
    line.drafted ? `${number(line.accepted)} of ${number(line.drafted)}` : "",
    rate(line.tokens_per_s),
    line.finish,
  ]);
  place.replaceChildren(table("Last requests", columns, rows));
}
