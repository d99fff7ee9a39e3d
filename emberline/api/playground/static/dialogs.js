// Dialogs of the playground: choose a model, view code, shortcuts.

import { session } from "./api.js";
import { State } from "./chat.js";
import { CodeBlock } from "./code_block.js";
import { samples } from "./code_samples.js";
import { Message } from "./conversation.js";
import { models } from "./models.js";
import { Button, Dialog, html, Icon, useEffect, useLayoutEffect, useObservable, useRef, useState, visible } from "./ui.js";
import { workspace } from "./workspace.js";

const tokens = new Intl.NumberFormat("en");

const ACTIONS = { "on disk": ["load", "Load"], loaded: ["unload", "Unload"] }; // by a model's state
const MAX_OFFERS = 20;
const LONG_IMAGE = /(data:image\/[a-z]+;base64,[A-Za-z0-9+/]{40})[A-Za-z0-9+/=]{100,}/g;
const size = (bytes) => (bytes < 1 << 30 ? `${Math.round(bytes / (1 << 20))} MiB` : `${(bytes / (1 << 30)).toFixed(1)} GiB`);
const perMillion = (price) => Number((price * 1e6).toPrecision(4));

export function ModelDialog({ pane, onClose }) {
  useObservable(models);
  const [words, setWords] = useState("");
  const listed = models.all.filter((model) => [model.id, model.author, ...model.aliases].some((text) => text.toLowerCase().includes(words.toLowerCase())));
  const choose = (model) => {
    pane.settings.set({ model: model.id });
    workspace.changed();
    workspace.keep();
    onClose();
  };
  const [problem, setProblem] = useState(null);
  const attempt = async (act) => {
    try {
      await act();
      setProblem(null);
    } catch (error) {
      setProblem(error.message);
    }
  };
  const change = (model, action) => attempt(() => models.change(model.id, action));
  useEffect(() => void models.findOffers(), []);
  const named = (models.offers ?? []).filter((offer) => [offer.name, offer.id, ...offer.aliases].some((text) => text.toLowerCase().includes(words.toLowerCase())));
  const offered = words ? named : named.filter((offer) => offer.fits || models.pulling.has(offer.name));
  const pick = (event) => {
    const first = listed.find((model) => model.chats);
    if (event.key !== "Enter" || event.isComposing || !first) return;
    event.preventDefault();
    choose(first);
  };
  const move = (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const items = [...event.currentTarget.querySelectorAll("input, .models li > button:first-child")];
    items[(items.indexOf(document.activeElement) + step + items.length) % items.length].focus();
  };
  return html`<${Dialog} title="Choose a model" onClose=${onClose} class="wide">
    <div onKeyDown=${move}>
      <input type="search" autofocus placeholder="Search" aria-label="Search models" value=${words} onInput=${(event) => setWords(event.target.value)} onKeyDown=${pick} />
      ${problem && html`<p class="problem" role="alert"><${Icon} name="warn" />${visible(problem)}</p>`}
      <ul class="models">${listed.map((model) => html`<li key=${model.id} class="row"><button type="button" disabled=${!model.chats && !(model.predicts && !workspace.compares)} aria-current=${model.id === pane.settings.model} onClick=${() => choose(model)}>
        <span class="line"><bdi><b>${visible(model.name)}</b></bdi><${State} state=${models.changing.get(model.id) ?? model.state} named /></span>
        <span class="line soft"><bdi>${visible(model.id)}</bdi>
          <span>${[model.contextLen && `${tokens.format(model.contextLen)} tokens`, model.reasons && "reasoning", model.vision && "images", model.pricing && !model.predicts && `$${perMillion(model.pricing.prompt)} in, $${perMillion(model.pricing.completion)} out per M`, !model.chats && "does not chat"].filter(Boolean).join(" · ")}</span></span>
      </button>
      ${models.canLoad && model.managed && ACTIONS[model.state] && html`<${Button} text=${ACTIONS[model.state][1]} label=${`${ACTIONS[model.state][1]} ${visible(model.name)}`} class="small action" disabled=${models.changing.has(model.id)} onClick=${() => change(model, ACTIONS[model.state][0])} />`}</li>`)}</ul>
      ${offered.length > 0 && html`<h3>To download</h3><ul class="models offers" aria-label="Models to download">${offered.slice(0, MAX_OFFERS).map((offer) => html`<li key=${offer.id} class="row">
        <span class="offer"><span class="line"><bdi><b>${visible(offer.name)}</b></bdi><span>${size(offer.bytes)}${offer.fits ? "" : ", does not fit this machine"}</span></span>
          <span class="line soft"><span>${[offer.quantization, offer.license, ...offer.capabilities].filter(Boolean).map(visible).join(" · ")}</span></span>
          ${models.pulling.has(offer.name) && html`<${PullProgress} name=${offer.name} line=${models.pulling.get(offer.name)} />`}</span>
        <${Button} text="Pull" label=${`Pull ${visible(offer.name)}`} class="small action" disabled=${models.pulling.has(offer.name)} onClick=${() => attempt(() => models.pull(offer.name))} /></li>`)}</ul>`}
      ${!listed.length && !offered.length && html`<p class="soft">${models.all.length ? "No model has that name." : "The server has no models."}</p>`}
    </div>
  <//>`;
}

