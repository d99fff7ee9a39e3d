// `env.AI` as a Worker of its own, for `wrangler dev`: its AI binding logs in to Cloudflare, a service binding does not.
import { WorkerEntrypoint } from "cloudflare:workers";

interface Env {
  EMBERLINE: string; // the server's address
  EMBERLINE_KEY?: string; // where it asks for keys
}

interface Options {
  returnRawResponse?: boolean;
  extraHeaders?: Record<string, string>;
  signal?: AbortSignal;
  [name: string]: unknown;
}

export class AI extends WorkerEntrypoint<Env> {
  async run(model: string, inputs: object, given: Options = {}): Promise<unknown> {
    const { returnRawResponse, extraHeaders, signal, ...options } = given;
    const response = await this.#fetch("/run?version=3", {
      method: "POST",
      signal,
      headers: { ...extraHeaders, "content-type": "application/json", "cf-consn-model-id": model },
      body: JSON.stringify({ inputs, options }),
    });
    if (returnRawResponse) return response;
    if (!response.ok) {
      const error: { name: string; internalCode: number; description: string } = await response.json();
      throw Object.assign(new Error(`${error.internalCode}: ${error.description}`), { name: error.name });
    }
    return response.headers.get("content-type") === "application/json" ? response.json() : response.body;
  }

  async models(search: Record<string, string> = {}): Promise<unknown> {
    const found: { result: unknown } = await (await this.#fetch(`/ai-api/models/search?${new URLSearchParams(search)}`)).json();
    return found.result;
  }

  #fetch(path: string, init: RequestInit & { headers?: Record<string, string> } = {}): Promise<Response> {
    const key: Record<string, string> = this.env.EMBERLINE_KEY ? { authorization: `Bearer ${this.env.EMBERLINE_KEY}` } : {};
    return fetch(new URL(path, this.env.EMBERLINE), { ...init, headers: { ...key, ...init.headers } });
  }
}

export default { fetch: () => new Response("The `AI` binding; call `run`.\n") };
