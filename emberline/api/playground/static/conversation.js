// A conversation: a tree of messages, of which one path is shown. Editing or regenerating adds a branch.

import { Observable, newId } from "./ui.js";

const FORMAT = "emberline.conversation";
const ROLES = new Set(["user", "assistant", "tool"]);
const MAX_MESSAGES = 10_000;

export class Message extends Observable {
  children = [];
  selected = 0; // which of the children is shown
  content = "";
  reasoning = "";
  toolCalls = []; // {id, name, arguments}
  toolCallId = null; // of a tool's result
  images = []; // data URLs
  model = null; // of a reply
  status = "done"; // streaming, done, stopped, lost, failed
  error = null; // what to say of a reply that did not end well
  finish = null;
  metrics = null; // {ttftMs, tokensPerS, promptTokens, cachedTokens, completionTokens, …}

  constructor(role, fields = {}) {
    super();
    this.id = newId();
    this.role = role;
    Object.assign(this, fields);
  }

  get isReply() {
    return this.role === "assistant";
  }

  add(child) {
    child.parent = this;
    this.selected = this.children.push(child) - 1;
    return child;
  }
}

export class Conversation extends Observable {
  constructor() {
    super();
    this.id = newId();
    this.root = new Message("root");
  }

  /** The messages that are shown, first to last. */
  get path() {
    const found = [];
    for (let node = this.root; node.children.length; ) {
      node = node.children[node.selected];
      found.push(node);
    }
    return found;
  }

  get last() {
    return this.path.at(-1) ?? this.root;
  }

  get isEmpty() {
    return !this.root.children.length;
  }

  add(message, parent = this.last) {
    parent.add(message);
    this.changed();
    return message;
  }

  /** Shows the branch `step` before or after the one that holds the message. */
  turn(message, step) {
    const siblings = message.parent.children;
    message.parent.selected = Math.min(Math.max(siblings.indexOf(message) + step, 0), siblings.length - 1);
    this.changed();
  }

  clone() {
    return Conversation.parse(this.export());
  }

  /** As plain data: all branches, in an order where parents come first. */
  export() {
    const messages = [];
    const visit = (node) => {
      for (const child of node.children) {
        const { id, role, content, reasoning, toolCalls, toolCallId, images, model, status, error, finish, metrics } = child;
        const selected = node.children.indexOf(child) === node.selected;
        messages.push({ id, parent: node.parent ? node.id : null, selected, role, content, reasoning, toolCalls, toolCallId, images, model, status, error, finish, metrics });
        visit(child);
      }
    };
    visit(this.root);
    return { format: FORMAT, version: 1, messages };
  }

  /** Reads what `export` wrote, or a plain list of OpenAI's messages. Nothing in the file is trusted. */
  static parse(data) {
    const conversation = new Conversation();
    const rows = Array.isArray(data) ? fromOpenAI(data) : data?.messages;
    if (!Array.isArray(rows) || (!Array.isArray(data) && data.format !== FORMAT)) {
      throw new Error("This is not a conversation: neither an export of the playground nor a list of messages.");
    }
    if (rows.length > MAX_MESSAGES) throw new Error(`A conversation may have ${MAX_MESSAGES} messages.`);
    const nodes = new Map([[null, conversation.root]]);
    const selected = [];
    for (const row of rows) {
      const parent = nodes.get(row?.parent ?? null);
      if (!parent || !ROLES.has(row.role) || typeof row.content !== "string") {
        throw new Error("A message of this file has no known role, no text, or no parent before it.");
      }
      const message = parent.add(new Message(row.role, fields(row)));
      nodes.set(String(row.id), message);
      if (row.selected) selected.push(message);
    }
    for (const message of selected) message.parent.selected = message.parent.children.indexOf(message);
    return conversation;
  }
}

function fields(row) {
  const text = (value) => (typeof value === "string" ? value : "");
  const list = (value) => (Array.isArray(value) ? value : []);
  return {
    content: row.content,
    reasoning: text(row.reasoning),
    toolCalls: list(row.toolCalls).map((call) => ({ id: text(call?.id), name: text(call?.name), arguments: text(call?.arguments) })),
    toolCallId: text(row.toolCallId) || null,
    images: list(row.images).filter((url) => typeof url === "string" && /^data:image\/(png|jpeg|webp|gif);base64,/.test(url)),
    model: text(row.model) || null,
    status: ["done", "stopped", "lost", "failed"].includes(row.status) ? row.status : "done",
    error: text(row.error) || null,
    finish: text(row.finish) || null,
    metrics: row.metrics && typeof row.metrics === "object" ? numbers(row.metrics) : null,
  };
}

function numbers(metrics) {
  return Object.fromEntries(Object.entries(metrics).filter(([, value]) => typeof value === "number" || typeof value === "boolean"));
}

function fromOpenAI(messages) {
  return messages
    .filter((message) => ROLES.has(message?.role))
    .map((message, index) => ({
      id: String(index),
      parent: index ? String(index - 1) : null,
      role: message.role,
      content: message.content === null && message.tool_calls ? "" : textOf(message.content),
      reasoning: message.reasoning_content ?? message.reasoning,
      toolCalls: (message.tool_calls ?? []).map((call) => ({ id: call.id, name: call.function?.name, arguments: call.function?.arguments })),
      toolCallId: message.tool_call_id,
    }));
}

/** A text, or the texts of a list of parts; anything else is not valid and stays as it is. */
function textOf(parts) {
  return Array.isArray(parts) ? parts.map((part) => part?.text ?? "").join("\n") : parts;
}