/** How far a download is; the server may not know its size yet. */
function PullProgress({ name, line }) {
  const text = line.total ? `${size(line.completed)} of ${size(line.total)}` : visible(line.status);
  return html`<span class="pull"><progress aria-label=${`Pulling ${visible(name)}`} max=${line.total || 1} value=${line.total ? line.completed : undefined}></progress><span class="soft">${text}</span></span>`;
}

export function CodeDialog({ onClose }) {
  const pane = workspace.pane;
  const { draft } = workspace;
  const path = pane.conversation.path;
  // As the next request would be: what is shown up to the last question, and the draft.
  const messages = draft.text || draft.images.length ? [...path, new Message("user", { content: draft.text, images: draft.images })] : path.at(-1)?.isReply ? path.slice(0, -1) : path;
  const shown = messages.length ? messages : [new Message("user", { content: "Hello!" })];
  const all = samples(pane.body(shown), { base: location.origin, affinity: pane.conversation.id, needsKey: session.key !== null });
  const [at, setAt] = useState(0);
  return html`<${Dialog} title="Code of this request" onClose=${onClose} class="wide">
    <div class="segments" role="group" aria-label="Language">${all.map(({ name }, i) => html`<button type="button" aria-pressed=${i === at} onClick=${() => setAt(i)}>${name}</button>`)}</div>
    <${Code} key=${at} ...${all[at]} />
    ${all[at].code !== shortened(all[at].code) && html`<p class="soft">Images are shortened here; <b>Copy</b> takes them whole.</p>`}
    ${session.key !== null && html`<p class="soft">Put your key into <code>EMBERLINE_API_KEY</code> first.</p>`}
  <//>`;
}

/** The code as it is shown: the bytes of an image are of no use to a reader. */
function shortened(code) {
  return code.replace(LONG_IMAGE, "$1…");
}

function Code({ language, code }) {
  const root = useRef();
  useLayoutEffect(() => {
    const block = new CodeBlock(language, () => code);
    for (const line of shortened(code).split("\n")) block.append(line);
    block.end();
    root.current.replaceChildren(block.node);
  }, [code]);
  return html`<div ref=${root} class="sample"></div>`;
}

export const SHORTCUTS = [
  ["Enter", "send the message"],
  ["Shift + Enter", "a new line"],
  ["Escape", "stop the reply; close a dialog"],
  ["/", "to the message"],
  ["Alt + N", "new chat"],
  ["Alt + H", "saved chats"],
  ["Alt + M", "choose a model"],
  ["Alt + C", "compare side by side, or stop to"],
  ["Alt + R", "regenerate the last reply"],
  ["Alt + S", "show or hide the settings"],
  ["Alt + V", "view code"],
  ["?", "this list"],
];

export function Shortcuts({ onClose }) {
  return html`<${Dialog} title="Keyboard shortcuts" onClose=${onClose}>
    <dl class="shortcuts">${SHORTCUTS.map(([keys, what]) => html`<div><dt>${keys.split(" + ").map((key) => html`<kbd>${key}</kbd>`)}</dt><dd>${what}</dd></div>`)}</dl>
  <//>`;
}
