// Power and temperature of the cards since the page was opened, at most ten minutes. Hidden where no card is.

import { by, el, rate } from "./dom.js";

const KEPT = 600;
const SPACE = "http://www.w3.org/2000/svg";
const history = [];

export function showPower(status) {
  by("power-panel").hidden = status.cards.length === 0;
  if (!status.cards.length) return;
  history.push(status.cards);
  if (history.length > KEPT) history.shift();
  by("power").replaceChildren(...status.cards.map(card));
}

function card(reading, index) {
  const series = (name) => history.map((cards) => cards[index]?.[name] ?? null);
  const limit = reading.limit_watts ?? Math.max(1, ...series("watts").filter((watts) => watts !== null));
  const chart = document.createElementNS(SPACE, "svg");
  chart.setAttribute("viewBox", "0 0 100 100");
  chart.setAttribute("preserveAspectRatio", "none");
  chart.setAttribute("role", "img");
  chart.setAttribute("aria-label", `GPU ${index}: power and temperature over time`);
  chart.append(line(series("watts"), limit, "watts"), line(series("celsius"), 100, "celsius"));
  const watts = el("span", {}, el("span", { class: "swatch c3" }), reading.watts === null ? "power not known" : `${rate(reading.watts)} W of ${rate(limit)} W`);
  const celsius = el("span", {}, el("span", { class: "swatch c5" }), reading.celsius === null ? "not known" : `${reading.celsius} °C`);
  const busy = reading.utilization === null ? "" : `${reading.utilization} % busy`;
  const figures = el("span", { class: "line dim" }, watts, celsius, busy);
  return el("div", { class: "card" }, el("div", { class: "line spread" }, el("strong", {}, `GPU ${index}: ${reading.name}`), figures), chart);
}

function line(values, most, style) {
  const node = document.createElementNS(SPACE, "polyline");
  const step = 100 / Math.max(60, values.length - 1);
  const points = values.map((value, i) => (value === null ? null : `${(i * step).toFixed(2)},${(98 - (96 * Math.min(value, most)) / most).toFixed(2)}`));
  node.setAttribute("points", points.filter((point) => point !== null).join(" "));
  node.setAttribute("class", style);
  return node;
}
