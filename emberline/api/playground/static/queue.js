// The durable queue: depth by model, open batches with their progress, dead letters with replay.

import { getJson, postJson } from "./api.js";
import { Meter } from "./charts.js";
import { age, number } from "./format.js";
import { server } from "./server_status.js";
import { Cells, Table } from "./table.js";
import { announce, Button, html, useEffect, useRef, useState, visible } from "./ui.js";

const MAX_DEAD = 200;

export function Queue() {
  const queue = server.now.queue;
  const [dead, setDead] = useState([]);
  const [problem, setProblem] = useState(null);
  const latest = useRef(0); // number of the last load
  const load = async () => {
    const asked = ++latest.current;
    try {
      const found = await getJson(`/api/queue?dead=${MAX_DEAD}`);
      if (asked === latest.current) setDead(found.dead);
    } catch (error) {
      if (asked === latest.current) setProblem(error.message);
    }
  };
  useEffect(() => void load(), [queue?.dead]);
  if (!queue) return html`<p class="soft">This server has no durable queue.</p>`;

  const replay = async (batch, line) => {
    try {
      const { replayed } = await postJson("/api/queue/replay", line === null ? { batch } : { batch, line });
      setProblem(null);
      announce(`${replayed} replayed`);
    } catch (error) {
      setProblem(error.message);
    }
    await Promise.all([load(), server.refresh()]);
  };
  const now_s = server.now.time_s;
  return html`
    <${Table} title="Jobs" empty="No job waits or runs." head=${["Model", "Queued", "Running", "Quarantined", "Oldest"]}
      rows=${queue.models.map((model) => [visible(model.model), number(model.queued), number(model.running), number(model.quarantined), model.age_s === null ? "–" : age(model.age_s)])} />
    <${Table} title="Open batches" caption="the earliest deadlines first" empty="No batch is open." head=${["Batch", "Status", "Progress", "Failed", "Submitted", "Deadline"]}
      rows=${queue.batches.map((batch) => [
        html`<${Cells} first=${visible(batch.id)} second=${visible([batch.account, batch.model].filter(Boolean).join(" · "))} />`,
        html`<span class="badge">${visible(batch.status)}</span>`,
        html`<${Meter} share=${batch.total ? (batch.completed + batch.failed) / batch.total : 0} text=${`${number(batch.completed + batch.failed)} of ${number(batch.total)}`} />`,
        number(batch.failed),
        `${age(Math.max(0, now_s - batch.created_s))} ago`,
        batch.deadline_s > now_s ? `in ${age(batch.deadline_s - now_s)}` : "passed",
      ])} />
    <${Table} title="Dead letters" caption=${queue.dead > dead.length ? `the first ${dead.length} of ${number(queue.dead)}` : `${queue.dead}`} empty="None: no job's worker has died too often."
      head=${["Job", "Model", "Workers lost", "Error", ""]}
      rows=${dead.map((job) => [
        html`<${Cells} first=${visible(job.batch)} second=${visible(`line ${job.line}${job.custom_id ? ` · ${job.custom_id}` : ""}`)} />`,
        visible(job.model),
        number(job.kills),
        visible(job.error),
        html`<span class="row"><${Button} text="Replay" class="small" label=${`Run line ${job.line} of ${job.batch} again`} onClick=${() => replay(job.batch, job.line)} />
          <${Button} text="Batch" class="small quiet" label=${`Run all dead letters of ${job.batch} again`} onClick=${() => replay(job.batch, null)} /></span>`,
      ])}>
      ${problem && html`<p class="problem" role="alert">${visible(problem)}</p>`}
    <//>`;
}
