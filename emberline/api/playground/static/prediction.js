// A model that a user brought along: a form drawn from its schema, and its output with images, audio and files shown.

import { ConnectionLost, getJson, runModel, session } from "./api.js";
import { Button, CopyButton, html, Icon, useEffect, useRef, useState, visible } from "./ui.js";

const MAX_FILE_BYTES = 20 << 20;
const MAX_DEPTH = 8; // of an output that is shown field by field
const DATA_URL = /^data:([a-z]+\/[a-z0-9.+-]+)[;,]/i;
const LONG_TEXT_CHARS = 200;

export function PredictionForm({ model }) {
  const [schema, setSchema] = useState(null);
  const [values, setValues] = useState({});
  const [state, setState] = useState({}); // { busy, problem, output, seconds, texts, metrics, logs }
  const controller = useRef(null);
  useEffect(() => {
    let stale = false;
    getJson(`/client/v4/accounts/me/ai/models/schema?model=${encodeURIComponent(model.id)}`)
      .then(({ result }) => stale || setSchema(result))
      .catch((error) => stale || setState({ problem: error.message }));
    return () => {
      stale = true;
      controller.current?.abort();
    };
  }, [model.id]);
  if (!schema) return html`<section class="pane prediction"><p class="loading">${state.problem ? visible(state.problem) : "Loading the model's inputs…"}</p></section>`;

  const required = new Set(schema.input.required ?? []);
  const fields = Object.entries(schema.input.properties ?? {}).sort((a, b) => (a[1]["x-order"] ?? 0) - (b[1]["x-order"] ?? 0));
  const set = (name, value) => setValues((before) => ({ ...before, [name]: value }));
  const run = async (event) => {
    event.preventDefault();
    const began = performance.now();
    const seconds = () => (performance.now() - began) / 1000;
    const aborting = (controller.current = new AbortController());
    try {
      const inputs = inputsOf(fields, values);
      setState({ busy: true, texts: [] });
      const onText = (text) => setState((before) => ({ ...before, texts: [...before.texts, text] }));
      const found = await runModel(model.id, inputs, { streams: schema.streams, signal: aborting.signal, onText });
      setState((before) => ({ ...before, ...found, busy: false, seconds: seconds() }));
    } catch (error) {
      const problem = error.name === "AbortError" ? "The prediction was stopped." : error.message;
      setState((before) => ({ texts: error instanceof ConnectionLost ? before.texts : [], problem, seconds: seconds() }));
    }
  };
  return html`<section class="pane prediction" aria-label="Prediction">
    <div class="scroller" tabindex="-1"><div class="columns">
      <form onSubmit=${run} aria-label="Inputs">
        <h2>Inputs</h2>
        ${fields.length === 0 && html`<p class="soft">This model has no inputs.</p>`}
        ${fields.map(([name, field]) => html`<${Field} key=${name} name=${name} field=${field} required=${required.has(name)} value=${values[name]} set=${(value) => set(name, value)} />`)}
        <div class="row"><button type="submit" class="button primary" disabled=${state.busy}><${Icon} name="play" /><span>Run</span></button>
          ${state.busy && html`<${Button} icon="stop" text="Stop" onClick=${() => controller.current?.abort()} />`}
          <${Button} text="Reset" class="quiet" onClick=${() => setValues({})} /></div>
        <details><summary>Code</summary><${Sample} model=${model} fields=${fields} values=${values} /></details>
      </form>
      <div class="output" role="region" aria-label="Output" aria-live="polite" aria-busy=${Boolean(state.busy)}>
        <h2>Output</h2>
        ${state.problem && html`<p class="problem" role="alert"><${Icon} name="warn" />${visible(state.problem)}</p>`}
        ${state.texts?.length > 0 && html`<${Streamed} texts=${state.texts} schema=${schema.output} />`}
        ${"output" in state && html`<${Value} value=${state.output} />`}
        ${state.busy && !state.texts?.length && html`<p class="soft">Running…</p>`}
        ${!state.busy && state.seconds !== undefined && html`<p class="metrics"><span>${state.seconds.toFixed(2)} s</span>
          ${Object.entries(state.metrics ?? {}).map(([name, value]) => html`<span>${visible(name)} ${visible(typeof value === "number" ? Number(value.toPrecision(4)) : JSON.stringify(value))}</span>`)}</p>`}
        ${state.logs && html`<details><summary>Log</summary><pre class="plain">${visible(state.logs)}</pre></details>`}
      </div>
    </div></div>
  </section>`;
}

