// The operator's pages: load, requests, the durable queue, accounts and usage. The part behind # chooses the page.

import { Accounts } from "./accounts.js";
import { postJson, session } from "./api.js";
import { Histogram, Meter, TimeSeries } from "./charts.js";
import { age, bytes, duration, number, percent } from "./format.js";
import { Queue } from "./queue.js";
import { server } from "./server_status.js";
import { SignIn } from "./sign_in.js";
import { Cells, Table } from "./table.js";
import { announce, Button, html, Icon, render, Shell, useLayoutEffect, useObservable, useState, visible } from "./ui.js";

const PAGES = { load: ["Load", Load], requests: ["Requests", Requests], queue: ["Queue", Queue], accounts: ["Accounts", Accounts] };

function App() {
  useObservable(server);
  useObservable(session);
  const [page, setPage] = useState(chosen());
  useLayoutEffect(() => {
    const turn = () => setPage(chosen());
    addEventListener("hashchange", turn);
    return () => removeEventListener("hashchange", turn);
  }, []);
  const [, Page] = PAGES[page];
  const signOut = session.key !== null && html`<${Button} icon="key" text="Sign out" label="Forget the key" class="quiet" onClick=${() => session.signOut()} />`;
  return html`<${Shell} here="/operations" actions=${signOut}>
    <main class="operations">
      <h1 class="visually-hidden">Operations</h1>
      <nav class="tabs" aria-label="Operations">${Object.entries(PAGES).map(([id, [name]]) => html`<a href=${`#${id}`} aria-current=${id === page ? "page" : undefined}>${name}</a>`)}</nav>
      <${Health} />
      ${server.now ? html`<${Page} />` : !server.error && html`<p class="loading">Asking the server…</p>`}
    </main>
    ${session.needed && html`<${SignIn} onSignedIn=${() => server.refresh()} />`}
  <//>`;
}

function chosen() {
  const id = location.hash.slice(1);
  return Object.hasOwn(PAGES, id) ? id : "load";
}

function Health() {
  const { now, error } = server;
  if (error?.status === 403) {
    return html`<p class="banner bad" role="alert"><${Icon} name="warn" />This key may not see the server's state: sign in with an admin key.
      <${Button} text="Sign in" class="small" onClick=${() => session.signOut("Sign in with an admin key.")} /></p>`;
  }
  if (error && error.status !== 401) return html`<p class="banner bad" role="alert"><${Icon} name="warn" />${visible(error.message)} Trying again.</p>`;
  if (!now) return null;
  const text = now.ok ? now.problem || "Every model can be served." : now.problem || "No model can be served.";
  const kind = !now.ok ? "bad" : now.problem ? "warn" : "good";
  return html`<p class=${`banner ${kind}`} role="status"><${Icon} name=${kind === "good" ? "check" : "warn"} /><span>${visible(text)}</span>
    <span class="soft">version ${visible(now.version)}, up ${age(now.uptime_s)}</span></p>`;
}

// --- load -----------------------------------------------------------------------------------------------------------

