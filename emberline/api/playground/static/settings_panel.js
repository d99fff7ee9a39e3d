// The panel of settings: system prompt, parameters, reasoning, tools, output format.

import { parseSchema, parseTools } from "./json_schema.js";
import { EFFORTS, PARAMETERS } from "./settings.js";
import { Button, html, Icon, useObservable, useState, visible } from "./ui.js";
import { workspace } from "./workspace.js";

const TOOL = `[
  {
    "type": "function",
    "function": {
      "name": "get_weather",
      "description": "The weather of a town, now",
      "parameters": {
        "type": "object",
        "properties": { "town": { "type": "string" } },
        "required": ["town"]
      }
    }
  }
]`;
const SCHEMA = `{
  "type": "object",
  "properties": {
    "name": { "type": "string" },
    "age": { "type": "integer", "minimum": 0 }
  },
  "required": ["name", "age"],
  "additionalProperties": false
}`;

export function SettingsPanel({ close }) {
  useObservable(workspace);
  const settings = useObservable(workspace.pane.settings);
  const model = workspace.pane.model;
  const set = (fields) => {
    settings.set(fields);
    workspace.keep();
  };
  const setParameter = (name, value) => set({ parameters: { ...settings.parameters, [name]: value } });
  const shown = (more) => PARAMETERS.filter((p) => Boolean(p.more) === more).map((p) => html`<${Parameter} key=${p.name} parameter=${p}
    value=${settings.parameters[p.name]} fallback=${model?.defaults[p.name]} onChange=${(value) => setParameter(p.name, value)} />`);
  return html`<aside class="settings" id="settings" aria-label="Settings">
    <header><h2>Settings</h2>
      ${workspace.compares && html`<div class="segments" role="group" aria-label="Settings of">
        ${["Left", "Right"].map((name, i) => html`<button type="button" aria-pressed=${workspace.active === i} onClick=${() => workspace.set({ active: i })}>${name}</button>`)}</div>`}
      <${Button} icon="close" label="Close the settings" class="quiet only-narrow" onClick=${close} />
    </header>
    <label class="field">System prompt
      <textarea rows="3" placeholder="How the model should behave" value=${settings.system} onInput=${(event) => set({ system: event.target.value })}></textarea></label>
    ${shown(false)}
    <label class="field row">Reasoning
      <select value=${settings.effort} onChange=${(event) => set({ effort: event.target.value })}>
        ${EFFORTS.map((effort) => html`<option value=${effort}>${effort || "the model's own"}</option>`)}</select></label>
    <details><summary>More parameters</summary>
      ${shown(true)}
      <label class="field">Stop sequences, one per line
        <textarea rows="2" value=${settings.stop} onInput=${(event) => set({ stop: event.target.value })}></textarea></label>
    </details>
    <details open=${Boolean(settings.tools)}><summary>Tools</summary>
      <${JsonEditor} label="Tools" value=${settings.tools} sample=${TOOL} check=${parseTools} optional onChange=${(tools) => set({ tools })} />
      <label class="field row">Tool choice
        <select value=${settings.toolChoice} onChange=${(event) => set({ toolChoice: event.target.value })}>
          ${["auto", "required", "none"].map((choice) => html`<option>${choice}</option>`)}</select></label>
    </details>
    <details open=${settings.format !== "text"}><summary>Output format</summary>
      <div class="segments" role="group" aria-label="Output format">
        ${[["text", "Text"], ["json_object", "JSON"], ["json_schema", "JSON schema"]].map(([format, name]) => html`<button type="button" aria-pressed=${settings.format === format} onClick=${() => set({ format })}>${name}</button>`)}
      </div>
      ${settings.format === "json_schema" && html`<${JsonEditor} label="JSON schema" value=${settings.schema} sample=${SCHEMA} check=${parseSchema} onChange=${(schema) => set({ schema })} />`}
    </details>
  </aside>`;
}

function Parameter({ parameter, value, fallback, onChange }) {
  const { name, label, min, max, step, whole, hint } = parameter;
  const [draft, setDraft] = useState({}); // what is being typed, such as "0.", and the value that it means
  const read = (event) => {
    const text = event.target.value;
    const number = whole ? Math.round(Number(text)) : Number(text);
    const read = text === "" || !Number.isFinite(number) ? null : Math.min(max, Math.max(min, number));
    setDraft({ text, value: read });
    onChange(read);
  };
  const shown = value ?? (typeof fallback === "number" ? fallback : undefined);
  const slides = max <= 2;
  return html`<div class="field parameter" title=${hint}>
    <label for=${`p-${name}`}>${label}</label>
    ${slides && html`<input type="range" aria-label=${`${label}, slider`} tabindex="-1" min=${min} max=${max} step=${step} value=${shown ?? (name === "temperature" || name === "top_p" ? 1 : 0)} onInput=${read} class=${value === null ? "unset" : ""} />`}
    <input id=${`p-${name}`} type="number" inputmode="decimal" min=${min} max=${max} step=${step} value=${draft.value === value ? draft.text : value ?? ""} placeholder=${typeof fallback === "number" ? String(fallback) : "auto"} onInput=${read} onBlur=${() => setDraft({})} aria-description=${hint} />
    ${value !== null ? html`<${Button} icon="close" label=${`Leave ${label} to the model`} class="quiet small" onClick=${() => onChange(null)} />` : null}
  </div>`;
}

/** A JSON text with a mark that says whether it is valid, and why not. */
function JsonEditor({ label, value, sample, check, optional, onChange }) {
  const empty = !value.trim();
  const { problem } = check(value);
  const onKey = (event) => {
    if (event.key !== "Tab" || event.shiftKey || event.ctrlKey || event.altKey || !event.target.value) return;
    event.preventDefault(); // two spaces; Escape, then Tab leaves the editor
    event.target.setRangeText("  ", event.target.selectionStart, event.target.selectionEnd, "end");
    onChange(event.target.value);
  };
  const format = () => onChange(JSON.stringify(JSON.parse(value), null, 2));
  return html`<div class="json-editor">
    <div class="row">
      <span class=${`mark ${empty && optional ? "" : problem ? "bad" : "good"}`} role="status">
        ${empty ? (optional ? "none" : "empty") : html`<${Icon} name=${problem ? "warn" : "check"} />${problem ? "not valid" : "valid"}`}</span>
      ${empty ? html`<button type="button" class="button small" onClick=${() => onChange(sample)}>Insert an example</button>` : !problem && html`<button type="button" class="button small" onClick=${format}>Format</button>`}
    </div>
    <textarea class="code" rows=${empty ? 3 : 12} spellcheck=${false} aria-label=${`${label}, as JSON`} aria-invalid=${Boolean(problem) && !empty} value=${value} onInput=${(event) => onChange(event.target.value)} onKeyDown=${onKey}></textarea>
    ${problem && !empty && html`<p class="problem">${visible(problem)}</p>`}
  </div>`;
}
