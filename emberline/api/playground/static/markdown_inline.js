// Text inside a block: emphasis, code, links. Each delimiter without a partner is searched for once, so that no text
// takes more than linear time.

import { visible } from "./ui.js";

const MAX_DEPTH = 8;
const SPECIAL = /[\\`*_~[!<\n]|https?:\/\//g;
const LINK = /^!?\[([^[\]]{0,500})\]\(\s{0,4}<?([^\s<>()]{0,2000}(?:\([^\s<>()]{0,200}\)[^\s<>()]{0,500})?)>?(?:\s{1,4}"[^"]{0,300}")?\s{0,4}\)/;
const BARE = /^https?:\/\/[^\s<>"'`]{1,2000}/;
const PAIRS = [["***", "strong", "em"], ["**", "strong"], ["__", "strong"], ["~~", "del"], ["*", "em"], ["_", "em"]];

export function element(tag, attributes = {}, text = "") {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text) node.textContent = text;
  return node;
}

/** Appends the inline Markdown of `text` to `parent`. */
export function inline(parent, text, depth = 0) {
  const missing = new Set(); // delimiters without a closing one in the rest of the text
  const special = new RegExp(SPECIAL);
  let start = 0;
  for (let found; (found = special.exec(text)); ) {
    const made = token(text, found.index, missing, depth);
    if (!made) continue;
    parent.append(visible(text.slice(start, found.index)), made.node);
    start = special.lastIndex = made.end;
  }
  parent.append(visible(text.slice(start)));
}

function token(text, at, missing, depth) {
  switch (text[at]) {
    case "\n":
      return { node: element("br"), end: at + 1 };
    case "\\":
      return /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "") ? { node: document.createTextNode(text[at + 1]), end: at + 2 } : null;
    case "`":
      return codeSpan(text, at, missing);
    case "h":
      return bareLink(text, at);
    case "<": {
      const end = text.slice(at, at + 2000).indexOf(">");
      const url = end > 0 ? text.slice(at + 1, at + end) : "";
      return /^https?:\/\/[^\s<>]+$/.test(url) ? { node: link(url, url), end: at + end + 1 } : null;
    }
    case "!":
    case "[":
      return linked(text, at, depth);
    default:
      return depth < MAX_DEPTH ? emphasis(text, at, missing, depth) : null;
  }
}

function codeSpan(text, at, missing) {
  const run = text.slice(at).match(/^`+/)[0];
  if (!missing.has(run)) {
    for (let end = at + run.length; (end = text.indexOf(run, end)) >= 0; ) {
      let after = end + run.length;
      if (text[after] !== "`") {
        const code = text.slice(at + run.length, end).replaceAll("\n", " ");
        return { node: element("code", {}, visible(/^ .*\S.* $/.test(code) ? code.slice(1, -1) : code)), end: after };
      }
      while (text[after] === "`") after++;
      end = after;
    }
    missing.add(run);
  }
  return { node: document.createTextNode(run), end: at + run.length };
}

function emphasis(text, at, missing, depth) {
  for (const [mark, tag, innerTag] of PAIRS) {
    if (!text.startsWith(mark, at) || missing.has(mark)) continue;
    const word = mark[0] === "_";
    if (!/\S/.test(text[at + mark.length] ?? "") || (word && /\w/.test(text[at - 1] ?? ""))) continue;
    for (let end = at + mark.length; (end = text.indexOf(mark, end + 1)) >= 0; ) {
      if (/\s/.test(text[end - 1]) || (word && /\w/.test(text[end + mark.length] ?? ""))) continue;
      if (mark.length === 1 && (text[end + 1] === mark || text[end - 1] === mark)) continue;
      const node = element(tag);
      const inner = innerTag ? node.appendChild(element(innerTag)) : node;
      inline(inner, text.slice(at + mark.length, end), depth + 1);
      return { node, end: end + mark.length };
    }
    missing.add(mark);
  }
  return null;
}

function linked(text, at, depth) {
  const found = text.slice(at, at + 3600).match(LINK);
  if (!found) return null;
  const [whole, label, url] = found;
  const end = at + whole.length;
  if (whole[0] === "!") return { node: link(url, `🖼 ${label || "image"}`), end }; // never fetched
  const node = link(url, "");
  if (depth < MAX_DEPTH) inline(node, label || url, MAX_DEPTH);
  else node.textContent = visible(label || url);
  return { node, end };
}

function bareLink(text, at) {
  const found = text.slice(at, at + 2100).match(BARE);
  const url = found?.[0].replace(/[.,;:!?)\]*_~]+$/, "");
  return url && !/^https?:\/\/$/.test(url) ? { node: link(url, url), end: at + url.length } : null;
}

/** A link to another site; any other address is shown as text. The address is the tooltip: a label may lie. */
function link(url, text) {
  let safe = null;
  try {
    const parsed = new URL(url);
    if (parsed.protocol === "http:" || parsed.protocol === "https:") safe = parsed.href;
  } catch {
    // not an absolute address
  }
  if (!safe) return element("span", { class: "dead-link", title: visible(url).slice(0, 300) }, visible(text));
  return element("a", { href: safe, target: "_blank", rel: "noopener noreferrer nofollow", title: visible(safe).slice(0, 300) }, visible(text));
}
