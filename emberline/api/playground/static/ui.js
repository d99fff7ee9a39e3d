// What every page shares: the view library, observable state, icons, dialogs, theme and the page's frame.

import { h, render } from "./vendor/preact.js";
import { useEffect, useLayoutEffect, useReducer, useRef, useState } from "./vendor/hooks.js";
import htm from "./vendor/htm.js";

export const html = htm.bind(h);
export { render, useEffect, useLayoutEffect, useRef, useState };

/** State that views watch: `changed` redraws them. */
export class Observable {
  #listeners = new Set();

  subscribe(listener) {
    this.#listeners.add(listener);
    return () => this.#listeners.delete(listener);
  }

  changed() {
    for (const listener of [...this.#listeners]) listener();
  }

  /** Sets fields and redraws. */
  set(fields) {
    Object.assign(this, fields);
    this.changed();
  }
}

/** Redraws the calling component whenever the observable has changed. */
export function useObservable(observable) {
  const [, redraw] = useReducer((n) => n + 1, 0);
  useLayoutEffect(() => observable.subscribe(redraw), [observable]);
  return observable;
}

/** Control characters and bidirectional overrides made visible: they are data, not commands to a terminal or a reader. */
export function visible(text) {
  return String(text ?? "")
    .replace(/[\u0000-\u0008\u000b-\u001f]/g, (c) => (c === "\r" ? "" : String.fromCharCode(0x2400 + c.charCodeAt(0))))
    .replace(/[\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, (c) => `[U+${c.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}]`);
}

/** A new random id: crypto.randomUUID exists only on https and loopback. */
export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return Array.from(bytes, (b) => b.toString(16).padStart(2, "0")).join("");
}

const PATHS = {
  plus: "M12 5v14M5 12h14",
  stop: "M7 7h10v10H7z",
  send: "M12 19V5M5 12l7-7 7 7",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  edit: "M4 20h4L19 9l-4-4L4 16zM13.500 6.500l4 4",
  redo: "M20 11a8 8 0 1 0-2.300 6.300M20 4v7h-7",
  play: "M8 5l11 7-11 7z",
  chats: "M4 5h12v9H9l-3 3v-3H4zM19 9h1v8h-2v3l-3-3h-4",
  columns: "M4 5h16v14H4zM12 5v14",
  code: "M8 8l-4 4 4 4M16 8l4 4-4 4",
  upload: "M12 15V4M7 9l5-5 5 5M4 20h16",
  download: "M12 4v11M7 10l5 5 5-5M4 20h16",
  sliders: "M4 7h10M18 7h2M4 17h2M10 17h10M16 4.500v5M8 14.500v5",
  close: "M6 6l12 12M18 6L6 18",
  left: "M15 6l-6 6 6 6",
  right: "M9 6l6 6-6 6",
  down: "M6 9l6 6 6-6",
  theme: "M12 4a8 8 0 1 0 0 16zM12 4a8 8 0 0 1 0 16",
  key: "M14.500 9.500a4 4 0 1 0-3 4l1.500 1.500h2v2h2v2h3v-3l-5.500-5.500zM7.500 9.500h.01",
  help: "M9 9a3 3 0 1 1 4 2.800c-.8.3-1 .9-1 1.700M12 17h.01M12 3a9 9 0 1 0 0 18 9 9 0 0 0 0-18z",
  image: "M4 5h16v14H4zM8.500 10h.01M4 17l5-4 4 3 3-2 4 3",
  check: "M5 12l5 5L19 7",
  warn: "M12 8v5M12 16.500h.01M12 3L2 20h20z",
};

export function Icon({ name }) {
  return html`<svg class="icon" viewBox="0 0 24 24" aria-hidden="true"><path d=${PATHS[name]} /></svg>`;
}

/** A button with an icon; `text` is shown beside it, else `label` is its name for screen readers and the tooltip. */
export function Button({ icon, label, text, class: kind = "", ...rest }) {
  return html`<button type="button" class=${`button ${text ? "" : "square"} ${kind}`} title=${label} aria-label=${text ? undefined : label} ...${rest}>
    ${icon && html`<${Icon} name=${icon} />`}${text && html`<span>${text}</span>`}
  </button>`;
}

/** A modal dialog: the browser keeps the focus inside and closes it on Escape. */
export function Dialog({ title, onClose, children, class: kind = "" }) {
  const ref = useRef();
  useLayoutEffect(() => {
    const dialog = ref.current;
    const before = document.activeElement;
    dialog.showModal();
    return () => {
      dialog.close(); // gives the focus back, too early: Chromium types nothing into it while the dialog is in the page
      document.activeElement?.blur();
      setTimeout(() => before?.isConnected && before.focus());
    };
  }, []);
  // The browser closes it on a second Escape, whatever `cancel` says: a dialog that has to stay is shown again.
  const onClosed = () => {
    const dialog = ref.current;
    if (!dialog) return; // closed by us
    onClose();
    setTimeout(() => dialog.isConnected && !dialog.open && dialog.showModal());
  };
  return html`<dialog ref=${ref} class=${kind} aria-label=${title} onCancel=${(event) => (event.preventDefault(), onClose())} onClose=${onClosed}
    onClick=${(event) => event.target === ref.current && onClose()}>
    <div class="dialog">
      <header><h2>${title}</h2><${Button} icon="close" label="Close" onClick=${onClose} /></header>
      ${children}
    </div>
  </dialog>`;
}

export function CopyButton({ text, label = "Copy" }) {
  const [done, setDone] = useState(false);
  const copy = async () => {
    await copyText(typeof text === "function" ? text() : text);
    setDone(true);
    setTimeout(() => setDone(false), 1500);
  };
  return html`<${Button} icon=${done ? "check" : "copy"} label=${done ? "Copied" : label} onClick=${copy} class="quiet" />`;
}

export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Without https the clipboard is closed to pages, except for a selection.
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}

/** Saves a text as a file. */
export function downloadText(text, name, type) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

/** Spoken by screen readers: text put here is announced once. */
let announcer;
export function announce(text) {
  if (announcer) announcer.textContent = text;
}

function Announcer() {
  return html`<div class="visually-hidden" role="status" aria-live="polite" ref=${(node) => (announcer = node)}></div>`;
}

const THEMES = ["auto", "light", "dark"];
const stored = (() => {
  try {
    return localStorage.getItem("emberline.theme");
  } catch {
    return null;
  }
})();
const theme = Object.assign(new Observable(), { name: THEMES.includes(stored) ? stored : "auto" });
document.documentElement.dataset.theme = theme.name;

function ThemeButton() {
  useObservable(theme);
  const turn = () => {
    const name = THEMES[(THEMES.indexOf(theme.name) + 1) % THEMES.length];
    document.documentElement.dataset.theme = name;
    try {
      localStorage.setItem("emberline.theme", name);
    } catch {
      // storage may be blocked; the theme then lasts until the page is left
    }
    theme.set({ name });
    announce(`Theme: ${name}`);
  };
  return html`<${Button} icon="theme" label=${`Theme: ${theme.name}`} onClick=${turn} class="quiet" />`;
}

// Every page is listed here; a page names itself with `here`.
const PAGES = [
  { path: "/", name: "Playground" },
  { path: "/operations", name: "Operations" },
];

/** The frame of every page: navigation, theme, and what the page adds to the right. */
export function Shell({ here, actions, children }) {
  return html`
    <header class="top">
      <a class="brand" href="/" aria-label="Emberline"><span class="flame" aria-hidden="true"></span><b>Emberline</b></a>
      <nav aria-label="Pages">${PAGES.map((page) => html`<a href=${page.path} aria-current=${page.path === here ? "page" : undefined}>${page.name}</a>`)}</nav>
      <div class="right">${actions}<${ThemeButton} /></div>
    </header>
    ${children}
    <${Announcer} />`;
}
