// One message: its text, reasoning, tool calls and images, what can be done with it, and what a reply has cost.

import { MarkdownWriter } from "./markdown.js";
import { Button, CopyButton, html, Icon, useLayoutEffect, useObservable, useRef, useState, visible } from "./ui.js";

const MAX_GROWING_CHARS = 4000; // of arguments, shown while they grow
const NAMES = { user: "You", assistant: "Assistant", tool: "Tool result" };

export function MessageView({ message, pane }) {
  useObservable(message);
  const [editing, setEditing] = useState(false);
  const streaming = message.status === "streaming";
  const name = message.isReply && message.model ? shortName(message.model) : NAMES[message.role];
  return html`<article class=${`message ${message.role}`} aria-label=${name} aria-busy=${streaming}>
    <header class=${message.parent.children.length < 2 ? "alone" : ""}><h2 class="who"><bdi>${visible(name)}</bdi></h2><${Branches} message=${message} conversation=${pane.conversation} /></header>
    ${message.reasoning && html`<${Reasoning} message=${message} />`}
    ${message.images.length > 0 && html`<div class="images">${message.images.map((url) => html`<img src=${url} alt="Attached image" />`)}</div>`}
    ${editing
      ? html`<${Editor} message=${message} pane=${pane} close=${() => setEditing(false)} />`
      : html`<${Content} message=${message} />`}
    ${message.toolCalls.length > 0 && html`<${ToolCalls} message=${message} pane=${pane} />`}
    ${message.error && html`<p class="problem" role="alert"><${Icon} name="warn" />${visible(message.error)}</p>`}
    ${!editing && !streaming && html`<${Actions} message=${message} pane=${pane} edit=${() => setEditing(true)} />`}
  </article>`;
}

function shortName(model) {
  return model.slice(model.lastIndexOf("/") + 1);
}

function Branches({ message, conversation }) {
  const siblings = message.parent.children;
  if (siblings.length < 2) return null;
  const at = siblings.indexOf(message);
  return html`<span class="branches" role="group" aria-label="Branches">
    <${Button} icon="left" label="Previous branch" class="quiet small" disabled=${at === 0} onClick=${() => conversation.turn(message, -1)} />
    <span>${at + 1} / ${siblings.length}</span>
    <${Button} icon="right" label="Next branch" class="quiet small" disabled=${at === siblings.length - 1} onClick=${() => conversation.turn(message, 1)} />
  </span>`;
}

/** Text that grows is written on, never drawn anew. */
function Markdown({ text, done }) {
  const root = useRef();
  const state = useRef({ writer: null, written: "" }).current;
  useLayoutEffect(() => {
    if (!state.writer || state.ended || !text.startsWith(state.written.slice(0, 64)) || text.length < state.written.length) {
      root.current.replaceChildren();
      Object.assign(state, { writer: new MarkdownWriter(root.current), written: "", ended: false });
    }
    state.writer.write(text.slice(state.written.length));
    state.written = text;
    if (done) {
      state.writer.end();
      state.ended = true;
    }
  }, [text, done]);
  return html`<div class="markdown" ref=${root}></div>`;
}

function Content({ message }) {
  const streaming = message.status === "streaming";
  if (message.role !== "assistant") return html`<div class="plain">${visible(message.content)}</div>`;
  if (streaming && !message.content && !message.reasoning && !message.toolCalls.length) {
    return html`<p class="waiting"><span class="dots" aria-hidden="true"><i></i><i></i><i></i></span>${message.notice ? html`<span class="notice" role="status">${visible(message.notice)}</span>` : html`<span class="visually-hidden">Waiting for the first token</span>`}</p>`;
  }
  return html`<${Markdown} text=${message.content} done=${!streaming} />`;
}

/** Open while the model reasons, closed once it answers; the reader's own choice stays. */
function Reasoning({ message }) {
  const [choice, setChoice] = useState(null);
  const thinking = message.status === "streaming" && !message.content && !message.toolCalls.length;
  const open = choice ?? thinking;
  const toggle = (event) => {
    event.preventDefault();
    setChoice(!open);
  };
  return html`<details class="reasoning" open=${open}>
    <summary onClick=${toggle}>${thinking ? "Reasoning…" : "Reasoning"}</summary>
    ${open && html`<${Markdown} text=${message.reasoning} done=${!thinking} />`}
  </details>`;
}