function Load() {
  const { now, series } = server;
  const times = series.time_s ?? [];
  const computed = (series.input_tokens ?? []).map((value, i) => (value - series.cached_tokens[i]) / now.step_s);
  const hits = server.total("input_tokens") ? server.total("cached_tokens") / server.total("input_tokens") : null;
  const chart = (title, names, format, max) => html`<${TimeSeries} title=${title} times=${times} format=${format} max=${max} lines=${Object.entries(names).map(([name, values]) => ({ name, values }))} />`;
  return html`
    <section class="tiles" aria-label="Now">
      <${Tile} name="In flight" value=${number(now.phases.prefill + now.phases.decode)} note=${`${number(now.phases.prefill)} prefill, ${number(now.phases.decode)} decode`} />
      <${Tile} name="Waiting" value=${number(now.phases.waiting)} note="for admission" />
      <${Tile} name="Output" value=${`${number(server.rate("output_tokens").at(-1) ?? 0)} tok/s`} note=${`${number(server.total("output_tokens"))} in the last hour`} />
      <${Tile} name="Prompt tokens cached" value=${percent(hits)} note=${`${number(server.total("cached_tokens"))} not computed again`} />
      <${Tile} name="TTFT p95" value=${duration(server.last("ttft_p95_ms"))} note="last measured" />
      <${Tile} name="Failed" value=${number(server.total("failed"))} note=${`and ${number(server.total("refused"))} refused, last hour`} />
    </section>
    <section class="charts" aria-label="The last hour">
      ${chart("Tokens per second", { output: server.rate("output_tokens"), "prompt computed": computed, "prompt cached": server.rate("cached_tokens") }, number)}
      ${chart("Requests", { "in flight": series.in_flight ?? [], waiting: series.waiting ?? [], "queued jobs": series.queued_jobs ?? [] }, number)}
      ${chart("Time to first token", { p50: series.ttft_p50_ms ?? [], p95: series.ttft_p95_ms ?? [], p99: series.ttft_p99_ms ?? [] }, duration)}
      ${chart("Inter-token latency", { p50: series.itl_p50_ms ?? [], p95: series.itl_p95_ms ?? [], p99: series.itl_p99_ms ?? [] }, duration)}
      ${chart("KV cache of the fullest worker", { used: series.kv_used ?? [] }, percent, 1)}
      ${chart("Time in which devices compute", { "mean of workers": series.utilisation ?? [] }, percent, 1)}
      ${chart("Errors per step of 10 s", { failed: series.failed ?? [], refused: series.refused ?? [] }, number)}
    </section>
    ${pools(now.workers).map(([name, workers]) => html`<${Workers} key=${name} title=${name} workers=${workers} />`)}
    <${Tiers} workers=${now.workers} />
    <${Table} title="Models" caption="since the core started" head=${["Model", "Requests", "Failed", "Prompt tokens", "Cached", "Output tokens"]}
      rows=${now.models.map((model) => [visible(model.id), number(sum(model.requests)), number(model.requests.failed ?? 0), number(model.input_tokens), html`<${Meter} share=${model.hit_ratio} />`, number(model.output_tokens)])} />`;
}

const sum = (counts) => Object.values(counts).reduce((total, n) => total + n, 0);

/** Workers by role: with prefill/decode disaggregation there are two pools. */
function pools(workers) {
  const names = { prefill: "Prefill workers", decode: "Decode workers", both: "Workers" };
  return Object.entries(names).map(([role, name]) => [name, workers.filter((worker) => worker.role === role)]).filter(([, found]) => found.length);
}

function Workers({ title, workers }) {
  const [problem, setProblem] = useState(null);
  const turn = async (worker, action) => {
    try {
      await postJson(`/api/workers/${action}`, { name: worker.name });
      setProblem(null);
      announce(`${worker.name}: ${action}`);
      await server.refresh();
    } catch (error) {
      setProblem(error.message);
    }
  };
  const row = (worker) => [
    html`<${Cells} first=${visible(worker.name)} second=${visible(worker.model)} />`,
    html`<${Cells} first=${html`<span class=${`badge ${worker.ok ? "good" : "bad"}`}>${visible(worker.state)}</span>`} second=${visible(worker.problem || worker.device)} />`,
    html`<${Meter} share=${worker.max_running ? worker.running / worker.max_running : null} text=${`${worker.running} of ${worker.max_running}`} />`,
    number(worker.waiting + worker.held),
    html`<${Meter} share=${worker.kv_used} />`,
    html`<${Cells} first=${`${number(worker.output_tokens_per_s)} out`} second=${`${number(worker.input_tokens_per_s)} in`} />`,
    percent(worker.hit_ratio),
    worker.transfers_in || worker.transfers_out ? `${worker.transfers_in} in, ${worker.transfers_out} out` : "–",
    worker.state === "draining"
      ? html`<${Button} text="Undrain" class="small" label=${`Use ${worker.name} again`} onClick=${() => turn(worker, "undrain")} />`
      : html`<${Button} text="Drain" class="small" label=${`Send ${worker.name} nothing new`} onClick=${() => turn(worker, "drain")} />`,
  ];
  return html`
    ${problem && html`<p class="problem" role="alert">${visible(problem)}</p>`}
    <${Table} title=${title} head=${["Worker", "State", "Running", "Waiting", "KV cache", "Tokens/s", "Cached", "KV transfers", ""]} rows=${workers.map(row)} />`;
}

