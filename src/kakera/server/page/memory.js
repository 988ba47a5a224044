// The memory map: of each memory the plan as a stacked bar, what is measured, and the plan row by row.

import { bytes, el, table } from "./dom.js";

export function showMemory(place, status) {
  if (!status.memory.length) {
    place.replaceChildren(el("p", { class: "empty" }, `This model has no memory plan. Processes hold ${bytes(status.resident_bytes)}.`));
    return;
  }
  place.replaceChildren(...status.memory.map((memory, i) => map(memory, status.memory[i + 1])));
}

/** Cards share a plan: the rows stand below the last of the memories that have the same. */
function map(memory, next) {
  const planned = memory.rows.reduce((sum, row) => sum + row.planned, 0);
  const inUse = memory.used === null ? "" : `, ${bytes(memory.used)} of ${bytes(memory.capacity)} in use by all programs`;
  return el(
    "div",
    { class: "memory", "data-state": memory.state },
    el("div", { class: "memory-head" }, el("strong", {}, memory.name), el("span", { class: "dim" }, `${bytes(planned)} planned${inUse}`)),
    line("plan", plannedBar(memory, planned)),
    memory.used === null ? null : line("measured", measuredBar(memory)),
    sameRows(memory, next) ? null : rows(memory),
  );
}

function sameRows(one, other) {
  return other !== undefined && JSON.stringify(one.rows) === JSON.stringify(other.rows);
}

function line(name, bar) {
  return el("div", { class: "bar-line" }, el("span", { class: "dim" }, name), bar);
}

/** The rows of the plan side by side; of each the used part in full colour. */
function plannedBar(memory, planned) {
  const parts = memory.rows.map((row, i) => {
    const fill = el("div", { class: "fill" });
    fill.style.width = `${row.planned && row.used !== null ? (100 * row.used) / row.planned : 0}%`;
    const part = el("div", { class: `part c${i % 10}`, title: `${row.name}: ${bytes(row.planned)} planned, ${bytes(row.used)} used` }, fill);
    part.style.width = `${(100 * row.planned) / planned}%`;
    return part;
  });
  return el("div", { class: "bar", role: "img", "aria-label": `${memory.name}: the plan; the table below has its rows` }, ...parts);
}

/** What all programs use of the whole, and the part that must stay free at its end. */
function measuredBar(memory) {
  const label = `${memory.name}: ${bytes(memory.capacity - memory.used)} free; ${bytes(memory.margin)} must stay free`;
  const fill = el("div", { class: "fill" });
  fill.style.width = `${(100 * memory.used) / memory.capacity}%`;
  const cliff = el("div", { class: "cliff" });
  cliff.style.width = `${(100 * memory.margin) / memory.capacity}%`;
  return el("div", { class: "bar now", role: "img", "aria-label": label, title: label }, fill, cliff);
}

function rows(memory) {
  const lines = memory.rows.map((row, i) => [
    el("span", { class: "row-name" }, el("span", { class: `swatch c${i % 10}` }), row.name),
    bytes(row.planned),
    bytes(row.used),
    row.note,
  ]);
  const columns = [["row of the plan", ""], ["planned", "number"], ["used", "number"], ["", "note note-cell"]];
  return table(`Plan of ${memory.name}`, columns, lines);
}
