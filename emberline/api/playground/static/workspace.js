// What the playground works on: one pane, or two side by side, each with its conversation and its settings.

import { chats, titleOf } from "./chats.js";
import { Conversation, Message } from "./conversation.js";
import { Generation } from "./generation.js";
import { models } from "./models.js";
import { Settings } from "./settings.js";
import { Observable, newId } from "./ui.js";

const STORED = "emberline.workspace"; // in the tab's session storage, so that a reload loses nothing
const MAX_STORED_CHARS = 2_000_000;
const FORMAT = "emberline.workspace";
const KEEP_MS = 500;

export class Pane extends Observable {
  generation = null; // while a reply is generated
  refused = null; // why the last request was not sent: what is wrong with the settings

  constructor(settings = new Settings(), conversation = new Conversation()) {
    super();
    this.settings = settings;
    this.conversation = conversation;
  }

  get model() {
    return models.get(this.settings.model);
  }

  get busy() {
    return this.generation !== null;
  }

  /** The body of the request that the shown messages make, with one more message if there is a draft. */
  body(messages = this.conversation.path, extra = {}) {
    return { ...this.settings.body(messages, this.model?.state !== "provider"), ...extra };
  }

  clone() {
    return new Pane(this.settings.clone(), this.conversation.clone());
  }

  /** True if the model is known to take no images and there are some. */
  isBlindTo(images) {
    return images.length > 0 && this.model?.vision === false;
  }

  /** True if the settings, or images that the model does not take, keep a request from being sent; the composer shows why. */
  refuses(images = []) {
    this.set({ refused: this.settings.problem });
    return this.refused !== null || this.isBlindTo(images);
  }

  send(content, images) {
    if (this.refuses(images)) return undefined;
    this.conversation.add(new Message("user", { content, images }));
    return this.reply();
  }

  /** Generates a reply to the last message shown. */
  reply() {
    if (this.refuses()) return undefined;
    const path = this.conversation.path;
    return this.#generate(this.conversation.add(new Message("assistant")), this.body(path));
  }

  /** Generates another reply in place of this one; both remain as branches. */
  regenerate(reply) {
    if (this.refuses()) return undefined;
    const path = this.#before(reply);
    const again = this.conversation.add(new Message("assistant"), reply.parent);
    return this.#generate(again, this.body(path));
  }

  /** Goes on where a reply was cut off. */
  continue(reply) {
    if (this.refuses()) return undefined;
    const path = [...this.#before(reply), reply];
    return this.#generate(reply, this.body(path, { continue_final_message: true, add_generation_prompt: false }));
  }

  /** A changed message starts a branch; a changed question is answered. False: the settings keep it from being sent. */
  edit(message, content) {
    if (!message.isReply && this.refuses()) return false;
    const { role, images, toolCalls, toolCallId, model } = message;
    this.conversation.add(new Message(role, { content, images, toolCalls, toolCallId, model }), message.parent);
    return message.isReply ? undefined : this.reply();
  }

  /** Adds the tools' results and generates the reply to them. */
  answerTools(reply, results) {
    if (this.refuses()) return undefined;
    let parent = reply;
    reply.toolCalls.forEach((call, i) => {
      parent = this.conversation.add(new Message("tool", { content: results[i], toolCallId: call.id }), parent);
    });
    return this.reply();
  }

  stop() {
    this.generation?.stop();
  }

  #before(message) {
    const path = this.conversation.path;
    return path.slice(0, path.indexOf(message));
  }

  async #generate(message, body) {
    this.stop();
    const generation = new Generation(message, body, this.conversation.id);
    this.set({ generation });
    await generation.done;
    if (this.generation === generation) this.set({ generation: null });
    workspace.keep();
  }
}

/** The message that is being written. It outlives the composer, which is drawn anew when panes are added or removed. */
class Draft extends Observable {
  text = "";
  images = []; // data URLs

  get isEmpty() {
    return !this.text.trim() && !this.images.length;
  }
}

