"""What stored responses cost: `python -m benchmarks.responses`. Prints JSON."""

import asyncio
import json
import platform
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from statistics import median

from emberline.api.openai.responses.output import ResponseBuilder
from emberline.api.openai.responses.request import ResponsesRequest
from emberline.protocol.complete_response import StoredResponse
from emberline.protocol.events import TextDelta
from emberline.protocol.request import SamplingDefaults
from emberline.service.responses import DatabaseResponses
from emberline.store import SqliteStore

TURNS = 256
TEXT_BYTES = 1000
LARGE_BYTES = 200_000
AT_ONCE = 2000
DELTAS = 100_000


def record(number: int, n_bytes: int, parent: str | None = None) -> StoredResponse:
    part = {"type": "input_text", "text": "x" * n_bytes}
    item = {"type": "message", "id": f"m{number}", "role": "user", "status": "completed", "content": [part]}
    created_us = time.time_ns() // 1000
    body = json.dumps({"id": f"r{number}", "output": []})
    depth = number if parent else 0
    return StoredResponse(
        id=f"r{number}",
        account="a",
        parent=parent,
        depth=depth,
        created_us=created_us,
        input=json.dumps([item]),
        body=body,
    )


async def took_ms(times: int, work: Callable[[int], Awaitable[object]]) -> float:
    """The median of several runs."""
    all_ms = []
    for number in range(times):
        began_s = time.perf_counter()
        await work(number)
        all_ms.append(1e3 * (time.perf_counter() - began_s))
    return round(median(all_ms), 3)


async def recall(kept: DatabaseResponses, response_id: str, _: int) -> None:
    assert await kept.get("a", response_id, whole=True)


async def store_figures(folder: Path) -> dict[str, float]:
    store = await SqliteStore.open(folder / "responses.db")
    kept = DatabaseResponses(store)
    figures = {
        "keep_ms": await took_ms(
            TURNS, lambda turn: kept.put(record(turn, TEXT_BYTES, f"r{turn - 1}" if turn else None))
        ),
        "keep_large_ms": await took_ms(20, lambda turn: kept.put(record(1000 + turn, LARGE_BYTES))),
    }
    for turns in (1, 16, TURNS):
        last = f"r{turns - 1}"
        figures[f"recall_{turns}_ms"] = await took_ms(50, partial(recall, kept, last))
    began_s = time.perf_counter()
    await asyncio.gather(*(kept.put(record(5000 + number, TEXT_BYTES)) for number in range(AT_ONCE)))
    figures["keeps_a_second"] = round(AT_ONCE / (time.perf_counter() - began_s))
    await store.close()
    return figures


def event_us() -> float:
    """Of making one delta's event, before it is encoded."""
    body, delta = ResponsesRequest(model="m"), TextDelta(0, " token")
    builder = ResponseBuilder(body, body.parse_tools(), "resp_" + "0" * 32, 0, SamplingDefaults())
    builder.add(delta)
    began_s = time.perf_counter()
    for _ in range(DELTAS):
        builder.add(delta)
    return round(1e6 * (time.perf_counter() - began_s) / DELTAS, 2)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(store_figures(Path(folder)))
    print(json.dumps({"machine": platform.machine(), "event_us": event_us(), **figures}))


if __name__ == "__main__":
    main()