function ToolCalls({ message, pane }) {
  const calls = message.toolCalls;
  const [results, setResults] = useState(() => calls.map(() => ""));
  const open = message.status === "done" && !message.children.length;
  const submit = (event) => {
    event.preventDefault();
    pane.answerTools(message, calls.map((_, i) => results[i] ?? ""));
  };
  return html`<form class="tool-calls" onSubmit=${submit}>
    ${calls.map((call, i) => html`<div class="tool-call">
      <div class="head"><span class="badge">tool call</span> <code>${visible(call.name)}</code></div>
      <pre tabindex="0">${visible(message.status === "streaming" ? call.arguments.slice(-MAX_GROWING_CHARS) : pretty(call.arguments))}</pre>
      ${open && html`<label>Result of ${visible(call.name)}
        <textarea rows="2" placeholder="What the tool returns" value=${results[i] ?? ""} onInput=${(event) => setResults(Object.assign([...results], { [i]: event.target.value }))}></textarea>
      </label>`}
    </div>`)}
    ${open && html`<button class="button primary" type="submit">Send ${calls.length > 1 ? "results" : "result"}</button>`}
  </form>`;
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

function Editor({ message, pane, close }) {
  const [text, setText] = useState(message.content);
  const area = useRef();
  useLayoutEffect(() => area.current.focus(), []);
  const save = () => {
    if (text === message.content || pane.edit(message, text) !== false) close(); // refused: the text stays
  };
  const onKey = (event) => {
    if (event.key === "Escape") close();
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) save();
  };
  return html`<div class="editor">
    <textarea ref=${area} rows=${Math.min(12, text.split("\n").length + 1)} aria-label="Edit the message" value=${text} onInput=${(event) => setText(event.target.value)} onKeyDown=${onKey}></textarea>
    <div class="row"><button type="button" class="button primary" onClick=${save}>${message.role === "user" ? "Send as a branch" : "Save as a branch"}</button><button type="button" class="button" onClick=${close}>Cancel</button></div>
  </div>`;
}

function Actions({ message, pane, edit }) {
  const resumable = message.isReply && message.content && !message.toolCalls.length && (message.status === "lost" || message.status === "stopped" || message.finish === "length");
  return html`<footer>
    ${message.isReply && html`<${Metrics} message=${message} />`}
    <span class="actions">
      ${resumable && html`<${Button} icon="play" text="Continue" label="Go on where the reply was cut off" class="quiet" disabled=${pane.busy} onClick=${() => pane.continue(message)} />`}
      ${message.content && html`<${CopyButton} text=${message.content} label="Copy the message" />`}
      ${message.role !== "tool" && html`<${Button} icon="edit" label="Edit as a branch" class="quiet" disabled=${pane.busy} onClick=${edit} />`}
      ${message.isReply && html`<${Button} icon="redo" text=${message.status === "lost" || message.status === "failed" ? "Retry" : undefined} label="Regenerate" class="quiet" disabled=${pane.busy} onClick=${() => pane.regenerate(message)} />`}
    </span>
  </footer>`;
}

const dollars = new Intl.NumberFormat("en", { style: "currency", currency: "USD", maximumSignificantDigits: 3 });
const number = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

function Metrics({ message }) {
  const m = message.metrics;
  const notes = { stopped: "stopped", length: "reached max tokens" };
  const note = notes[message.status] ?? notes[message.finish];
  if (!m) return note ? html`<span class="metrics"><span>${note}</span></span>` : html`<span></span>`;
  const shown = [
    m.tokensPerS && ["Tokens per second", `${m.tokensPerS >= 100 ? number.format(m.tokensPerS) : m.tokensPerS.toFixed(1)} tok/s`],
    ["Time to first token", `TTFT ${duration(m.ttftMs)}`],
    ["Output tokens", `${m.exact ? "" : "≈ "}${number.format(m.completionTokens)} out`],
    m.promptTokens !== undefined && ["Input tokens", `${number.format(m.promptTokens)} in`],
    m.promptTokens !== undefined && ["Input tokens that came from the prefix cache", `${number.format(m.cachedTokens)} cached`, m.cachedTokens ? "good" : ""],
    m.exact && ["Cost", m.cost === undefined ? "no price" : dollars.format(m.cost)],
    note && ["How the reply ended", note],
  ].filter(Boolean);
  return html`<span class="metrics">${shown.map(([title, text, kind]) => html`<span title=${title} class=${kind ?? ""}>${text}</span>`)}</span>`;
}

function duration(ms) {
  return ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`;
}