class Workspace extends Observable {
  draft = new Draft();
  panes = [new Pane()];
  id = newId(); // of the chat, where it is saved
  title = null; // the chat's name, if it was given one
  #timer = 0;
  active = 0; // the pane whose settings are shown

  get pane() {
    return this.panes[this.active] ?? this.panes[0];
  }

  get compares() {
    return this.panes.length > 1;
  }

  get busy() {
    return this.panes.some((pane) => pane.busy);
  }

  /** `keeps`: the present chat is saved first. */
  newChat(keeps = true) {
    this.stop();
    if (keeps) this.save();
    for (const pane of this.panes) pane.set({ conversation: new Conversation(), generation: null });
    Object.assign(this, { id: newId(), title: null });
    this.keep();
    this.changed();
  }

  /** Side by side, both begin alike; then the left one stays. */
  compare() {
    this.stop();
    const panes = this.compares ? [this.panes[0]] : [this.panes[0], this.panes[0].clone()];
    this.set({ panes, active: panes.length - 1 });
    this.keep();
  }

  stop() {
    for (const pane of this.panes) pane.stop();
  }

  export() {
    return { format: FORMAT, version: 1, id: this.id, title: this.title, panes: this.panes.map(({ settings, conversation }) => ({ settings: settings.export(), conversation: conversation.export() })) };
  }

  /** Reads an export of the workspace or of one conversation, or a list of OpenAI's messages. */
  import(data) {
    const rows = data?.format === FORMAT && Array.isArray(data.panes) ? data.panes.slice(0, 2) : [{ conversation: data }];
    const panes = rows.map(({ settings, conversation }) => new Pane(settings ? Settings.parse(settings) : this.pane.settings.clone(), Conversation.parse(conversation)));
    if (!panes.length) throw new Error("The file holds no conversation.");
    this.stop();
    this.set({ panes, active: 0, id: newId(), title: null });
    this.chooseModels();
    this.keep();
  }

  /** Shows a saved chat, which goes on where it was saved. */
  open(id, title, data) {
    this.save();
    this.import(data);
    this.set({ id: String(id), title: title === this.#firstTitle ? null : title });
  }

  /** Panes without a model that the server knows get the preferred one. */
  chooseModels() {
    for (const { settings } of this.panes) {
      const known = models.get(settings.model);
      if (known) settings.model = known.id;
      else if (models.preferred) settings.set({ model: models.preferred.id });
    }
    this.changed();
  }

  /** Soon, as it may be called for every key that is pressed. */
  keep() {
    this.#timer ||= setTimeout(() => this.flush(), KEEP_MS);
  }

  flush() {
    clearTimeout(this.#timer);
    this.#timer = 0;
    try {
      const text = JSON.stringify(this.export());
      if (text.length <= MAX_STORED_CHARS) sessionStorage.setItem(STORED, text);
    } catch {
      // storage may be full or blocked: then a reload begins anew
    }
    this.save();
  }

  /** Saves the chat where the user keeps chats, unless it is empty or a reply is being generated. */
  save() {
    if (!chats.store || this.busy || this.panes.every((pane) => pane.conversation.isEmpty)) return;
    const { id, title, ...document } = this.export();
    const text = this.panes.flatMap((pane) => pane.conversation.path.map((message) => message.content)).join("\n");
    chats.save(id, title ?? this.#firstTitle, text, document);
  }

  /** Resolves when the chat is saved as it is now. */
  saved() {
    this.flush();
    return chats.saving;
  }

  get #firstTitle() {
    return titleOf(this.pane.conversation.path[0]?.content ?? "");
  }

  restore() {
    try {
      const text = sessionStorage.getItem(STORED);
      if (!text) return;
      const { id, title, ...document } = JSON.parse(text);
      this.import(document);
      if (typeof id === "string") this.set({ id, title: typeof title === "string" ? title : null });
    } catch {
      // not ours, or of another version
    }
  }
}

export const workspace = new Workspace();
addEventListener("pagehide", () => workspace.flush());
