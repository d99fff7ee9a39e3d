// Usage of the last 30 days: tokens and cost by day, and by account, key or model what was used and what caching saved.

import { getJson, getText } from "./api.js";
import { Bars } from "./charts.js";
import { number, percent } from "./format.js";
import { models } from "./models.js";
import { Table } from "./table.js";
import { Button, downloadText, html, useLayoutEffect, useObservable, useState, visible } from "./ui.js";

const GROUPS = { account: "Account", key: "Key", model: "Model", session: "Session" };

/** Exact decimals of the server, shortened for reading; null: no price was set. */
function money(text) {
  if (text === null) return "no price";
  const value = Number(text);
  return value === 0 ? "0" : value < 0.01 ? "< 0.01" : value.toFixed(2);
}

export function Usage() {
  const [days, setDays] = useState(null);
  const [group, setGroup] = useState("account");
  const [report, setReport] = useState(null);
  const [problem, setProblem] = useState(null);
  const [other, setOther] = useState(""); // the model at whose prices the same requests are reckoned
  const [compared, setCompared] = useState(null);
  /** Returns how to drop the answer, which may come after another group was chosen. */
  const load = (path, done) => {
    let wanted = true;
    const fetchReport = async () => {
      try {
        const found = await getJson(path);
        if (!wanted) return;
        done(found);
        setProblem(null);
      } catch (error) {
        if (wanted) setProblem(error.message);
      }
    };
    fetchReport();
    return () => (wanted = false);
  };
  useLayoutEffect(() => load("/api/usage?by=day", setDays), []);
  useLayoutEffect(() => load(`/api/usage?by=${group}`, setReport), [group]);
  useLayoutEffect(() => (other ? load(`/api/usage?by=&compare=${encodeURIComponent(other)}`, setCompared) : setCompared(null)), [other]);
  useLayoutEffect(() => void models.refresh(), []);
  const save = async () => downloadText(await getText("/api/usage?by=day,account,key,model&format=csv"), "usage.csv", "text/csv");

  const total = report?.total;
  const priced = useObservable(models).all.filter((model) => model.pricing);
  const byDay = (days?.data ?? []).map((row) => ({ ...row, name: row.day.slice(5) }));
  const cells = (row) => [
    visible(row[group]) || html`<span class="soft">none</span>`,
    number(row.requests),
    number(row.input_tokens),
    percent(row.input_tokens ? row.cached_tokens / row.input_tokens : null),
    number(row.output_tokens),
    number(Math.round(row.device_seconds ?? 0)),
    money(row.cost),
    money(row.cache_savings),
    money(row.affinity_savings),
  ];
  return html`
    ${problem && html`<p class="problem" role="alert">${visible(problem)}</p>`}
    <section class="charts" aria-label="Usage by day">
      <${Bars} title="Tokens by day" names=${["prompt computed", "output", "prompt cached"]}
        bars=${byDay.map((row) => ({ name: row.name, parts: [row.input_tokens - row.cached_tokens, row.output_tokens, row.cached_tokens] }))} />
      <${Bars} title="Cost by day, and what caching saved" names=${["cost", "saved"]} format=${(value) => (value ? value.toPrecision(2) : "0")}
        bars=${byDay.map((row) => ({ name: row.name, parts: [Number(row.cost ?? 0), Number(row.cache_savings)] }))} />
    </section>
    <${Table} title="Usage" caption="of the last 30 days" empty="No request yet." head=${[GROUPS[group], "Requests", "Prompt tokens", "Cached", "Output tokens", "Device seconds", "Cost", "Saved by caching", "of it by affinity"]}
      rows=${[...(report?.data ?? []).map(cells), ...(total?.requests ? [[html`<b>Total</b>`, ...cells(total).slice(1)]] : [])]}>
      <div class="row bar-of-table">
        <span class="segments" role="group" aria-label="Group by">${Object.entries(GROUPS).map(([id, name]) => html`<button type="button" aria-pressed=${id === group} onClick=${() => (setReport(null), setGroup(id))}>${name}</button>`)}</span>
        <${Button} icon="download" text="CSV" label="Download as CSV: by day, account, key and model" class="small" onClick=${() => save().catch((error) => setProblem(error.message))} />
      </div>
      ${priced.length > 0 && html`<div class="row"><label class="row">Compare with
        <select value=${other} onChange=${(event) => setOther(event.target.value)}><option value="">…</option>${priced.map((model) => html`<option value=${model.id}>${visible(model.name)}</option>`)}</select></label></div>`}
      ${compared?.comparison && html`<p role="status">${visible(compared.comparison.sentence)}</p>`}
      ${total?.without_price > 0 && html`<p class="soft">${number(total.without_price)} requests of models without a price are in no cost. <code>emberline price set</code> gives a model one.</p>`}
    <//>`;
}
