// A pane's transcript, which follows the reply while the reader is at its end; and the composer below the panes.

import { MessageView } from "./message_view.js";
import { Button, html, Icon, useLayoutEffect, useObservable, useRef, useState, visible } from "./ui.js";
import { workspace } from "./workspace.js";

const SAMPLES = [
  ["Explain", "Explain to a ten-year-old how a lighthouse works."],
  ["Write code", "Write a Python function that finds the longest palindrome in a string."],
  ["Compare", "Compare tea and coffee in a table with three rows."],
  ["Plan", "Plan a weekend in the mountains as a short list."],
];
const NEAR_END_PX = 8;
const MAX_IMAGE_BYTES = 8 << 20;
const IMAGE_TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"];

export function Transcript({ pane, label, openModels }) {
  useObservable(pane);
  useObservable(pane.conversation);
  const scroller = useRef();
  const inner = useRef();
  const follow = useRef(true); // the end, as it moves
  useLayoutEffect(() => {
    const node = scroller.current;
    let before = 0;
    const onScroll = () => {
      // Only a reader scrolls up, or down to the end again. A page that became shorter leaves him at its very end.
      const below = node.scrollHeight - node.scrollTop - node.clientHeight;
      if (node.scrollTop < before) follow.current = below < 1;
      else if (node.scrollTop > before && below < NEAR_END_PX) follow.current = true;
      before = node.scrollTop;
    };
    const observer = new ResizeObserver(() => {
      if (!follow.current || pane.conversation.isEmpty) return;
      node.scrollTop = node.scrollHeight;
      before = node.scrollTop; // the scroll event of this is not the reader's
    });
    // Drawing may have moved to the end before the scroll event of a small step up arrives.
    const onReach = (event) => {
      if (event.deltaY < 0 || event.type === "touchmove" || ["PageUp", "ArrowUp", "Home"].includes(event.key)) follow.current = false;
    };
    const listeners = { scroll: onScroll, wheel: onReach, touchmove: onReach, keydown: onReach };
    for (const [name, listener] of Object.entries(listeners)) node.addEventListener(name, listener, { passive: true });
    observer.observe(inner.current);
    return () => observer.disconnect();
  }, []);
  // What was just sent is shown, wherever the reader was.
  useLayoutEffect(() => {
    if (pane.conversation.isEmpty) return;
    follow.current = true; // the reply may be there before the scroll event is
    scroller.current.scrollTop = scroller.current.scrollHeight;
  }, [pane.conversation.last]);
  const path = pane.conversation.path;
  return html`<section class="pane" aria-label=${label}>
    ${workspace.compares && html`<${PaneHead} pane=${pane} openModels=${openModels} />`}
    <div class="scroller" ref=${scroller} tabindex="-1">
      <div class="transcript" ref=${inner} role="log" aria-live="off" aria-label="Conversation">
        ${path.length ? path.map((message) => html`<${MessageView} key=${message.id} message=${message} pane=${pane} />`) : html`<${Welcome} pane=${pane} />`}
      </div>
    </div>
  </section>`;
}

function PaneHead({ pane, openModels }) {
  useObservable(pane.settings);
  return html`<div class="pane-head"><${ModelButton} pane=${pane} open=${openModels} /><span class="soft">${pane.settings.summary}</span></div>`;
}

export function ModelButton({ pane, open }) {
  useObservable(pane.settings);
  const model = pane.model;
  return html`<button type="button" class="model-button" onClick=${() => open(pane)} aria-haspopup="dialog" title="Choose a model">
    ${model && html`<${State} state=${model.state} />`}<bdi>${visible(model?.name ?? "No model")}</bdi><${Icon} name="down" />
  </button>`;
}

export function State({ state, named = false }) {
  return html`<span class=${`state s-${state.replaceAll(" ", "-")}`} title=${state}><i aria-hidden="true"></i>${named ? state : html`<span class="visually-hidden">${state}</span>`}</span>`;
}

function Welcome({ pane }) {
  useObservable(pane.settings);
  const ask = (text) => workspace.panes.forEach((each) => each.send(text, []));
  return html`<div class="welcome">
    <div class="flame" aria-hidden="true"></div>
    <h2>What should the model do?</h2>
    <p>${pane.model ? html`You talk to <bdi>${visible(pane.model.name)}</bdi>, on your own machine.` : "No model is loaded yet."}</p>
    <div class="samples">${SAMPLES.map(([title, text]) => html`<button type="button" onClick=${() => ask(text)}><b>${title}</b><span>${text}</span></button>`)}</div>
  </div>`;
}

