"""Checks of every stream, and of the server once all have ended."""

import asyncio
import json
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

from emberline.store import open_store
from tests.soak.streams_client import StreamRecord

LOAD = ("running", "waiting", "awaiting", "pushing", "quarantined", "kv_used_blocks")
METRICS = (
    "emberline_requests_in_flight",
    "emberline_requests_held",
    "emberline_prefill_tokens_in_flight",
    "emberline_decode_tokens_in_flight",
    "emberline_endpoint_active",
    "emberline_endpoint_held",
)


def check_stream(said: list[str], n_tokens: int | None, record: StreamRecord) -> str:
    """What is wrong with a stream; empty if nothing is."""
    if record.problem:
        return record.problem
    for index, text in record.texts.items():
        if not said[index].startswith(text):
            return f"choice {index} is garbled: {_difference(said[index], text)}"
    if record.left:
        return ""
    if record.n_done != 1:
        return f"it ended {record.n_done} times"
    for index, text in enumerate(said):
        if record.texts.get(index, "") != text:
            return f"choice {index} lacks its end: {_difference(text, record.texts.get(index, ''))}"
        if len(record.finishes.get(index, ())) != 1:
            return f"choice {index} finished {record.finishes.get(index)}"
    if len(record.usage) != 1:
        return f"usage came {len(record.usage)} times"
    if record.usage[0]["completion_tokens"] != n_tokens:
        return f"usage says {record.usage[0]['completion_tokens']} tokens, there are {n_tokens}"
    return ""


def check_idle(url: str, within_s: float) -> list[str]:
    """What the server still holds although no request runs."""
    end_s = time.monotonic() + within_s
    while left := _left(url):
        if time.monotonic() > end_s:
            return left
        time.sleep(0.2)
    return []


def check_usage(database: Path, n_heard: int, n_begun: int) -> list[str]:
    """One usage row for every request that was read to its end, and at most one for the others."""

    async def read() -> list[tuple[Any, ...]]:
        store = await open_store(database)
        rows = await store.read("SELECT id, status FROM usage")
        await store.close()
        return list(rows)

    rows = asyncio.run(read())
    wrong = [f"{name} has {n} usage rows" for name, n in Counter(row[0] for row in rows).items() if n > 1]
    by_status = Counter(row[1] for row in rows)
    if by_status["failed"]:
        wrong.append(f"{by_status['failed']} requests failed by the ledger")
    if not n_heard <= by_status["finished"] <= n_begun or len(rows) > n_begun:
        wrong.append(f"{n_begun} requests, {n_heard} heard to the end, and the ledger says {dict(by_status)}")
    return wrong


def _left(url: str) -> list[str]:
    try:
        with urllib.request.urlopen(f"{url}/api/ps", timeout=10) as answer:
            engines = json.load(answer)["engines"]
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
    except OSError as error:
        return [f"the server does not answer: {error}"]
    found = []
    for engine in engines:
        if not engine["ok"]:
            found.append(f"{engine['name']}: {engine['problem']}")
        found += [f"{engine['name']}: {key} {engine['load'][key]}" for key in LOAD if engine["load"].get(key)]
    return found + [line for line in lines if line.startswith(METRICS) and float(line.split()[-1])]


def _difference(wanted: str, got: str) -> str:
    at = next((i for i, (a, b) in enumerate(zip(wanted, got)) if a != b), min(len(wanted), len(got)))
    return f"from {at} on {got[at : at + 60]!r} instead of {wanted[at : at + 60]!r}"
