// The Vercel AI SDK, driven by tests: a line of JSON in ({task, url, ...}), a line of JSON out ({result} or {error}).
import { createInterface } from 'node:readline';

import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateObject, generateText, jsonSchema, stepCountIs, streamObject, streamText, tool } from 'ai';
import { z } from 'zod';

const MODEL = '@cf/huggingfacetb/smollm2-135m-instruct';

const PERSON = z.object({
  name: z.string().max(40),
  age: z.number().int().min(0).max(150),
  languages: z.array(z.enum(['de', 'en', 'fr'])).min(1).max(3),
});

const WEATHER = { description: 'The weather in a city', inputSchema: z.object({ city: z.string().max(30) }) };
const CLOCK = { description: 'The time in a zone', inputSchema: z.object({ zone: z.enum(['UTC', 'CET']) }) };

const language = ({ url, model = MODEL }) =>
  createOpenAICompatible({
    name: 'emberline',
    baseURL: `${url}/v1`,
    apiKey: 'none',
    includeUsage: true,
    supportsStructuredOutputs: true,
  })(model);

const settings = (asked) => ({
  model: language(asked),
  prompt: asked.prompt,
  temperature: 0,
  maxOutputTokens: asked.maxOutputTokens ?? 64,
  maxRetries: 0,
});

/** Tools that tell what they were called with: as a tool of a real program would be, run by the SDK. */
function tools(ran) {
  const note = (name, answer) => async (input) => {
    ran.push([name, input]);
    return { ...answer(input), report: ran.length };
  };
  return {
    weather: tool({ ...WEATHER, execute: note('weather', ({ city }) => ({ city, sky: 'clear' })) }),
    clock: tool({ ...CLOCK, execute: note('clock', ({ zone }) => ({ zone, time: '12:34' })) }),
  };
}

const agent = (asked, ran) => ({
  ...settings(asked),
  tools: tools(ran),
  toolChoice: asked.toolChoice ?? 'auto',
  stopWhen: stepCountIs(asked.steps ?? 4),
});

const step = ({ text, toolCalls, finishReason, usage }) => ({
  text,
  finishReason,
  calls: toolCalls.map(({ toolName, input, toolCallId }) => ({ name: toolName, input, id: toolCallId })),
  usage: { input: usage.inputTokens, cached: usage.cachedInputTokens, output: usage.outputTokens },
});

async function collect(stream) {
  const parts = [];
  for await (const part of stream) parts.push(part);
  return parts;
}

const tasks = {
  async generateText(asked) {
    return step(await generateText(settings(asked)));
  },

  async streamText(asked) {
    const stream = streamText({ ...settings(asked), onError: () => {} });
    const pieces = await collect(stream.textStream);
    const [last] = await stream.steps;
    return { ...step(last), pieces };
  },

  async generateObject(asked) {
    const { object, finishReason } = await generateObject({ ...settings(asked), schema: PERSON });
    return { object, finishReason };
  },

  async streamObject(asked) {
    const stream = streamObject({ ...settings(asked), schema: PERSON, onError: () => {} });
    const partials = await collect(stream.partialObjectStream);
    return { object: await stream.object, partials };
  },

  /** With a schema of the test's own, which zod could not have written. */
  async generateWith(asked) {
    const { object } = await generateObject({ ...settings(asked), schema: jsonSchema(asked.schema) });
    return { object };
  },

  async generateAgent(asked) {
    const ran = [];
    const { steps } = await generateText(agent(asked, ran));
    return { ran, steps: steps.map(step) };
  },

  async streamAgent(asked) {
    const ran = [];
    const stream = streamText({ ...agent(asked, ran), onError: () => {} });
    const written = {}; // arguments by call, as they came
    for await (const part of stream.fullStream) {
      if (part.type === 'error') throw part.error;
      if (part.type === 'tool-input-start') written[part.id] = [];
      if (part.type === 'tool-input-delta') written[part.id].push(part.delta);
    }
    return { ran, written, steps: (await stream.steps).map(step) };
  },

  /** Leaves while a call's arguments are being written. */
  async leave(asked) {
    const control = new AbortController();
    const stream = streamText({ ...agent(asked, []), abortSignal: control.signal, onError: () => {} });
    for await (const part of stream.fullStream) {
      if (part.type === 'error') throw part.error;
      if (part.type === 'tool-input-delta') break;
      if (part.type === 'finish') throw new Error('the call was over too soon');
    }
    control.abort();
    return {};
  },
};

for await (const line of createInterface({ input: process.stdin })) {
  const asked = JSON.parse(line);
  let answer;
  try {
    answer = { result: await tasks[asked.task](asked) };
  } catch (error) {
    const cause = error.lastError ?? error;
    answer = { error: { name: cause.name, message: cause.message, status: cause.statusCode ?? null } };
  }
  process.stdout.write(`${JSON.stringify(answer)}\n`);
}