export function Composer() {
  useObservable(workspace);
  const panes = workspace.panes;
  panes.forEach(useObservable); // their number changes only with the whole page: see `key` in app.js
  panes.map((pane) => pane.settings).forEach(useObservable);
  const { draft } = workspace;
  const { text, images } = useObservable(draft);
  const [problem, setProblem] = useState(null);
  const area = useRef();
  const vision = panes.every((pane) => pane.model?.vision);
  const blocked = panes.map((pane) => pane.settings.problem).find(Boolean);
  const shown = problem || (blocked && panes.map((pane) => pane.refused).find(Boolean)) || blindness(panes, images);
  useLayoutEffect(() => area.current.focus(), []);
  useLayoutEffect(() => {
    area.current.style.height = "auto";
    area.current.style.height = `${Math.min(area.current.scrollHeight, innerHeight * 0.4)}px`;
  }, [text]);
  // A file may be dropped anywhere on the page: the browser would leave the page to open it.
  useLayoutEffect(() => {
    const onDrag = (event) => {
      if (!event.dataTransfer?.types.includes("Files")) return;
      event.preventDefault();
      if (event.type === "drop") attach(event.dataTransfer.files);
    };
    for (const type of ["dragover", "drop"]) document.addEventListener(type, onDrag);
    return () => ["dragover", "drop"].forEach((type) => document.removeEventListener(type, onDrag));
  }, []);

  const send = () => {
    if (workspace.busy || draft.isEmpty) return;
    if (panes.filter((pane) => pane.refuses(images)).length) return;
    panes.forEach((pane) => pane.send(text, images));
    draft.set({ text: "", images: [] });
    setProblem(null);
    area.current.focus();
  };
  const onKey = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  };
  const attach = async (files) => {
    setProblem(null);
    for (const file of [...files]) { // a copy: the browser empties its own list
      if (!IMAGE_TYPES.includes(file.type)) setProblem(`${visible(file.name)} is not an image that a model reads: PNG, JPEG, WebP or GIF.`);
      else if (file.size > MAX_IMAGE_BYTES) setProblem(`${visible(file.name)} is larger than ${MAX_IMAGE_BYTES >> 20} MiB.`);
      else {
        const url = await dataUrl(file);
        draft.set({ images: [...draft.images, url] });
      }
    }
  };
  const onPaste = (event) => vision && event.clipboardData.files.length && (event.preventDefault(), attach(event.clipboardData.files));
  return html`<div class="composer" onPaste=${onPaste}>
    ${shown && html`<p class="problem" role="alert"><${Icon} name="warn" />${shown}</p>`}
    ${images.length > 0 && html`<div class="images">${images.map((url, i) => html`<span class="thumb"><img src=${url} alt=${`Image ${i + 1}`} />
      <${Button} icon="close" label=${`Remove image ${i + 1}`} class="small" onClick=${() => draft.set({ images: images.filter((_, j) => j !== i) })} /></span>`)}</div>`}
    <div class="box">
      ${vision && html`<label class="button square quiet" title="Attach images"><${Icon} name="image" /><span class="visually-hidden">Attach images</span>
        <input type="file" class="visually-hidden" accept=${IMAGE_TYPES.join(",")} multiple onChange=${(event) => (attach(event.target.files), (event.target.value = ""))} /></label>`}
      <textarea ref=${area} id="prompt" rows="1" aria-label="Message" placeholder=${panes.length > 1 ? "Ask both…" : "Ask anything…"} value=${text}
        onInput=${(event) => draft.set({ text: event.target.value })} onKeyDown=${onKey}></textarea>
      ${workspace.busy
        ? html`<${Button} icon="stop" label="Stop" class="primary round" onClick=${() => workspace.stop()} />`
        : html`<${Button} icon="send" label="Send" class="primary round" disabled=${draft.isEmpty} onClick=${send} />`}
    </div>
    <p class="hint">Enter sends, Shift + Enter starts a line. Models make mistakes.</p>
  </div>`;
}

/** Says which models keep the images from being sent. Returns null if all take them. */
function blindness(panes, images) {
  const said = panes.flatMap((pane, i) => {
    if (!pane.isBlindTo(images)) return [];
    return `${panes.length > 1 ? `${["Left", "Right"][i]}: ` : ""}${visible(pane.model.name)} takes no images.`;
  });
  return said.length ? `${said.join(" ")} Remove the ${images.length > 1 ? "images" : "image"}, or choose a model that takes images.` : null;
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
