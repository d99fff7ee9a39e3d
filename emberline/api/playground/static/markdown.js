// Markdown that arrives piece by piece, as DOM nodes. Only the open block is drawn anew as it grows, and its size is
// bounded, so the cost of a reply is linear in its length. No HTML is parsed: what is not Markdown is text.

import { CodeBlock } from "./code_block.js";
import { element, inline } from "./markdown_inline.js";

const MAX_OPEN_CHARS = 4000; // beyond, a block is cut in two, and the first part is final
const MAX_CARRIED_CHARS = 1000; // of a line that the next block repeats
const MAX_DEPTH = 10; // of lists and quotations inside each other

// Nothing in them can match the same characters in two ways: a line of any length takes linear time.
const FENCE = /^(\s*)(`{3,}|~{3,}(?!~))([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(?:\s+(.*)|\s*)$/;
const QUOTE = /^ {0,3}>\s?(.*)$/;
const TABLE_RULE = /^\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?$/; // of a trimmed line

/** Writes Markdown into `root` as it comes. */
export class MarkdownWriter {
  #root;
  #slot; // of the open block
  #lines = []; // of the open block
  #size = 0; // its characters
  #carried = 0; // how many of its lines repeat the block before
  #partial = ""; // the last line, until its end has arrived
  #code = null; // the open code block
  #fence = null; // what ends it

  constructor(root) {
    this.#root = root;
    this.#newSlot();
  }

  write(text) {
    const lines = (this.#partial + text).split("\n");
    this.#partial = lines.pop();
    for (const line of lines) this.#line(line.endsWith("\r") ? line.slice(0, -1) : line);
    if (this.#code) this.#code.showPartial(this.#fence.test(this.#partial) ? "" : this.#partial);
    else this.#draw();
  }

  /** The text is complete. */
  end() {
    const last = this.#partial;
    this.#partial = "";
    if (last) this.#line(last);
    this.#code?.end();
    this.#commit();
  }

  #newSlot() {
    this.#slot = element("div", { class: "block" });
    this.#root.append(this.#slot);
  }

  #commit() {
    if (!this.#lines.length) return;
    this.#slot.replaceChildren(...blocks(this.#lines));
    this.#lines = [];
    this.#size = this.#carried = 0;
    this.#newSlot();
  }

  #draw() {
    while (this.#partial && this.#size + this.#partial.length > MAX_OPEN_CHARS) this.#cut();
    this.#slot.replaceChildren(...blocks(this.#partial ? [...this.#lines, this.#partial] : this.#lines));
  }

  /** Makes what there is of the open block final. An open code block or table goes on in the next one. */
  #cut() {
    if (this.#lines.length <= this.#carried) {
      const end = this.#partial.lastIndexOf(" ", MAX_OPEN_CHARS) + 1 || MAX_OPEN_CHARS;
      this.#push(this.#partial.slice(0, end));
      this.#partial = this.#partial.slice(end);
    }
    const fences = this.#lines.filter((line) => FENCE.test(line));
    const header = isTableRule(this.#lines[1]) ? this.#lines.slice(0, 2) : [];
    const carried = (fences.length % 2 ? [fences.at(-1)] : header).filter((line) => line.length < MAX_CARRIED_CHARS);
    this.#commit();
    carried.forEach((line) => this.#push(line));
    this.#carried = carried.length;
  }

  #push(line) {
    this.#lines.push(line);
    this.#size += line.length + 1;
  }

  #line(line) {
    if (this.#code) {
      if (!this.#fence.test(line)) return this.#code.append(line);
      this.#code.end();
      this.#code = null;
      return this.#newSlot();
    }
    const fence = line.match(FENCE);
    if (fence && fence[1].length < 4 && !(ITEM.test(this.#lines[0] ?? "") && fence[1])) {
      this.#commit();
      this.#code = new CodeBlock(fence[3].trim());
      this.#fence = closing(fence[2]);
      return this.#slot.replaceChildren(this.#code.node); // what was drawn of the unfinished line goes
    }
    const inList = ITEM.test(this.#lines[0] ?? "");
    const gap = this.#lines.at(-1) === "";
    if (gap && !(inList && (ITEM.test(line) || /^\s{2,}/.test(line) || !line.trim()))) this.#commit();
    if (!line.trim()) return this.#lines.length ? this.#push("") : undefined;
    if (HEADING.test(line) || (RULE.test(line) && !gap)) this.#commit();
    this.#push(line);
    if (this.#size > MAX_OPEN_CHARS) this.#cut();
  }
}

function closing(fence) {
  return new RegExp(`^ {0,3}${fence[0]}{${fence.length},}\\s*$`);
}

/** Complete lines as nodes. */
function blocks(lines, depth = 0) {
  const nodes = [];
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    let found;
    if (!line.trim()) at++;
    else if ((found = line.match(FENCE))) at = fenced(nodes, lines, at, found);
    else if ((found = line.match(HEADING))) {
      // Headings of a reply stay below the page's own.
      const node = element(`h${Math.min(found[1].length + 2, 6)}`, { class: `h${found[1].length}` });
      inline(node, found[2].trimEnd().replace(/\s#+$/, "").trimEnd());
      nodes.push(node);
      at++;
    } else if (RULE.test(line)) {
      nodes.push(element("hr"));
      at++;
    } else if (QUOTE.test(line) && depth < MAX_DEPTH) {
      const inner = [];
      for (; at < lines.length && lines[at].trim() && (QUOTE.test(lines[at]) || !startsBlock(lines[at])); at++) {
        inner.push(lines[at].match(QUOTE)?.[1] ?? lines[at]);
      }
      const node = element("blockquote");
      node.append(...blocks(inner, depth + 1));
      nodes.push(node);
    } else if (ITEM.test(line) && depth < MAX_DEPTH) at = list(nodes, lines, at, depth);
    else if (line.includes("|") && isTableRule(lines[at + 1]) && lines[at + 1].includes("|")) at = table(nodes, lines, at);
    else {
      const from = at++;
      while (at < lines.length && lines[at].trim() && !startsBlock(lines[at])) at++;
      const node = element("p");
      inline(node, lines.slice(from, at).map((part) => part.trim()).join("\n"));
      nodes.push(node);
    }
  }
  return nodes;
}

function isTableRule(line = "") {
  return TABLE_RULE.test(line.trim());
}

function startsBlock(line) {
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line);
}

function fenced(nodes, lines, at, [, indent, fence, language]) {
  const code = new CodeBlock(language.trim());
  const end = closing(fence);
  for (at++; at < lines.length && !end.test(lines[at].trimStart()); at++) code.append(lines[at].replace(new RegExp(`^\\s{0,${indent.length}}`), ""));
  code.end();
  nodes.push(code.node);
  return at + 1;
}

const indentOf = (line) => line.match(/^\s*/)[0].replaceAll("\t", "    ").length;

function list(nodes, lines, at, depth) {
  const [, , mark] = lines[at].match(ITEM);
  const base = indentOf(lines[at]);
  const ordered = /\d/.test(mark);
  const node = element(ordered ? "ol" : "ul");
  if (ordered && parseInt(mark) !== 1) node.setAttribute("start", String(parseInt(mark)));
  while (at < lines.length) {
    const found = lines[at].match(ITEM);
    if (!found || indentOf(lines[at]) > base + 1 || indentOf(lines[at]) < base || /\d/.test(found[2]) !== ordered || RULE.test(lines[at])) break;
    const inner = [found[3] ?? ""];
    for (at++; at < lines.length; at++) {
      const line = lines[at];
      if (!line.trim()) {
        // A gap belongs to the item only if something of it follows.
        const next = lines[at + 1];
        if (next !== undefined && next.trim() && indentOf(next) <= base) break;
        inner.push("");
      } else if (indentOf(line) > base + 1) inner.push(line.replace(new RegExp(`^\\s{0,${base + found[2].length + 1}}`), ""));
      else if (startsBlock(line) || !lines[at - 1].trim()) break;
      else inner.push(line);
    }
    while (at < lines.length && !lines[at].trim()) at++;
    node.append(item(inner, depth));
  }
  nodes.push(node);
  return at;
}

function item(lines, depth) {
  const node = element("li");
  const task = lines[0].match(/^\[([ xX])\]\s+(.*)$/);
  if (task) {
    node.className = "task";
    const done = task[1] !== " ";
    node.append(element("span", { role: "img", "aria-label": done ? "done" : "to do" }, done ? "☑ " : "☐ "));
    lines = [task[2], ...lines.slice(1)];
  }
  node.append(...blocks(lines, depth + 1));
  return node;
}

const cells = (line) => line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));

function table(nodes, lines, at) {
  const aligned = cells(lines[at + 1]).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "end") : ""));
  const row = (line, tag) => {
    const node = element("tr");
    const texts = cells(line);
    for (let i = 0; i < aligned.length; i++) {
      const cell = element(tag, aligned[i] ? { class: aligned[i] } : {});
      inline(cell, texts[i] ?? "");
      node.append(cell);
    }
    return node;
  };
  const head = element("thead");
  const body = element("tbody");
  head.append(row(lines[at], "th"));
  for (at += 2; at < lines.length && lines[at].includes("|"); at++) body.append(row(lines[at], "td"));
  const node = element("table");
  node.append(head, body);
  const frame = element("div", { class: "table", tabindex: "0", role: "region", "aria-label": "Table" });
  frame.append(node);
  nodes.push(frame);
  return at;
}
