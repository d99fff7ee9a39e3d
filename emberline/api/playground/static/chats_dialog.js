// The dialog of saved chats: where they are kept; open, search, rename, export and delete them.

import { chats } from "./chats.js";
import { Button, Dialog, downloadText, html, Icon, useLayoutEffect, useObservable, useRef, useState, visible } from "./ui.js";
import { workspace } from "./workspace.js";

const PLACES = [
  ["tab", "Only in this tab", "A chat is gone when its tab is closed."],
  ["browser", "In this browser", "Chats stay on this computer. The server keeps none."],
  ["server", "On the server", "Chats are kept for the account of your key, for every browser that signs in with it."],
];
const SEARCH_MS = 200;
const day = new Intl.DateTimeFormat("en", { dateStyle: "medium" });

export function ChatsDialog({ onClose }) {
  useObservable(chats);
  const [words, setWords] = useState("");
  const [found, setFound] = useState(null); // {rows, more}; null: not known yet
  const [problem, setProblem] = useState(null);
  const latest = useRef(0); // number of the last search: an earlier one may answer later

  const list = async (after) => {
    const search = ++latest.current;
    if (!chats.store) return setFound({ rows: [], more: false });
    try {
      const { data, has_more } = await chats.store.list(words, after);
      if (search === latest.current) setFound((before) => ({ rows: after ? [...before.rows, ...data] : data, more: has_more }));
      setProblem(null);
    } catch (error) {
      if (search === latest.current) setProblem(error.message);
    }
  };
  useLayoutEffect(() => {
    const timer = setTimeout(() => workspace.saved().then(() => list()), words ? SEARCH_MS : 0);
    return () => clearTimeout(timer);
  }, [words, chats.place]);

  /** Runs a change, shows why it failed, and lists the chats anew. */
  const change = async (work) => {
    try {
      await work();
      await list();
    } catch (error) {
      setProblem(error.message);
    }
  };
  const open = (row) => change(async () => {
    const { document, title } = await chats.store.get(row.id);
    workspace.open(row.id, title, document);
    onClose();
  });
  const rename = (row, title) => change(async () => {
    await chats.store.rename(row.id, title);
    if (workspace.id === row.id) workspace.set({ title });
  });
  const remove = (row) => change(async () => {
    if (workspace.id === row.id) workspace.newChat(false);
    await chats.saving;
    await chats.store.delete(row.id);
    chats.forget(row.id);
  });
  const removeAll = () => change(async () => {
    workspace.newChat(false);
    await chats.saving;
    await chats.store.deleteAll();
    chats.forget();
  });
  const save = (row) => change(async () => {
    const { document } = await chats.store.get(row.id);
    downloadText(JSON.stringify(document, null, 2), `${row.title.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 60)}.json`, "application/json");
  });
  const hint = PLACES.find(([place]) => place === chats.place)[2];
  return html`<${Dialog} title="Saved chats" onClose=${onClose} class="wide">
    <div class="segments" role="group" aria-label="Where chats are kept">${PLACES.map(([place, name]) => html`<button type="button" aria-pressed=${chats.place === place} onClick=${() => (chats.choose(place), workspace.keep())}>${name}</button>`)}</div>
    <p class="soft">${hint}</p>
    ${(problem ?? chats.problem) && html`<p class="problem" role="alert"><${Icon} name="warn" />${visible(problem ?? chats.problem)}</p>`}
    ${chats.store && html`<div>
      <input type="search" autofocus placeholder="Search" aria-label="Search chats" value=${words} onInput=${(event) => setWords(event.target.value)} />
      ${found && html`<ul class="models chats">${found.rows.map((row) => html`<${Row} key=${row.id} row=${row} ...${{ open, rename, remove, save }} />`)}</ul>`}
      ${found && !found.rows.length && html`<p class="soft">${words ? "No chat has these words." : "No chat is saved yet: each is saved when its first reply is there."}</p>`}
      <div class="row">
        ${found?.more && html`<${Button} text="Show more" onClick=${() => list(found.rows.at(-1).id)} />`}
        ${found?.rows.length > 0 && !words && html`<${Confirmed} text="Delete all" question="Delete every saved chat?" onConfirm=${removeAll} />`}
      </div>
    </div>`}
  <//>`;
}

function Row({ row, open, rename, remove, save }) {
  const [title, setTitle] = useState(null); // what is being typed as its new name
  const submit = (event) => {
    event.preventDefault();
    if (title.trim()) rename(row, title.trim().slice(0, 200));
    setTitle(null);
  };
  const onKey = (event) => {
    if (event.key !== "Escape") return;
    event.preventDefault(); // closes the editor, not the dialog
    event.stopPropagation();
    setTitle(null);
  };
  return html`<li>
    ${title !== null
      ? html`<form class="row" onSubmit=${submit}><input type="text" autofocus aria-label="Title" maxlength="200" value=${title} onInput=${(event) => setTitle(event.target.value)} onKeyDown=${onKey} />
          <${Button} icon="check" label="Rename" type="submit" /></form>`
      : html`<button type="button" aria-current=${row.id === workspace.id} onClick=${() => open(row)}>
          <span class="line"><bdi>${visible(row.title)}</bdi><span class="soft">${day.format(row.updated_at * 1000)}</span></span></button>
        <${Button} icon="edit" label=${`Rename ${visible(row.title)}`} class="quiet small" onClick=${() => setTitle(row.title)} />
        <${Button} icon="download" label=${`Export ${visible(row.title)}`} class="quiet small" onClick=${() => save(row)} />
        <${Confirmed} icon="close" label=${`Delete ${visible(row.title)}`} question="Delete?" class="quiet small" onConfirm=${() => remove(row)} />`}
  </li>`;
}

/** A button that asks before it acts. */
function Confirmed({ question, onConfirm, ...button }) {
  const [asks, setAsks] = useState(false);
  if (!asks) return html`<${Button} ...${button} onClick=${() => setAsks(true)} />`;
  return html`<span class="row" role="group" aria-label=${question}><span>${question}</span>
    <${Button} text="Delete" class="small primary" onClick=${() => (setAsks(false), onConfirm())} /><${Button} text="Keep" class="small" onClick=${() => setAsks(false)} /></span>`;
}
