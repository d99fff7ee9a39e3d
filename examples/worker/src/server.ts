// A chat agent as Cloudflare's starter has it: messages are kept in the agent's own SQLite, replies stream over a
// WebSocket, and the model calls tools. The model is Emberline's, by way of `env.AI`.
import { AIChatAgent } from "@cloudflare/ai-chat";
import { routeAgentRequest } from "agents";
import { convertToModelMessages, generateText, isStepCount, streamText, tool } from "ai";
import { createWorkersAI } from "workers-ai-provider";
import { z } from "zod";

interface Env {
  AI: Ai;
  MODEL: string;
  Chat: DurableObjectNamespace<Chat>;
}

const tools = {
  weather: tool({
    description: "The weather in a city",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => ({ city, sky: "clear" }),
  }),
};

export class Chat extends AIChatAgent<Env> {
  async onChatMessage(_onFinish: unknown, options?: { abortSignal?: AbortSignal }) {
    const workersai = createWorkersAI({ binding: this.env.AI });
    const result = streamText({
      model: workersai(this.env.MODEL, { sessionAffinity: this.name }),
      system: "You are a helpful assistant.",
      messages: await convertToModelMessages(this.messages),
      tools,
      stopWhen: isStepCount(5),
      abortSignal: options?.abortSignal,
    });
    return result.toUIMessageStreamResponse();
  }
}

export default {
  async fetch(request: Request, env: Env): Promise<Response> {
    const url = new URL(request.url);
    const prompt = url.searchParams.get("q") ?? "Hello";
    switch (url.pathname) {
      case "/run":
        return Response.json(await env.AI.run(env.MODEL as never, { prompt }));
      case "/stream": {
        const stream = (await env.AI.run(env.MODEL as never, { prompt, stream: true })) as ReadableStream;
        return new Response(stream, { headers: { "content-type": "text/event-stream" } });
      }
      case "/ask": {
        const workersai = createWorkersAI({ binding: env.AI });
        const { text, usage } = await generateText({ model: workersai(env.MODEL), prompt });
        return Response.json({ text, usage });
      }
      case "/models":
        return Response.json(await env.AI.models());
      case "/fail":
        return env.AI.run("@cf/none/such" as never, { prompt }).then(
          () => new Response("It did not fail.\n", { status: 500 }),
          ({ name, message }: Error) => Response.json({ name, message }),
        );
    }
    return (await routeAgentRequest(request, env)) ?? new Response("Not found\n", { status: 404 });
  },
} satisfies ExportedHandler<Env>;
