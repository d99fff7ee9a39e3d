// A code block that grows line by line: finished lines are colored once and never touched again.

import { element } from "./markdown_inline.js";
import { copyText, visible } from "./ui.js";

const MAX_COLORED_CHARS = 40_000; // beyond, text is plain: each color is a node
const CHUNK_LINES = 64;
const WORDS =
  "abstract and as assert async await begin bool boolean break case catch char class const continue def default defer del delete do double elif else end enum " +
  "except export extends extern false final finally float fn for from func function global go if impl implements import in instanceof int interface is lambda let " +
  "local long loop match mod module move mut namespace new nil none nonlocal not null or package pass private protected pub public raise ref return self select " +
  "select set short sizeof static string struct super switch template then this throw trait true try type typedef typeof undefined union unsafe use using var void " +
  "where while with yield insert into values update create table join order group by limit echo fi esac done";
const KEYWORDS = new Set(WORDS.split(" "));
const HASH_COMMENTS = /^(?:py|python|sh|bash|shell|zsh|console|ruby|rb|yaml|yml|toml|r|make|makefile|dockerfile|perl|elixir|ini)$/i;
const PLAIN = /^(?:|text|txt|plain|markdown|md|output|log)$/i;
const TOKEN = /("(?:[^"\\]|\\.)*"?|'(?:[^'\\]|\\.)*'?|`(?:[^`\\]|\\.)*`?)|((?<!:)\/\/.*|\/\*.*?(?:\*\/|$)|--\s.*|<!--.*)|(#.*)|\b(\d[\w.]*)\b|\b([A-Za-z_]\w*)\b(\()?/g;

export class CodeBlock {
  #code = element("code");
  #partial = document.createTextNode("");
  #language;
  #size = 0;
  #chunk = null; // of lines: the browser lays out only the one that grows
  #lines = 0

  /** `copied` returns the text that the button copies, where the shown text is not all of it. */
  constructor(language, copied = () => this.#code.textContent) {
    this.#language = language.split(/\s/)[0].slice(0, 30);
    const label = visible(this.#language) || "code";
    const copy = element("button", { type: "button", class: "copy", "aria-label": `Copy the ${label}` }, "Copy");
    copy.addEventListener("click", async () => {
      await copyText(copied());
      copy.textContent = "Copied";
      setTimeout(() => (copy.textContent = "Copy"), 1500);
    });
    const head = element("figcaption");
    head.append(element("span", {}, label), copy);
    const pre = element("pre", { tabindex: "0" });
    pre.append(this.#code);
    this.#code.append(this.#partial);
    this.node = element("figure", { class: "code" });
    this.node.append(head, pre);
  }

  append(line) {
    this.#partial.data = "";
    this.#size += line.length + 1;
    const nodes = document.createDocumentFragment();
    if (this.#size > MAX_COLORED_CHARS || PLAIN.test(this.#language)) nodes.append(visible(line));
    else colored(nodes, visible(line), HASH_COMMENTS.test(this.#language));
    nodes.append("\n");
    if (this.#lines++ % CHUNK_LINES === 0) {
      this.#chunk = element("span", { class: "chunk" });
      this.#partial.before(this.#chunk);
    }
    this.#chunk.append(nodes);
  }

  /** Shows the last line while it grows. */
  showPartial(text) {
    this.#partial.data = visible(text);
  }

  end() {
    this.#partial.data = "";
  }
}

function colored(parent, line, hash) {
  let start = 0;
  for (const found of line.matchAll(TOKEN)) {
    if (found.index < start) continue;
    const [whole, string, comment, hashed, number, word, called] = found;
    const kind = string ? "string" : (comment && !hash) || (hashed && hash) ? "comment" : number ? "number" : word && KEYWORDS.has(word.toLowerCase()) ? "keyword" : word && called ? "call" : "";
    if (!kind) continue;
    const text = called ? word : whole;
    parent.append(line.slice(start, found.index), element("span", { class: `t-${kind}` }, text));
    start = found.index + text.length;
  }
  parent.append(line.slice(start));
}
