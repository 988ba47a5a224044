// The tree of markdown.js as elements. Text goes in as text; links lead to the web only and tell it nothing of us.

import { copyButton, el } from "./dom.js";
import { parse } from "./markdown.js";

const shown = new WeakMap();

/** Show Markdown in `place`. Blocks that are there already stay, so that a selection survives while a text grows. */
export function showMarkdown(place, text) {
  const tree = parse(text);
  const keys = tree.map((node) => JSON.stringify(node));
  const before = shown.get(place) ?? [];
  let same = 0;
  while (same < keys.length && keys[same] === before[same]) same += 1;
  while (place.childNodes.length > same) place.lastChild.remove();
  place.append(...tree.slice(same).map(block));
  shown.set(place, keys);
}

function block(node) {
  switch (node.type) {
    case "heading":
      return el(`h${Math.min(6, node.level + 2)}`, {}, ...inline(node.children)); // below the page's own
    case "code":
      return code(node);
    case "quote":
      return el("blockquote", {}, ...node.blocks.map(block));
    case "list":
      return el(node.ordered ? "ol" : "ul", { start: node.start }, ...node.items.map((item) => el("li", {}, ...item.map(block))));
    case "table":
      return table(node);
    case "rule":
      return el("hr");
    default:
      return el("p", {}, ...inline(node.children));
  }
}

function code({ language, text }) {
  const head = el("div", { class: "code-head" }, el("span", {}, language), copyButton(() => text));
  return el("div", { class: "code" }, head, el("pre", { tabIndex: 0 }, el("code", {}, text)));
}

function table({ align, head, rows }) {
  const cell = (tag) => (children, i) => el(tag, { class: align[i] }, ...inline(children));
  const line = (tag) => (cells) => el("tr", {}, ...cells.map(cell(tag)));
  return el("div", { class: "scroll" }, el("table", {}, el("thead", {}, line("th")(head)), el("tbody", {}, ...rows.map(line("td")))));
}

function inline(nodes) {
  return nodes.map((node) => {
    if (typeof node === "string") return node;
    if (node.type === "break") return el("br");
    if (node.type === "code") return el("code", {}, node.text);
    if (node.type !== "link") return el(node.type, {}, ...inline(node.children));
    return el("a", { href: node.href, title: node.href, target: "_blank", rel: "noopener noreferrer" }, ...inline(node.children));
  });
}
