// The models that the server offers, and what each can do. Reads both model lists, so that either may know more.

import { getJson } from "./api.js";
import { Observable } from "./ui.js";

const POLL_MS = 15_000;
// Names of states that lists may use, and what they are called here.
const STATES = {
  loaded: "loaded", ready: "loaded", serving: "loaded", running: "loaded", sleeping: "on disk",
  loading: "loading", starting: "loading", queued: "loading", downloading: "downloading", pulling: "downloading",
  on_disk: "on disk", "on disk": "on disk", pulled: "on disk", unloaded: "on disk", available: "not downloaded",
  not_downloaded: "not downloaded", provider: "provider", upstream: "provider", failed: "failed", error: "failed",
};

class Models extends Observable {
  all = [];
  error = null;
  loaded = false;
  #timer = 0;

  get(id) {
    return this.all.find((model) => model.id === id || model.aliases.includes(id));
  }

  /** The first that is loaded and chats: what a newcomer talks to. */
  get preferred() {
    return this.all.find((model) => model.chats && model.state === "loaded") ?? this.all.find((model) => model.chats) ?? this.all[0];
  }

  async refresh() {
    try {
      const { data } = await getJson("/v1/models");
      const cards = await cardsByName();
      this.all = data.map((row) => describe(row, cards.get(row.id)));
      this.set({ error: null, loaded: true });
    } catch (error) {
      this.set({ error });
    }
  }

  /** Refreshes now, and then while the page is seen: a model's state may change at any time. */
  watch() {
    clearInterval(this.#timer);
    this.#timer = setInterval(() => document.hidden || this.refresh(), POLL_MS);
    return this.refresh();
  }
}

export const models = new Models();

async function cardsByName() {
  try {
    const { result } = await getJson("/client/v4/accounts/local/ai/models/search?per_page=1000");
    return new Map(result.map((card) => [card.name, card]));
  } catch (error) {
    if (error.status === 401) throw error;
    return new Map(); // a key may be of another account: the other list is enough
  }
}

function describe(row, card) {
  const properties = Object.fromEntries((card?.properties ?? []).map((p) => [p.property_id, p.value]));
  const modalities = row.input_modalities ?? row.architecture?.input_modalities ?? [];
  const task = card?.task?.name ?? row.task ?? "Text Generation";
  const state = row.state ?? row.status?.value ?? row.status ?? properties.state ?? "loaded";
  return {
    id: String(row.id),
    name: String(row.display_name ?? row.id),
    aliases: (row.aliases ?? []).map(String),
    author: String(row.owned_by ?? ""),
    description: String(card?.description ?? row.description ?? ""),
    contextLen: Number(row.context_window ?? properties.context_window) || null,
    defaults: row.default_parameters ?? {},
    state: STATES[String(state).toLowerCase()] ?? String(state),
    chats: task === "Text Generation" || task === "Image-to-Text",
    vision: modalities.includes("image") || String(properties.vision) === "true" || row.capabilities?.vision === true,
    prices: prices(row, properties),
  };
}

/** [{unit, price, currency}] as the Workers AI API lists them, else nothing. */
function prices(row, properties) {
  const found = row.prices ?? properties.price ?? [];
  return Array.isArray(found) ? found.filter((p) => Number.isFinite(Number(p.price))) : [];
}
