// The server's status, polled while the page is seen: the newest document, and the last hour as time series.

import { getJson, session } from "./api.js";
import { Observable } from "./ui.js";

const POLL_MS = 2000;
const MAX_POINTS = 360; // an hour

class ServerStatus extends Observable {
  now = null; // the last document of /api/status
  series = {}; // by figure, oldest first
  error = null;
  #timer = 0;
  #latest = 0; // number of the last refresh

  async refresh() {
    clearTimeout(this.#timer);
    const refresh = ++this.#latest;
    const { key } = session;
    let found;
    try {
      const since = this.series.time_s?.at(-1) ?? 0;
      const now = await getJson(`/api/status?since=${since}&requests=200&recent=200`);
      found = { now, error: null };
    } catch (error) {
      found = { error };
    }
    if (refresh !== this.#latest) return; // another has begun since, which polls on
    if (session.key === key) this.set(found.now ? { ...found, series: this.#extended(found.now) } : found);
    this.#timer = setTimeout(() => this.#next(), POLL_MS);
  }

  #extended(now) {
    // A server that has restarted begins a new series.
    const known = this.now && now.uptime_s < this.now.uptime_s ? {} : this.series;
    return Object.fromEntries(Object.entries(now.series).map(([name, points]) => [name, [...(known[name] ?? []), ...points].slice(-MAX_POINTS)]));
  }

  #next() {
    if (document.hidden || session.needed) this.#timer = setTimeout(() => this.#next(), POLL_MS);
    else this.refresh();
  }

  /** What one key may see is not left for the next. */
  forget() {
    this.set({ now: null, series: {}, error: null });
  }

  /** The sum of a figure over the last hour. */
  total(name) {
    return (this.series[name] ?? []).reduce((sum, value) => sum + (value ?? 0), 0);
  }

  /** A figure per second, by point. */
  rate(name) {
    return (this.series[name] ?? []).map((value) => value / this.now.step_s);
  }

  last(name) {
    return (this.series[name] ?? []).findLast((value) => value != null);
  }
}

export const server = new ServerStatus();
