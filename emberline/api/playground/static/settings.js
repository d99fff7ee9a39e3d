// What a request is made of besides its messages, and the request body that follows.

import { Observable } from "./ui.js";
import { parseSchema, parseTools } from "./json_schema.js";

// Name, label, range, and what it does; null in the settings leaves it to the model.
export const PARAMETERS = [
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: 0.05, hint: "0 picks the likeliest token; higher is more varied" },
  { name: "top_p", label: "Top P", min: 0, max: 1, step: 0.01, hint: "only the likeliest tokens that together reach this probability" },
  { name: "max_tokens", label: "Max tokens", min: 1, max: 1_000_000, step: 1, whole: true, hint: "the reply ends here at the latest" },
  { name: "seed", label: "Seed", min: 0, max: 2 ** 53 - 1, step: 1, whole: true, hint: "the same seed and settings repeat a reply" },
  { name: "top_k", label: "Top K", min: 0, max: 1000, step: 1, whole: true, hint: "only this many likeliest tokens; 0 for all", more: true },
  { name: "min_p", label: "Min P", min: 0, max: 1, step: 0.01, hint: "only tokens at least this likely, relative to the likeliest", more: true },
  { name: "frequency_penalty", label: "Frequency penalty", min: -2, max: 2, step: 0.1, hint: "against tokens that were frequent so far", more: true },
  { name: "presence_penalty", label: "Presence penalty", min: -2, max: 2, step: 0.1, hint: "against tokens that appeared so far", more: true },
];
export const EFFORTS = ["", "none", "low", "medium", "high"];

export class Settings extends Observable {
  model = "";
  system = "";
  stop = ""; // one sequence per line
  effort = ""; // of reasoning; empty: the model's own
  tools = ""; // JSON text
  toolChoice = "auto";
  format = "text"; // text, json_object, json_schema
  schema = ""; // JSON text
  parameters = Object.fromEntries(PARAMETERS.map(({ name }) => [name, null]));

  clone() {
    return Settings.parse(this.export());
  }

  export() {
    const { model, system, stop, effort, tools, toolChoice, format, schema, parameters } = this;
    return { model, system, stop, effort, tools, toolChoice, format, schema, parameters: { ...parameters } };
  }

  /** Reads what `export` wrote; what is not as expected stays at its default. */
  static parse(data) {
    const settings = new Settings();
    for (const name of ["model", "system", "stop", "effort", "tools", "toolChoice", "format", "schema"]) {
      if (typeof data?.[name] === "string") settings[name] = data[name];
    }
    if (!EFFORTS.includes(settings.effort)) settings.effort = "";
    if (!["text", "json_object", "json_schema"].includes(settings.format)) settings.format = "text";
    for (const { name } of PARAMETERS) {
      const value = data?.parameters?.[name];
      if (typeof value === "number" && Number.isFinite(value)) settings.parameters[name] = value;
    }
    return settings;
  }

  /** What is not left to the model, in few words. */
  get summary() {
    const set = PARAMETERS.filter(({ name }) => this.parameters[name] !== null).map(({ name, label }) => `${label} ${this.parameters[name]}`);
    if (this.system) set.push("system prompt");
    if (this.effort) set.push(`reasoning ${this.effort}`);
    if (this.tools.trim()) set.push("tools");
    if (this.format !== "text") set.push(this.format === "json_schema" ? "JSON schema" : "JSON");
    return set.join(" · ");
  }

  /** What keeps a request from being sent: the first problem, or null. */
  get problem() {
    if (!this.model) return "Choose a model first.";
    const tools = parseTools(this.tools);
    if (tools.problem) return `The tools are not valid: ${tools.problem}`;
    const schema = this.format === "json_schema" ? parseSchema(this.schema) : {};
    return schema.problem ? `The JSON schema is not valid: ${schema.problem}` : null;
  }

  /** The body of a chat completion. `keepReasoning`: send earlier reasoning back, as our engines' caches expect. */
  body(messages, keepReasoning = true) {
    const body = { model: this.model, messages: [] };
    if (this.system) body.messages.push({ role: "system", content: this.system });
    for (const message of messages) body.messages.push(wire(message, keepReasoning));
    for (const { name } of PARAMETERS) if (this.parameters[name] !== null) body[name] = this.parameters[name];
    const stops = this.stop.split("\n").filter(Boolean);
    if (stops.length) body.stop = stops;
    if (this.effort) body.reasoning_effort = this.effort;
    const { tools } = parseTools(this.tools);
    if (tools?.length) {
      body.tools = tools;
      if (this.toolChoice !== "auto") body.tool_choice = this.toolChoice;
    }
    if (this.format === "json_object") body.response_format = { type: "json_object" };
    if (this.format === "json_schema") {
      body.response_format = { type: "json_schema", json_schema: { name: "reply", schema: parseSchema(this.schema).schema, strict: true } };
    }
    return { ...body, stream: true, stream_options: { include_usage: true } };
  }
}

function wire(message, keepReasoning) {
  if (message.role === "tool") return { role: "tool", tool_call_id: message.toolCallId, content: message.content };
  if (message.role === "user") {
    if (!message.images.length) return { role: "user", content: message.content };
    const images = message.images.map((url) => ({ type: "image_url", image_url: { url } }));
    const text = message.content ? [{ type: "text", text: message.content }] : [];
    return { role: "user", content: [...images, ...text] }; // images first, as `emberline run` and Ollama's API put them
  }
  const found = { role: "assistant", content: message.content || (message.toolCalls.length ? null : "") };
  if (keepReasoning && message.reasoning) found.reasoning_content = message.reasoning;
  if (message.toolCalls.length) {
    found.tool_calls = message.toolCalls.map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } }));
  }
  return found;
}
