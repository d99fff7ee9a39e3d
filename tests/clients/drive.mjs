// One JavaScript client against a server: `node drive.mjs CLIENT URL`; a line of JSON says what it received.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, isStepCount, streamText, tool } from "ai";
import Cloudflare from "cloudflare";
import OpenAI from "openai";
import { createWorkersAI } from "workers-ai-provider";
import { z } from "zod";

const MODEL = "@cf/huggingfacetb/smollm2-135m-instruct";
const WEATHER = "What is the weather in Bern?";
const [client, url] = process.argv.slice(2);
const account = `${url}/client/v4/accounts/acme/ai`;

/** A text whole and streamed, and a loop with a tool, as the Vercel AI SDK asks for them. */
async function sdk(model) {
  const settings = { model, maxRetries: 0 };
  const whole = await generateText({ ...settings, prompt: "Hi" });
  const stream = streamText({ ...settings, prompt: "Hi" });
  const pieces = [];
  for await (const piece of stream.textStream) pieces.push(piece);
  const ran = [];
  const inputSchema = z.object({ city: z.string() });
  const execute = async (input) => (ran.push(input), { ...input, sky: "clear" });
  const tools = { weather: tool({ description: "The weather in a city", inputSchema, execute }) };
  const agent = streamText({ ...settings, prompt: WEATHER, tools, stopWhen: isStepCount(3) });
  return {
    text: whole.text,
    pieces,
    usage: (await stream.usage).outputTokens,
    ran,
    answer: await agent.text,
    finish: (await agent.steps).map((step) => step.finishReason),
  };
}

const clients = {
  "@ai-sdk/openai-compatible": () =>
    sdk(createOpenAICompatible({ name: "emberline", baseURL: `${account}/v1`, apiKey: "none", includeUsage: true })(MODEL)),

  "workers-ai-provider": () => {
    const here = (address, init) => fetch(String(address).replace("https://api.cloudflare.com", url), init);
    return sdk(createWorkersAI({ accountId: "acme", apiKey: "none", fetch: here })(MODEL));
  },

  openai: async () => {
    const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
    const messages = [{ role: "user", content: "Hi" }];
    const whole = await openai.chat.completions.create({ model: MODEL, messages });
    const pieces = [];
    for await (const chunk of await openai.chat.completions.create({ model: MODEL, messages, stream: true }))
      pieces.push(chunk.choices[0]?.delta.content ?? "");
    const response = await openai.responses.create({ model: MODEL, input: "Hi" });
    const models = [];
    for await (const model of openai.models.list()) models.push(model.id);
    return { text: whole.choices[0].message.content, pieces, response: response.output_text, models };
  },

  cloudflare: async () => {
    const cloudflare = new Cloudflare({ baseURL: `${url}/client/v4`, apiToken: "none" });
    const whole = await cloudflare.ai.run(MODEL, { account_id: "acme", prompt: "Hi" });
    const models = [];
    for await (const model of cloudflare.ai.models.list({ account_id: "acme" })) models.push(model.name);
    const failure = await cloudflare.ai.run("@cf/none/such", { account_id: "acme", prompt: "Hi" }).catch((error) => error);
    return { text: whole.response, models, error: failure.errors?.[0]?.code };
  },
};

console.log(JSON.stringify(await clients[client]()));