function Field({ name, field, required, value, set }) {
  const id = `i-${name}`;
  const label = html`<span class="line"><b>${visible(field.title ?? name)}</b><code class="soft">${visible(name)}${required ? ", required" : ""}</code></span>
    ${field.description && html`<span class="soft">${visible(field.description)}</span>`}`;
  if (field.type === "boolean") {
    return html`<label class="field check"><input id=${id} type="checkbox" checked=${value ?? field.default ?? false} onChange=${(event) => set(event.target.checked)} /><span>${label}</span></label>`;
  }
  return html`<label class="field">${label}<${Control} id=${id} field=${field} required=${required} value=${value} set=${set} /></label>`;
}

function Control({ id, field, required, value, set }) {
  const type = (event) => set(event.target.value);
  const given = value ?? "";
  if (field.enum) {
    const options = field.enum.map((choice) => html`<option value=${JSON.stringify(choice)}>${visible(String(choice))}</option>`);
    const chosen = value ?? (field.default === undefined ? "" : JSON.stringify(field.default));
    return html`<select id=${id} required=${required} value=${chosen} onChange=${type}>${field.default === undefined && html`<option value=""></option>`}${options}</select>`;
  }
  if (isFile(field)) return html`<${FileInput} id=${id} required=${required} value=${value} set=${set} />`;
  if (field.type === "array" && isFile(field.items)) return html`<${FileInput} id=${id} required=${required} value=${value} set=${set} multiple />`;
  if (field.type === "integer" || field.type === "number") {
    return html`<input id=${id} type="number" required=${required} min=${field.minimum} max=${field.maximum} step=${field.type === "integer" ? 1 : "any"}
      placeholder=${field.default ?? ""} value=${given} onInput=${type} />`;
  }
  if (field.format === "password") return html`<input id=${id} type="password" autocomplete="off" required=${required} value=${given} onInput=${type} />`;
  const isText = field.type === "string";
  const fallback = field.default === undefined ? "" : isText ? field.default : JSON.stringify(field.default);
  return html`<textarea id=${id} class=${isText ? "" : "code"} rows=${isText && (field.maxLength ?? LONG_TEXT_CHARS) < LONG_TEXT_CHARS ? 1 : 2} required=${required} minlength=${isText ? field.minLength : undefined}
    maxlength=${isText ? field.maxLength : undefined} placeholder=${isText ? fallback : fallback || "JSON"} value=${given} onInput=${type}></textarea>`;
}

/** Files from the disk as data: URLs, or the URL of one, which the server fetches. */
function FileInput({ id, required, value, set, multiple = false }) {
  const [problem, setProblem] = useState(null);
  const urls = value === undefined ? [] : [value].flat();
  const read = async (files) => {
    const large = [...files].find((file) => file.size > MAX_FILE_BYTES);
    setProblem(large ? `${large.name} is larger than ${MAX_FILE_BYTES >> 20} MiB.` : null);
    if (large || !files.length) return;
    const found = await Promise.all([...files].map(dataUrl));
    set(multiple ? found : found[0]);
  };
  const isUrl = urls.length === 1 && /^https?:/.test(urls[0]);
  return html`<span class="file">
    <input id=${id} type="file" multiple=${multiple} required=${required && !urls.length} onChange=${(event) => read(event.target.files)} />
    ${!multiple && html`<input type="url" aria-label="or its URL" placeholder="or its URL: https://…" value=${isUrl ? urls[0] : ""} onInput=${(event) => set(event.target.value || undefined)} />`}
    ${problem && html`<span class="problem" role="alert">${visible(problem)}</span>`}
    ${urls.filter((url) => DATA_URL.test(url)).map((url) => html`<${Media} url=${url} />`)}
  </span>`;
}

