// Saved chats: on the server (of the key's account) or in this browser, as the user chooses; else only in this tab.

import { getJson, postJson } from "./api.js";
import { Observable } from "./ui.js";

const PLACE = "emberline.chats"; // where chats are kept, in the browser's local storage
const MAX_TITLE_CHARS = 80;
const MAX_TEXT_CHARS = 500_000; // that a search looks through
const PAGE = 50;

/** The database of this browser. It holds the same records as the server, with the text that a search looks through. */
class BrowserChats {
  async #store(mode, ask) {
    this.opened ??= new Promise((resolve, reject) => {
      const request = indexedDB.open("emberline", 1);
      request.onupgradeneeded = () => request.result.createObjectStore("chats", { keyPath: "id" });
      request.onsuccess = () => resolve(request.result);
      request.onerror = () => reject(new Error("This browser keeps no data for the page: choose another place."));
    });
    const transaction = (await this.opened).transaction("chats", mode);
    const request = ask(transaction.objectStore("chats"));
    return new Promise((resolve, reject) => {
      transaction.oncomplete = () => resolve(request.result);
      transaction.onabort = transaction.onerror = () => reject(new Error("The browser could not keep the chat: its storage may be full."));
    });
  }

  async put(chat) {
    await this.#store("readwrite", (chats) => chats.put({ ...chat, updated_at: Date.now() / 1000 }));
  }

  async list(words, after) {
    const terms = words.toLowerCase().split(/\s+/).filter(Boolean);
    const all = (await this.#store("readonly", (chats) => chats.getAll())).sort((a, b) => b.updated_at - a.updated_at || (a.id < b.id ? 1 : -1));
    const found = all.filter((chat) => terms.every((term) => `${chat.title}\n${chat.text}`.toLowerCase().includes(term)));
    const first = found.findIndex((chat) => chat.id === after) + 1;
    return { data: found.slice(first, first + PAGE), has_more: found.length > first + PAGE };
  }

  async get(id) {
    return this.#store("readonly", (chats) => chats.get(id));
  }

  async rename(id, title) {
    const chat = await this.get(id);
    await this.#store("readwrite", (chats) => chats.put({ ...chat, title }));
  }

  async delete(id) {
    await this.#store("readwrite", (chats) => chats.delete(id));
  }

  async deleteAll() {
    await this.#store("readwrite", (chats) => chats.clear());
  }
}

const onServer = {
  put: (chat) => postJson("/api/chats", chat),
  list: (words, after) => getJson(`/api/chats?${new URLSearchParams({ limit: PAGE, ...(words && { q: words.slice(0, 200) }), ...(after && { after }) })}`),
  get: (id) => getJson(`/api/chats/${id}`),
  rename: (id, title) => getJson(`/api/chats/${id}`, { method: "PATCH", headers: { "content-type": "application/json" }, body: JSON.stringify({ title }) }),
  delete: (id) => getJson(`/api/chats/${id}`, { method: "DELETE" }),
  deleteAll: () => getJson("/api/chats", { method: "DELETE" }),
};

const STORES = { server: onServer, browser: new BrowserChats() };

class SavedChats extends Observable {
  place = "tab"; // tab, browser or server
  problem = null; // why the last chat could not be saved
  #saved = new Map(); // what was last saved, by chat
  saving = Promise.resolve(); // until what was to be saved is saved, or has failed

  constructor() {
    super();
    try {
      const place = localStorage.getItem(PLACE);
      if (place in STORES) this.place = place;
    } catch {
      // storage may be blocked: chats then stay in the tab
    }
  }

  get store() {
    return STORES[this.place];
  }

  choose(place) {
    try {
      localStorage.setItem(PLACE, place);
    } catch {
      // as above
    }
    this.#saved.clear();
    this.set({ place, problem: null });
  }

  /** Saves a chat if it has changed. Later calls wait for earlier ones, so the last state is what stays. */
  save(id, title, text, document) {
    const { store } = this;
    const state = JSON.stringify([title, document]);
    if (!store || this.#saved.get(id) === state) return;
    this.#saved.set(id, state);
    this.saving = this.saving.then(async () => {
      try {
        await store.put({ id, title, text: text.slice(0, MAX_TEXT_CHARS), document });
        if (this.problem) this.set({ problem: null });
      } catch (error) {
        this.#saved.delete(id);
        this.set({ problem: error.message });
      }
    });
  }

  /** Forgets what was saved of a chat that no longer exists, so that its next change saves it anew. */
  forget(id) {
    if (id === undefined) this.#saved.clear();
    else this.#saved.delete(id);
  }
}

/** Title of a chat without a name: the beginning of its first question. */
export function titleOf(text) {
  const line = text.trim().split("\n", 1)[0].trim();
  return line.length > MAX_TITLE_CHARS ? `${line.slice(0, MAX_TITLE_CHARS - 1)}…` : line || "Untitled chat";
}

export const chats = new SavedChats();
