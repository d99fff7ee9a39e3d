// The server's public API: JSON calls, and server-sent events of a streamed chat completion.

import { Observable } from "./ui.js";

const KEY = "emberline.key";
const MAX_BUSY_MS = 10;

/** The API key: in memory, and in the tab's session storage if the user agrees. Never anywhere else. */
class Session extends Observable {
  key = null;
  needed = false; // the server answered 401
  reason = ""; // why a key is asked for

  constructor() {
    super();
    try {
      this.key = sessionStorage.getItem(KEY);
    } catch {
      // storage may be blocked: the key then lives in memory
    }
  }

  signIn(key, remember) {
    this.#keep(remember ? key : null);
    this.set({ key, needed: false, reason: "" });
  }

  signOut(reason = "") {
    this.#keep(null);
    this.set({ key: null, needed: true, reason });
  }

  #keep(key) {
    try {
      if (key) sessionStorage.setItem(KEY, key);
      else sessionStorage.removeItem(KEY);
    } catch {
      // as above
    }
  }
}

export const session = new Session();

/** A refusal of the server, or a failure to reach it (`status` 0). */
export class ApiError extends Error {
  constructor(message, status = 0, code = null, retryAfterS = null) {
    super(message);
    Object.assign(this, { status, code, retryAfterS });
  }
}

/** The stream broke before its end: what has arrived is all there is. */
export class ConnectionLost extends ApiError {}

async function request(path, { key = session.key, ...options } = {}) {
  const headers = { ...options.headers };
  if (key) headers.authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, credentials: "omit", redirect: "error" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached. Is it running?");
  }
  if (response.ok) return response;
  throw await refusal(response, key);
}

async function refusal(response, key) {
  const body = await response.json().catch(() => null);
  const error = body?.error ?? body?.errors?.[0] ?? {};
  const message = typeof error.message === "string" ? error.message : `The server answered ${response.status}.`;
  // Not of a key that has been replaced meanwhile, or is being tried.
  if (response.status === 401 && key === session.key) {
    session.signOut(key ? "The server no longer accepts this key: it was revoked, has expired, or is wrong. Sign in again." : session.reason);
  }
  return new ApiError(message, response.status, error.code, Number(response.headers.get("retry-after")) || null);
}

export async function getJson(path, options) {
  return (await request(path, options)).json();
}

export async function getText(path) {
  return (await request(path)).text();
}

export async function postJson(path, body = {}) {
  return (await request(path, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) })).json();
}

/** Downloads a model to the server; calls `onLine` with each of Ollama's status lines. Throws ApiError if it fails. */
export async function pullModel(model, onLine) {
  const headers = { "content-type": "application/json" };
  const response = await request("/api/pull", { method: "POST", headers, body: JSON.stringify({ model }) });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  let done = false;
  for (let step; !(step = await reader.read()).done; ) {
    const lines = (pending + step.value).split("\n");
    pending = lines.pop();
    for (const line of lines.filter(Boolean).map((text) => JSON.parse(text))) {
      if (line.error) throw new ApiError(String(line.error), 200);
      done ||= line.status === "success";
      onLine(line);
    }
  }
  if (!done) throw new ConnectionLost("The connection was lost; the server goes on with the download.");
}

/** Calls `onChunk` with every chunk of a streamed chat completion, and `onComment` with what the server says meanwhile;
 * throws ConnectionLost if it ends too early. */
export async function streamChat(body, { signal, affinity, onChunk, onComment }) {
  const headers = { "content-type": "application/json", "x-session-affinity": affinity, "x-emberline-queue-position": "true" };
  const response = await request("/v1/chat/completions", { method: "POST", headers, body: JSON.stringify(body), signal });
  let finished = false;
  for await (const data of events(response.body, onComment)) {
    if (data === "[DONE]") {
      finished = true;
      break;
    }
    let chunk;
    try {
      chunk = JSON.parse(data);
    } catch {
      throw new ConnectionLost("The server sent something that is not JSON.");
    }
    if (chunk.error) throw new ApiError(String(chunk.error.message ?? "The server reported an error."), 200, chunk.error.code);
    onChunk(chunk);
  }
  if (!finished) throw new ConnectionLost("The connection was lost before the reply was complete.");
}

/** Runs a model on inputs of its own schema. Returns `output`, and what the predictor measured and logged; a model that
 * streams has its texts passed to `onText` instead. */
export async function runModel(model, inputs, { streams, signal, onText }) {
  const path = `/client/v4/accounts/me/ai/run/${model.split("/").map(encodeURIComponent).join("/")}`;
  const body = JSON.stringify(streams ? { input: inputs, stream: true } : { input: inputs });
  const response = await request(path, { method: "POST", headers: { "content-type": "application/json" }, body, signal });
  const kind = response.headers.get("content-type") ?? "";
  if (kind.startsWith("text/event-stream")) {
    for await (const data of events(response.body)) {
      if (data === "[DONE]") return {};
      const event = JSON.parse(data);
      const error = event.error ?? event.errors?.[0];
      if (error) throw new ApiError(String(error.message ?? "The prediction failed."), 200, error.code);
      if (typeof event.response === "string" && event.response) onText(event.response);
    }
    throw new ConnectionLost("The connection was lost before the prediction was complete.");
  }
  if (!kind.startsWith("application/json")) return { output: await dataUrlOf(await response.blob()) };
  const { result, metrics, logs } = await response.json();
  return { output: result, metrics, logs };
}

function dataUrlOf(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(blob);
  });
}

/** The `data` of each server-sent event; comments go to `onComment`. */
async function* events(stream, onComment) {
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  let pending = "";
  let since = performance.now();
  try {
    for (;;) {
      let step;
      try {
        step = await reader.read();
      } catch (error) {
        if (error.name === "AbortError") throw error;
        throw new ConnectionLost("The connection was lost before the reply was complete.");
      }
      if (step.done) return;
      const lines = (pending + decoder.decode(step.value, { stream: true })).split("\n");
      pending = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) yield line.slice(5).trim();
        else if (line.startsWith(":")) onComment?.(line.slice(1).trim());
        // What has arrived is read without a pause: the page must be drawn and take input in between.
        if (performance.now() - since > MAX_BUSY_MS) {
          await new Promise((resolve) => setTimeout(resolve));
          since = performance.now();
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
