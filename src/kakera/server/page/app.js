// The page: asks for the key if there is one, polls the server, and hands its status to the parts.

import { Rates, showActive, showFinished, showTiles } from "./activity.js";
import { Chat } from "./chat.js";
import { by, draw, duration, el, setText } from "./dom.js";
import { showHistory } from "./history.js";
import { showMemory } from "./memory.js";
import { showPower } from "./power.js";

const POLL_MILLISECONDS = 250; // of the load, which is a line: whatever comes or goes shows within 0.3 s
const STATUS_MILLISECONDS = 1000; // of all the rest, unless the load has changed
const KEY = "kakera-key"; // in sessionStorage: this tab only
const rates = new Rates();
let chat = null;
let load = "";
let looked = Number.NEGATIVE_INFINITY;

function ask(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  return fetch(path, { ...options, headers, credentials: "omit" });
}

function link(state, text) {
  by("link").dataset.state = state;
  setText(by("link"), text);
}

function show(status) {
  by("board").hidden = false;
  by("key-form").hidden = true;
  document.title = `kakera · ${status.model}`;
  setText(by("model"), status.model);
  setText(by("about"), `${status.about}; kakera ${status.version}`);
  link("ok", "connected");
  setText(by("uptime"), `· up ${duration(Math.round(status.uptime_seconds))}`);
  const counted = rates.add(status.clock_seconds, { generated: status.generated_tokens, prefilled: status.engine.counters.prefilled_tokens });
  showTiles(status, counted);
  draw(by("memory"), status.memory, (place) => showMemory(place, status));
  load = `${status.engine.running} ${status.engine.waiting}`;
  const active = { active: status.active, waiting: status.engine.waiting, own: chat?.running };
  draw(by("active"), active, (place, data) => showActive(place, data, () => chat.cancel()));
  draw(by("finished"), status.finished, showFinished);
  showPower(status);
  draw(by("warnings"), status.warnings, (place) => showWarnings(place, status));
  if (!chat) {
    chat = new Chat(ask, () => chat && showHistory(chat));
    chat.pictures.offer(status.sees);
    by("chat-new").addEventListener("click", () => {
      chat.open(null);
      chat.input.focus({ preventScroll: true });
    });
    window.addEventListener("storage", () => showHistory(chat)); // another tab has kept or deleted one
    showHistory(chat);
  }
}

function showWarnings(place, status) {
  const over = status.memory.some((memory) => memory.state === "over");
  place.replaceChildren(...status.warnings.map((line) => el("p", { class: over ? "notice over" : "notice" }, line)));
}

function askForKey() {
  const wrong = sessionStorage.getItem(KEY) !== null;
  sessionStorage.removeItem(KEY);
  by("board").hidden = true;
  by("key-form").hidden = false;
  setText(by("key-error"), wrong ? "The server does not take this key." : "");
  link("wait", "waiting for the key");
  by("key").focus();
}

/** One look at the server; false if it wants a key first. */
async function look() {
  try {
    const response = await ask("/v1/kakera/status");
    if (response.status === 401) {
      askForKey();
      return false;
    }
    if (!response.ok) throw new Error(`the server answered ${response.status}`);
    show(await response.json());
  } catch (error) {
    link("lost", "no connection");
    console.debug(error);
  }
  return true;
}

/** Whether it is time to look: at least once a second, and when requests have come or gone. */
async function due() {
  if (performance.now() - looked >= STATUS_MILLISECONDS) return true;
  const health = await fetch("/health", { credentials: "omit" }).then((response) => response.json()).catch(() => ({}));
  return health.running !== undefined && `${health.running} ${health.waiting}` !== load;
}

async function poll() {
  if (!document.hidden && (await due())) {
    looked = performance.now();
    if (!(await look())) return;
  }
  setTimeout(poll, POLL_MILLISECONDS);
}

by("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, by("key").value);
  by("key").value = "";
  looked = Number.NEGATIVE_INFINITY;
  poll();
});
poll();
