// Elements and figures. Everything that a server or a model said goes in as text, never as markup.

/** An element; children are elements or plain text. `data` and `class` are the only special properties. */
export function el(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined) continue;
    if (name === "class") node.className = value;
    else if (name in node) node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null).map((child) => (child instanceof Node ? child : String(child))));
  return node;
}

export const by = (id) => document.getElementById(id);

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

const shown = new WeakMap();

/** Draw only if `data` is not what is shown already: a selection, a scroll position and a focus survive that way. */
export function draw(place, data, render) {
  const key = JSON.stringify(data);
  if (shown.get(place) === key) return;
  shown.set(place, key);
  render(place, data);
}

/** A table; cells are text or nodes. `columns`: [title, class name]. */
export function table(caption, columns, rows) {
  const head = el("tr", {}, ...columns.map(([title, style]) => el("th", { class: style, scope: "col" }, title)));
  const body = rows.map((row) => el("tr", {}, ...row.map((cell, i) => el("td", { class: columns[i][1] }, cell ?? ""))));
  return el("table", { "aria-label": caption }, el("thead", {}, head), el("tbody", {}, ...body));
}

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

export function bytes(count) {
  if (count === null || count === undefined) return "–";
  if (count === 0) return "0";
  if (count >= 1e8) return `${(count / 1e9).toFixed(2)} GB`;
  return `${(count / 1e6).toFixed(1)} MB`;
}

export const number = (value) => (value === null || value === undefined ? "–" : whole.format(value));

/** A rate: one digit behind the point as long as that says something. */
export function rate(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  return value < 100 ? value.toFixed(1) : whole.format(value);
}

export const percent = (share) => `${Math.round(100 * share)} %`;

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 10 && !Number.isInteger(seconds)) return `${seconds.toFixed(2)} s`;
  if (seconds < 120) return `${seconds.toFixed(0)} s`;
  if (seconds < 7200) return `${Math.floor(seconds / 60)} min`;
  return seconds < 172800 ? `${Math.floor(seconds / 3600)} h` : `${Math.floor(seconds / 86400)} days`;
}

export function button(text, action, properties = {}) {
  const node = el("button", { type: "button", class: "small", ...properties }, text);
  node.addEventListener("click", action);
  return node;
}

/** Copies what `text` gives when it is pressed, and says so for a moment. */
export function copyButton(text) {
  const node = button("Copy", async () => {
    node.textContent = (await copy(text())) ? "Copied" : "Not allowed";
    setTimeout(() => (node.textContent = "Copy"), 1500);
  });
  return node;
}

async function copy(text) {
  if (navigator.clipboard) {
    const done = await navigator.clipboard.writeText(text).then(() => true, () => false);
    if (done) return true;
  }
  const area = el("textarea", { class: "hidden-label", value: text }); // over plain HTTP, elsewhere than on localhost
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  return done;
}