function Streamed({ texts, schema }) {
  if (schema["x-cog-array-display"] === "concatenate") return html`<pre class="plain">${visible(texts.join(""))}</pre>`;
  return texts.map((text) => html`<${Value} value=${text} />`);
}

/** Any output: files as what they are, texts, lists and objects field by field. */
function Value({ value, depth = 0 }) {
  if (typeof value === "string") return DATA_URL.test(value) || value.startsWith("blob:") ? html`<${Media} url=${value} />` : html`<pre class="plain">${visible(value)}</pre>`;
  if (value === null || typeof value !== "object" || depth > MAX_DEPTH || !hasFile(value)) return html`<div class="row top"><pre class="plain code">${visible(JSON.stringify(value, null, 2))}</pre><${CopyButton} text=${JSON.stringify(value)} /></div>`;
  if (Array.isArray(value)) return value.map((each) => html`<${Value} value=${each} depth=${depth + 1} />`);
  return html`<dl class="fields">${Object.entries(value).map(([name, each]) => html`<dt>${visible(name)}</dt><dd><${Value} value=${each} depth=${depth + 1} /></dd>`)}</dl>`;
}

function Media({ url, kind = DATA_URL.exec(url)?.[1] ?? "" }) {
  const [family] = kind.toLowerCase().split("/");
  const shown = family === "image" ? html`<img src=${url} alt="Output image" />` : family === "audio" ? html`<audio controls src=${url}></audio>` : family === "video" ? html`<video controls src=${url}></video>` : null;
  return html`<span class="media">${shown}<a href=${url} download=${`output.${kind.split("/")[1]?.split("+")[0] ?? "bin"}`}>Download${shown ? "" : ` (${visible(kind || "file")})`}</a></span>`;
}

/** The request as a command. A file is shortened: its bytes are of no use to a reader. */
function Sample({ model, fields, values }) {
  let body;
  try {
    body = inputsOf(fields, values);
  } catch (error) {
    return html`<p class="problem">${visible(error.message)}</p>`;
  }
  const short = JSON.stringify(body, (_, value) => (typeof value === "string" && DATA_URL.test(value) ? `${DATA_URL.exec(value)[0]}base64,…` : value), 2);
  const key = session.key === null ? "" : ` \\\n  -H "Authorization: Bearer $EMBERLINE_API_KEY"`;
  const code = `curl ${location.origin}/client/v4/accounts/me/ai/run/${model.id}${key} \\\n  -d '${short.replaceAll("'", `'\\''`)}'`;
  return html`<div class="row top"><pre class="plain code">${visible(code)}</pre><${CopyButton} text=${code} /></div>`;
}

const isFile = (field) => field?.format === "uri";
const hasFile = (value) => JSON.stringify(value).includes('"data:');

/** What the form says as the model's inputs; fields that were left alone are left out. Throws an Error for bad JSON. */
function inputsOf(fields, values) {
  const inputs = {};
  for (const [name, field] of fields) {
    const value = values[name];
    if (value === undefined || value === "") continue;
    if (typeof value === "boolean" || Array.isArray(value)) inputs[name] = value;
    else if (field.type === "integer" || field.type === "number") inputs[name] = Number(value);
    else if (field.type === "string" && !field.enum) inputs[name] = value;
    else {
      try {
        inputs[name] = JSON.parse(value);
      } catch {
        throw new Error(`${name} is not JSON.`);
      }
    }
  }
  return inputs;
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
