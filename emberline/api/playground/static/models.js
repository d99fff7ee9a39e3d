// The models that the server offers, and what each can do.

import { getJson, postJson, pullModel, session } from "./api.js";
import { Observable } from "./ui.js";

const POLL_MS = 15_000;
const CHANGE_POLL_MS = 1000; // while a model is loaded or unloaded

class Models extends Observable {
  all = [];
  error = null;
  loaded = false;
  changing = new Map(); // what is being done, "loading" or "unloading", by model
  offers = null; // models that the operator can pull; null: not asked for
  canLoad = false; // true if the server lets this key load and unload models
  pulling = new Map(); // what the server says of downloads, by name: { status, total, completed }
  #timer = 0;
  #latest = 0; // number of the last refresh

  get(id) {
    return this.all.find((model) => model.id === id || model.aliases.includes(id));
  }

  /** The first that is loaded and chats: what a newcomer talks to. */
  get preferred() {
    return this.all.find((model) => model.chats && model.state === "loaded") ?? this.all.find((model) => model.chats) ?? this.all.find((model) => model.predicts) ?? this.all[0];
  }

  async refresh() {
    const refresh = ++this.#latest;
    let found;
    try {
      const { data } = await getJson("/v1/models");
      const own = data.filter((row) => (row.root ?? row.id) === row.id); // the others are aliases
      found = { all: own.map(describe), error: null, loaded: true };
    } catch (error) {
      found = { error };
    }
    if (refresh === this.#latest) this.set(found);
  }

  /** Loads a model, or unloads it once it is idle. Throws ApiError: only an admin's key may. */
  async change(id, action) {
    if (this.changing.has(id)) return;
    this.changing.set(id, `${action}ing`);
    this.changed();
    const timer = setInterval(() => this.refresh(), CHANGE_POLL_MS);
    try {
      await postJson(`/api/models/${action}`, { model: id });
    } finally {
      clearInterval(timer);
      this.changing.delete(id);
      await this.refresh();
    }
  }

  /** Asks for the models that can be pulled, and whether models can be loaded. A key that may do neither gets no offers. */
  async findOffers() {
    const { data, can_load: canLoad } = await getJson("/api/models/available").catch(() => ({ data: null }));
    this.set({ offers: data?.filter((offer) => !offer.here) ?? null, canLoad: canLoad === true });
  }

  /** Downloads a model to the server, with progress in `pulling`. Throws ApiError. */
  async pull(name) {
    if (this.pulling.has(name)) return;
    const show = (line) => {
      this.pulling.set(name, line);
      this.changed();
    };
    show({ status: "beginning" });
    try {
      await pullModel(name, show);
    } finally {
      this.pulling.delete(name);
      await Promise.all([this.refresh(), this.findOffers()]);
    }
  }

  /** Refreshes now, and then while the page is seen: a model's state may change at any time. */
  watch() {
    clearInterval(this.#timer);
    this.#timer = setInterval(() => document.hidden || session.needed || this.refresh(), POLL_MS);
    return this.refresh();
  }
}

export const models = new Models();

function describe(row) {
  return {
    id: String(row.id),
    name: String(row.display_name ?? row.id),
    aliases: (row.aliases ?? []).map(String),
    author: String(row.owned_by ?? ""),
    contextLen: Number(row.context_window) || null,
    defaults: row.default_parameters ?? {},
    // A server that loads its models once, at its start, names no states, and loads and unloads none.
    managed: Boolean(row.state),
    state: String(row.state || "loaded").replaceAll("_", " "),
    chats: ["Text Generation", "Image-to-Text", undefined].includes(row.task),
    predicts: row.task === "Prediction", // by a schema of its own: it has a form
    vision: row.capabilities?.vision === true,
    reasons: row.capabilities?.reasoning === true,
    pricing: row.pricing ?? null, // of one token: prompt, completion, input_cache_read
  };
}
