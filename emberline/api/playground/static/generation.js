// One reply being generated: the stream written into its message, redrawn once per animation frame, and measured.

import { ApiError, ConnectionLost, streamChat } from "./api.js";
import { models } from "./models.js";
import { announce } from "./ui.js";

const MAX_CHARS = 4_000_000; // of a reply: beyond, the page would grow without end

export class Generation {
  #abort = new AbortController();
  #frame = 0;
  #deltas = 0;
  #start = performance.now();
  #first = 0; // when the first token arrived
  #last = 0;

  constructor(message, body, affinity) {
    this.message = message;
    this.done = this.#run(body, affinity);
  }

  stop() {
    this.#abort.abort();
  }

  async #run(body, affinity) {
    const message = this.message;
    message.set({ status: "streaming", error: null, finish: null, model: body.model, notice: notice(body.model) });
    let usage = null;
    let ended = { status: "done" };
    try {
      await streamChat(body, {
        signal: this.#abort.signal,
        affinity,
        onComment: (comment) => message.set({ notice: `${comment} …` }),
        onChunk: (chunk) => {
          usage = chunk.usage ?? usage;
          for (const choice of chunk.choices ?? []) this.#take(choice);
        },
      });
    } catch (error) {
      ended = this.#failure(error);
    }
    cancelAnimationFrame(this.#frame);
    message.set({ ...ended, metrics: this.#metrics(usage) });
    announce(ended.error ?? (ended.status === "stopped" ? "Stopped." : "The reply is complete."));
  }

  #take({ delta = {}, finish_reason: finish }) {
    const message = this.message;
    if (finish) message.finish = finish;
    const reasoning = delta.reasoning_content ?? delta.reasoning;
    if (typeof reasoning === "string") message.reasoning += reasoning;
    if (typeof delta.content === "string") message.content += delta.content;
    for (const part of delta.tool_calls ?? []) {
      const call = (message.toolCalls[part.index ?? 0] ??= { id: "", name: "", arguments: "" });
      if (part.id) call.id = part.id;
      if (part.function?.name) call.name += part.function.name;
      if (part.function?.arguments) call.arguments += part.function.arguments;
    }
    if (!reasoning && !delta.content && !delta.tool_calls) return;
    this.#deltas++;
    this.#last = performance.now();
    this.#first ||= this.#last;
    if (message.content.length + message.reasoning.length > MAX_CHARS) this.#abort.abort("too long");
    this.#frame ||= requestAnimationFrame(() => {
      this.#frame = 0;
      message.changed();
    });
  }

  #failure(error) {
    if (this.#abort.signal.aborted) {
      const tooLong = this.#abort.signal.reason === "too long";
      return { status: "stopped", error: tooLong ? `Stopped by the page: the reply is longer than ${MAX_CHARS / 1e6} million characters.` : null };
    }
    if (error instanceof ConnectionLost) return { status: "lost", error: error.message };
    if (error instanceof ApiError) {
      const wait = error.retryAfterS ? ` Try again in ${error.retryAfterS} s.` : "";
      return { status: "failed", error: error.message + wait };
    }
    console.error(error);
    return { status: "failed", error: "The page failed to read the reply." };
  }

  /** Times are the page's own; tokens are the server's count, or the number of pieces where it sent none. */
  #metrics(usage) {
    if (!this.#first) return null;
    const tokens = usage?.completion_tokens ?? this.#deltas;
    const seconds = (this.#last - this.#first) / 1000;
    const found = {
      ttftMs: this.#first - this.#start,
      totalMs: performance.now() - this.#start,
      completionTokens: tokens,
      exact: usage !== null,
    };
    if (seconds > 0 && tokens > 1) found.tokensPerS = (tokens - 1) / seconds;
    if (usage) {
      found.promptTokens = usage.prompt_tokens;
      found.cachedTokens = usage.prompt_tokens_details?.cached_tokens ?? 0;
      found.reasoningTokens = usage.completion_tokens_details?.reasoning_tokens ?? 0;
      const cost = costOf(usage, models.get(this.message.model));
      if (cost !== null) found.cost = cost;
    }
    return found;
  }
}

/** What the page says of a model that must be loaded first; empty for one that is loaded. */
function notice(id) {
  const state = models.get(id)?.state;
  return ["on disk", "loading", "unloading"].includes(state) ? `loading ${id} …` : "";
}

/** What a reply costs by the model's prices; null where it has none. */
function costOf(usage, model) {
  const { prompt, completion, input_cache_read: cached } = model?.pricing ?? {};
  if (prompt === undefined) return null;
  const cachedTokens = usage.prompt_tokens_details?.cached_tokens ?? 0;
  return (usage.prompt_tokens - cachedTokens) * prompt + cachedTokens * cached + usage.completion_tokens * completion;
}
