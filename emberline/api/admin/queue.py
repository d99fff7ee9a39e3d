"""The queue for whoever runs the server: who waits for what, the dead letters, and another chance for them."""

from typing import Any

import msgspec

from emberline.api.admin.endpoints import NO_STORE
from emberline.api.admin.events import whole_number
from emberline.api.http.body import read_json
from emberline.api.http.call import Call
from emberline.api.http.reply import Reply, json_reply
from emberline.jobs.queue.job import Job
from emberline.protocol.errors import NotFound

MOST = 1000
PAGE = {"dead": {"type": "integer", "minimum": 0, "maximum": MOST}}


class Replay(msgspec.Struct, kw_only=True):
    batch: str
    line: int | None = None  # without one: all that are dead


_decoder = msgspec.json.Decoder(Replay)


async def show(call: Call) -> Reply:
    """What waits and what runs, by model and account; the first of the dead letters."""
    queue = call.batches.queue
    now_us = queue.now_us()
    waiting = [
        {
            "model": depth.model,
            "account": depth.account,
            "queued": depth.n_queued,
            "running": depth.n_leased,
            "quarantined": depth.n_quarantined,
            "age_s": None if depth.oldest_us is None else round(max(0, now_us - depth.oldest_us) / 1e6, 1),
        }
        for depth in await queue.depths()
    ]
    n_dead = await queue.count_dead_letters()
    most = whole_number(call.query(), "dead", 20, 0, MOST)
    dead = [_letter(line) for line in await queue.dead_letters(limit=most)] if n_dead and most else []
    return json_reply({"waiting": waiting, "n_dead": n_dead, "dead": dead}, headers=NO_STORE)


async def replay(call: Call) -> Reply:
    asked = await read_json(call, _decoder)
    n_lines = await call.batches.queue.replay(asked.batch, asked.line)
    if not n_lines:
        which = f"line {asked.line}" if asked.line is not None else "no line"
        raise NotFound(f"{which} of {asked.batch[:100]} is among the dead letters", param="line")
    return json_reply({"replayed": n_lines})


def _letter(line: Job) -> dict[str, Any]:
    return {
        "batch": line.batch_id,
        "line": line.number,
        "custom_id": line.custom_id,
        "model": line.model,
        "kills": line.kills,
        "ended_at": None if line.ended_us is None else line.ended_us // 1_000_000,
        "error": None if line.error is None else line.error.message,
    }
