// Accounts: what they used, and their API keys to create, rotate and revoke.

import { getJson, postJson } from "./api.js";
import { age, number } from "./format.js";
import { server } from "./server_status.js";
import { Cells, Table } from "./table.js";
import { announce, Button, CopyButton, html, useEffect, useRef, useState, visible } from "./ui.js";
import { Usage } from "./usage.js";

export function Accounts() {
  return html`<${Usage} /><${Keys} />`;
}

function Keys() {
  const [keys, setKeys] = useState([]);
  const [issued, setIssued] = useState(null); // shown until the page is left: the server does not know it any more
  const [problem, setProblem] = useState(null);
  const act = async (doIt, told) => {
    try {
      const answer = await doIt();
      setProblem(null);
      if (told) announce(told);
      return answer;
    } catch (error) {
      setProblem(error.message);
    }
  };
  const latest = useRef(0); // number of the last load
  const load = () =>
    act(async () => {
      const asked = ++latest.current;
      const { data } = await getJson("/api/keys?limit=200");
      if (asked === latest.current) setKeys(data);
    });
  useEffect(() => void load(), []);

  const create = async (event) => {
    event.preventDefault();
    const form = new FormData(event.target);
    const body = { account: form.get("account").trim(), name: form.get("name").trim() };
    if (form.get("rpm")) body.requests_per_minute = Number(form.get("rpm"));
    if (form.get("budget")) Object.assign(body, { budget: form.get("budget").trim(), budget_period: form.get("period") });
    const key = await act(() => postJson("/api/keys", body), "The key is created.");
    if (!key) return;
    setIssued(key);
    event.target.reset();
    await load();
  };
  const rotate = async (key) => {
    const fresh = await act(() => postJson(`/api/keys/${encodeURIComponent(key.id)}/rotate`), "The key is rotated.");
    if (fresh) setIssued(fresh);
    await load();
  };
  const revoke = async (key) => {
    if (!confirm(`Revoke the key ${key.name || key.id} of account ${key.account}? Its clients are refused at once.`)) return;
    await act(() => postJson(`/api/keys/${encodeURIComponent(key.id)}/revoke`), "The key is revoked.");
    await load();
  };
  const row = (key) => [
    html`<${Cells} first=${visible(key.name || key.id)} second=${visible(`${key.hint} · ${key.role}`)} />`,
    visible(key.account),
    limits(key).join(", ") || "none",
    [...key.models, ...key.apis].map(visible).join(", ") || "everything",
    state(key),
    !key.revoked_at && html`<span class="row">
      <${Button} text="Rotate" class="small" label=${`Replace the key ${key.name || key.id}`} onClick=${() => rotate(key)} />
      <${Button} text="Revoke" class="small quiet" label=${`Revoke the key ${key.name || key.id}`} onClick=${() => revoke(key)} /></span>`,
  ];
  return html`<${Table} title="API keys" empty="There are no keys yet." head=${["Key", "Account", "Limits", "Scope", "State", ""]} rows=${keys.map(row)}>
    ${problem && html`<p class="problem" role="alert">${visible(problem)}</p>`}
    ${issued && html`<p class="secret" role="status"><code>${visible(issued.key)}</code><${CopyButton} text=${issued.key} label="Copy the key" />
      <span class="soft">Shown this once.</span></p>`}
    <form class="form" onSubmit=${create} aria-label="New key">
      <label>Account <input name="account" required pattern="[A-Za-z0-9][A-Za-z0-9_\\-]{0,63}" autocomplete="off" /></label>
      <label>Name <input name="name" autocomplete="off" /></label>
      <label>Requests a minute <input name="rpm" type="number" min="1" /></label>
      <label>Budget <input name="budget" inputmode="decimal" pattern="[0-9]+([.][0-9]+)?" placeholder="25.00" autocomplete="off" /></label>
      <label>per <select name="period"><option value="month">month</option><option value="day">day</option><option value="total">ever</option></select></label>
      <button type="submit" class="button primary">Create key</button>
    </form>
  <//>`;
}

function limits(key) {
  return [
    key.requests_per_minute && `${number(key.requests_per_minute)} requests/min`,
    key.tokens_per_minute && `${number(key.tokens_per_minute)} tokens/min`,
    key.concurrency && `${number(key.concurrency)} at once`,
    key.budget && `${visible(key.budget)} ${key.budget_period === "total" ? "in total" : `per ${key.budget_period}`}`,
  ].filter(Boolean);
}

function state(key) {
  const now_s = server.now.time_s;
  if (key.revoked_at) return html`<span class="badge bad">revoked</span>`;
  if (key.expires_at && key.expires_at <= now_s) return html`<span class="badge bad">expired</span>`;
  return html`<${Cells} first=${html`<span class="badge good">valid</span>`} second=${key.expires_at ? `for ${age(key.expires_at - now_s)}` : ""} />`;
}
