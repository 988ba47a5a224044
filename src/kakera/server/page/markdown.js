// Markdown to a tree of plain objects. No document and no markup here: what a model writes can only become the nodes
// named below, and whatever is not understood stays text. Each step is linear in the text, whatever it is.
//
// Blocks: paragraph, heading {level}, code {language, text}, quote {blocks}, list {ordered, start, items}, rule,
// table {align, head, rows}. Inline: a string, or strong, em, del {children}, code {text}, link {href, children}, break.

const DEEPEST = 8; // of quotes and lists in one another, and of emphasis; what lies deeper is text
const MOST_COLUMNS = 50;
const LONGEST_ADDRESS = 2000;
const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^`\n]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+(.*))?$/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?: +|$)/;
const QUOTE = /^ {0,3}> ?/;
const DIVIDER = /^[ \t]*\|?(?:[ \t]*:?-+:?[ \t]*\|)*[ \t]*:?-+:?[ \t]*\|?[ \t]*$/;

export function parse(text) {
  return blocks(text.replace(/\r\n?/g, "\n").split("\n").map((line) => line.replaceAll("\t", "    ")), 0);
}

function blocks(lines, depth) {
  const found = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const [block, next] = oneBlock(lines, at, depth);
    found.push(block);
    at = next;
  }
  return found;
}

/** The block that begins in line `at`, and the line behind it. */
function oneBlock(lines, at, depth) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return code(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) {
    const words = (heading[2] ?? "").trim().split(" ");
    if (words.length > 1 && /^#+$/.test(words[words.length - 1])) words.pop();
    return [{ type: "heading", level: heading[1].length, children: inline(words.join(" ")) }, at + 1];
  }
  if (RULE.test(line)) return [{ type: "rule" }, at + 1];
  if (depth < DEEPEST && QUOTE.test(line)) return quote(lines, at, depth);
  if (depth < DEEPEST && ITEM.test(line)) return list(lines, at, depth);
  if (beginsTable(lines, at)) return table(lines, at);
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !interrupts(lines, end, depth)) end += 1;
  const text = lines.slice(at, end).map((each) => each.trim()).join("\n");
  return [{ type: "paragraph", children: inline(text) }, end];
}

/** Whether a paragraph ends before this line. */
function interrupts(lines, at, depth) {
  const line = lines[at];
  if (FENCE.test(line) || HEADING.test(line) || RULE.test(line)) return true;
  return (depth < DEEPEST && (QUOTE.test(line) || ITEM.test(line))) || beginsTable(lines, at);
}

/** Up to the closing fence, or to the end: a stream may not have it yet. */
function code(lines, at, [, fence, info]) {
  const indent = lines[at].search(/\S/);
  const closing = new RegExp(`^ {0,3}${fence[0]}{${fence.length},} *$`);
  let end = at + 1;
  while (end < lines.length && !closing.test(lines[end])) end += 1;
  const text = lines.slice(at + 1, end).map((line) => line.slice(Math.min(indent, line.search(/\S|$/)))).join("\n");
  return [{ type: "code", language: info.trim().split(/\s/)[0].slice(0, 40), text }, end + 1];
}

function quote(lines, at, depth) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  return [{ type: "quote", blocks: blocks(lines.slice(at, end).map((line) => line.replace(QUOTE, "")), depth + 1) }, end];
}

function list(lines, at, depth) {
  const first = ITEM.exec(lines[at]);
  const [base, ordered] = [first[1].length, /\d/.test(first[2])];
  const items = [];
  while (at < lines.length) {
    const item = ITEM.exec(lines[at]);
    if (!item || /\d/.test(item[2]) !== ordered || Math.abs(item[1].length - base) > 1 || RULE.test(lines[at])) break;
    const end = endOfItem(lines, at, item);
    const inner = lines.slice(at + 1, end).map((line) => line.slice(Math.min(item[0].length, line.search(/\S|$/))));
    items.push(blocks([lines[at].slice(item[0].length), ...inner], depth + 1));
    at = end;
  }
  return [{ type: "list", ordered, start: ordered ? Number.parseInt(first[2], 10) : null, items }, at];
}

/** An item goes on in what is indented by two or more, and in the lines of its last paragraph. */
function endOfItem(lines, at, item) {
  const least = item[1].length + 2;
  let end = at + 1;
  let blank = false;
  for (let i = at + 1; i < lines.length; i += 1) {
    if (!lines[i].trim()) {
      blank = true;
      continue;
    }
    const inside = lines[i].search(/\S/) >= least;
    if (!inside && (blank || interrupts(lines, i, 0))) break;
    blank = false;
    end = i + 1;
  }
  while (end < lines.length && !lines[end].trim()) end += 1;
  return end;
}

function cells(line) {
  const trimmed = line.trim().replace(/^\|/, "").replace(/(^|[^\\])\|$/, "$1");
  return trimmed.split(/(?<!\\)\|/).slice(0, MOST_COLUMNS).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function beginsTable(lines, at) {
  if (at + 1 >= lines.length || !lines[at].includes("|") || !lines[at + 1].includes("-")) return false;
  return DIVIDER.test(lines[at + 1]) && cells(lines[at]).length === cells(lines[at + 1]).length;
}

function table(lines, at) {
  const head = cells(lines[at]);
  const align = cells(lines[at + 1]).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : "left"));
  const rows = [];
  let end = at + 2;
  for (; end < lines.length && lines[end].trim() && lines[end].includes("|"); end += 1) {
    const row = cells(lines[end]);
    rows.push(head.map((_, i) => inline(row[i] ?? "")));
  }
  return [{ type: "table", align, head: head.map(inline), rows }, end];
}

// Inline

const KINDS = { "**": "strong", __: "strong", "*": "em", _: "em", "~~": "del" };
const SPECIAL = /[\\`*_~[\]!<\nh]/g;
const BARE = /https?:\/\/[^\s<>"'`\\^{}|]+/y;
const ANGLED = /<(https?:\/\/[^\s<>]+)>/y;

/** Strings and nodes. Openers wait on a stack until their closers come; those that never close are text. */
export function inline(text) {
  const reader = new Inline(text);
  while (reader.at < text.length) reader.step();
  return reader.finish();
}

class Inline {
  constructor(text) {
    this.text = text;
    this.at = 0;
    this.open = [{ mark: null, children: [] }]; // the innermost last
    this.ticks = null; // by length, the places of runs of backticks
  }

  get children() {
    return this.open[this.open.length - 1].children;
  }

  put(node) {
    const { children } = this;
    const last = children.length - 1;
    if (typeof node === "string" && typeof children[last] === "string") children[last] += node;
    else if (node !== "") children.push(node);
  }

  plain(count) {
    this.put(this.text.slice(this.at, this.at + count));
    this.at += count;
  }

  step() {
    SPECIAL.lastIndex = this.at;
    const next = SPECIAL.exec(this.text)?.index ?? this.text.length;
    if (next > this.at) this.plain(next - this.at);
    const sign = this.text[this.at];
    if (sign === "\\") this.escape();
    else if (sign === "`") this.code();
    else if (sign === "*" || sign === "_" || sign === "~") this.emphasis(sign);
    else if (sign === "[" || sign === "!") this.bracket();
    else if (sign === "]") this.link();
    else if (sign === "<" || sign === "h") this.address(sign === "<" ? ANGLED : BARE);
    else if (sign === "\n") this.lineBreak();
  }

  lineBreak() {
    this.put({ type: "break" });
    this.at += 1;
  }

  escape() {
    this.at += 1;
    const next = this.text[this.at] ?? "";
    if (next === "\n") return;
    if (/[!-/:-@[-`{-~]/.test(next)) this.plain(1);
    else this.put("\\");
  }

  code() {
    this.ticks ??= runs(this.text);
    const run = /`+/y;
    run.lastIndex = this.at;
    const count = run.exec(this.text)[0].length;
    const places = this.ticks.get(count);
    while (places.length && places[places.length - 1] <= this.at) places.pop();
    if (!places.length) {
      this.plain(count);
      return;
    }
    const end = places.pop();
    const inner = this.text.slice(this.at + count, end).replaceAll("\n", " ");
    const padded = inner.startsWith(" ") && inner.endsWith(" ") && inner.trim();
    this.put({ type: "code", text: padded ? inner.slice(1, -1) : inner });
    this.at = end + count;
  }

  emphasis(sign) {
    let end = this.at;
    while (this.text[end] === sign) end += 1;
    const count = end - this.at;
    const [before, after] = [this.text[this.at - 1] ?? " ", this.text[end] ?? " "];
    const word = sign === "_" && /[\p{L}\p{N}]/u.test(before) && /[\p{L}\p{N}]/u.test(after); // snake_case
    if (word || (sign === "~" ? count !== 2 : count > 3)) {
      this.plain(count);
      return;
    }
    const marks = count === 3 ? [sign + sign, sign] : [sign.repeat(count)];
    const closes = !/\s/.test(before);
    for (const mark of closes && this.isOpen(marks[marks.length - 1]) ? marks.reverse() : marks) {
      if (closes && this.isOpen(mark)) this.close(mark);
      else if (!/\s/.test(after) && this.open.length <= DEEPEST) this.open.push({ mark, children: [] });
      else this.put(mark);
      this.at += mark.length;
    }
  }

  /** Within the innermost link text only: what began outside of it can not end inside. */
  isOpen(mark) {
    for (let i = this.open.length - 1; i > 0; i -= 1) {
      if (this.open[i].mark === mark) return true;
      if (this.open[i].mark === "[") return false;
    }
    return false;
  }

  close(mark) {
    while (this.open[this.open.length - 1].mark !== mark) this.giveUp();
    const { children } = this.open.pop();
    this.put(children.length ? { type: KINDS[mark], children } : mark + mark);
  }

  /** The innermost opener becomes text. */
  giveUp() {
    const { mark, image, children } = this.open.pop();
    this.put((image ? "!" : "") + mark);
    for (const child of children) this.put(child);
  }

  /** `[`, and `![`: an image is a link to it, since nothing is loaded from elsewhere. */
  bracket() {
    const image = this.text[this.at] === "!";
    if ((image && this.text[this.at + 1] !== "[") || this.open.length > DEEPEST) {
      this.plain(1);
      return;
    }
    this.open.push({ mark: "[", image, children: [] });
    this.at += image ? 2 : 1;
  }

  link() {
    if (!this.open.some((each) => each.mark === "[")) {
      this.plain(1);
      return;
    }
    while (this.open[this.open.length - 1].mark !== "[") this.giveUp();
    const target = destination(this.text, this.at + 1);
    const href = target && address(target.href);
    if (!href || this.open.slice(0, -1).some((each) => each.mark === "[")) {
      this.giveUp();
      this.plain(1);
      return;
    }
    const { children } = this.open.pop();
    this.put({ type: "link", href, children: children.length ? children.map(flat) : [target.href] });
    this.at = target.end;
  }

  address(pattern) {
    pattern.lastIndex = this.at;
    const found = /[\p{L}\p{N}]/u.test(this.text[this.at - 1] ?? " ") && pattern === BARE ? null : pattern.exec(this.text);
    const shown = found && (found[1] ?? trimmed(found[0]));
    const href = shown && address(shown);
    if (!href || this.open.some((each) => each.mark === "[")) {
      this.plain(1);
      return;
    }
    this.put({ type: "link", href, children: [shown] });
    this.at += found[1] ? found[0].length : shown.length;
  }

  finish() {
    while (this.open.length > 1) this.giveUp();
    return this.open[0].children;
  }
}

/** No link within a link. */
const flat = (node) => (node.type === "link" ? node.children.join("") : node);

function runs(text) {
  const places = new Map();
  for (const run of text.matchAll(/`+/g)) {
    if (!places.has(run[0].length)) places.set(run[0].length, []);
    places.get(run[0].length).push(run.index);
  }
  for (const each of places.values()) each.reverse();
  return places;
}

/** `(address "title")` at `from`; parentheses in the address come in pairs. */
function destination(text, from) {
  if (text[from] !== "(") return null;
  let deep = 0;
  for (let i = from + 1; i < text.length && i - from <= LONGEST_ADDRESS; i += 1) {
    const sign = text[i];
    if (sign === "(") deep += 1;
    else if (sign === ")" && deep > 0) deep -= 1;
    else if (sign === ")") return { href: text.slice(from + 1, i), end: i + 1 };
    else if (sign === " ") {
      const title = /^ +(?:"[^"\n]{0,300}"|'[^'\n]{0,300}') *\)/.exec(text.slice(i, i + 320));
      return title && { href: text.slice(from + 1, i), end: i + title[0].length };
    } else if (sign === "\n" || sign === "<") return null;
  }
  return null;
}

/** What ends a sentence is no part of an address; a closing parenthesis is if it was opened in it. */
function trimmed(found) {
  let end = Math.min(found.length, LONGEST_ADDRESS);
  while (/[.,:;!?*_~'")\]]/.test(found[end - 1])) {
    if (found[end - 1] === ")" && found.slice(0, end).includes("(")) break;
    end -= 1;
  }
  return found.slice(0, end);
}

/** The address if it leads to the web, else null: no scripts, no data, no files, nothing relative. */
export function address(text) {
  if (text.length > LONGEST_ADDRESS || !/^https?:\/\//i.test(text)) return null;
  try {
    const url = new URL(text);
    return url.protocol === "http:" || url.protocol === "https:" ? url.href : null;
  } catch {
    return null;
  }
}