/** Host memory, disk and the pool below the device's KV cache; nothing where no worker has any. */
function Tiers({ workers }) {
  const rows = workers.flatMap((worker) => (worker.tiers ?? []).map((tier) => [
    visible(worker.name),
    html`<${Cells} first=${visible(tier.name)} second=${html`<span class=${`badge ${tier.state === "ok" ? "good" : "bad"}`}>${visible(tier.state)}</span>`} />`,
    html`<${Meter} share=${tier.capacity_bytes ? tier.used_bytes / tier.capacity_bytes : null} text=${`${bytes(tier.used_bytes)} of ${bytes(tier.capacity_bytes)}`} />`,
    number(tier.blocks),
    percent(tier.hit_ratio),
    tier.read_rate ? `${bytes(tier.read_rate)}/s` : "–",
    tier.oldest_s ? age(tier.oldest_s) : "–",
  ]));
  return rows.length ? html`<${Table} title="KV cache tiers" caption="a pool's size is that of the whole pool" head=${["Worker", "Tier", "Used", "Blocks", "Hit ratio", "Reads", "Oldest"]} rows=${rows} />` : null;
}

function Tile({ name, value, note }) {
  return html`<div class="tile"><span class="soft">${name}</span><b>${value}</b><span class="soft">${note}</span></div>`;
}

// --- requests -------------------------------------------------------------------------------------------------------

function Requests() {
  const { now } = server;
  const total = sum(now.phases);
  const ended = now.recent;
  const speeds = ended.filter((r) => r.ttft_s != null && r.output_tokens > 1 && r.duration_s > r.ttft_s);
  return html`
    <section class="charts" aria-label="The last requests">
      <${Histogram} title="Time to first token, last 200 requests" values=${ended.filter((r) => r.ttft_s != null).map((r) => 1000 * r.ttft_s)} />
      <${Histogram} title="Time per output token, last 200 requests" values=${speeds.map((r) => (1000 * (r.duration_s - r.ttft_s)) / (r.output_tokens - 1))} />
    </section>
    <${Table} title="In flight" caption=${total > now.requests.length ? `the oldest ${now.requests.length} of ${number(total)}` : `${total}`}
      head=${["Request", "Phase", "Age", "Prompt", "Output", "Worker"]}
      rows=${now.requests.map((r) => [
        html`<${Cells} first=${visible(r.id)} second=${visible(`${r.account} · ${r.model}`)} />`,
        html`<${Cells} first=${html`<span class=${`badge p-${r.phase}`}>${r.phase}</span>`} second=${[r.is_job && "job", r.priority !== "default" && r.priority].filter(Boolean).join(", ")} />`,
        html`<${Cells} first=${duration(1000 * r.age_s)} second=${`${duration(1000 * r.phase_s)} in ${r.phase}`} />`,
        html`<${Cells} first=${number(r.input_tokens)} second=${r.cached_tokens ? `${number(r.cached_tokens)} cached` : ""} />`,
        number(r.output_tokens),
        visible([r.prefill_worker, r.worker].filter(Boolean).join(" → ")),
      ])} />
    <${Table} title="Ended" caption="newest first" head=${["Request", "Status", "Ended", "TTFT", "Duration", "Prompt", "Output"]}
      rows=${ended.slice(0, 100).map((r) => [
        html`<${Cells} first=${visible(r.id)} second=${visible(`${r.account} · ${r.model}`)} />`,
        html`<span class=${`badge ${r.status === "finished" ? "good" : r.status === "failed" ? "bad" : ""}`}>${visible(r.status)}</span>`,
        `${age(Math.max(0, now.time_s - r.ended_s))} ago`,
        r.ttft_s == null ? "–" : duration(1000 * r.ttft_s),
        duration(1000 * r.duration_s),
        html`<${Cells} first=${number(r.input_tokens)} second=${r.cached_tokens ? `${number(r.cached_tokens)} cached` : ""} />`,
        number(r.output_tokens),
      ])} />`;
}

const root = document.getElementById("root");
root.replaceChildren();
render(html`<${App} />`, root);
session.subscribe(() => session.needed && server.now && server.forget());
server.refresh();
