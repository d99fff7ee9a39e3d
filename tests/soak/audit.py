"""Checks at the end of the queue's soak test."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from emberline.store import open_store

Row = tuple[Any, ...]


def check_results(asked: Mapping[str, str], results: Sequence[dict[str, Any]], echoes: bool) -> None:
    """Every job has exactly one result, which answers its own request."""
    seen = Counter(result["custom_id"] for result in results)
    lost = set(asked) - set(seen)
    assert not lost, f"{len(lost)} lines lost, e.g. {sorted(lost)[:3]}"
    twice = [name for name, n in seen.items() if n > 1]
    assert not twice, f"{len(twice)} lines visible twice, e.g. {twice[:3]}"
    assert set(seen) == set(asked), "results without a request"
    for result in results:
        assert result["error"] is None, result
        assert result["response"]["status_code"] == 200, result
        said = result["response"]["body"]["choices"][0]["message"]["content"]
        if echoes:
            assert asked[result["custom_id"]] in said, result


def check_store(where: str | Path, n_lines: int) -> list[Row]:
    """One usage row per job, of the attempt that counted. Returns the jobs' rows."""

    async def read() -> tuple[list[Row], list[Row]]:
        store = await open_store(where)
        usage = await store.read("SELECT id, status, output_tokens FROM usage")
        lines = await store.read("SELECT batch_id, number, state, ended_us, attempts, kills FROM lines")
        await store.close()
        return list(usage), list(lines)

    usage, lines = asyncio.run(read())
    assert Counter(row[2] for row in lines) == {"succeeded": n_lines}
    ids = Counter(row[0] for row in usage)
    assert set(ids) == {f"{row[0]}-{row[1]}" for row in lines}
    assert set(ids.values()) == {1}
    assert {row[1] for row in usage} == {"finished"}
    return lines


def check_runs(journal: Path, lines: Sequence[Row], slack_us: int = 50_000) -> tuple[int, int]:
    """No job ran after its result was stored. Returns the number of runs and of repeated runs."""
    runs = _runs(journal)
    for batch_id, number, _, ended_us, _, _ in lines:
        began = runs[f"{batch_id}-{number}"]
        assert began, f"{batch_id}-{number} has a result and never ran"
        late = [at_us for at_us in began if at_us > ended_us + slack_us]
        assert not late, f"{batch_id}-{number} ran again after it was done"
    n_runs = sum(map(len, runs.values()))
    return n_runs, n_runs - len(lines)


def count_under_load(journal: Path, lines: Sequence[Row], moments_us: Sequence[int]) -> int:
    """At how many of the moments a job was running."""
    runs = _runs(journal)
    spans = [(min(runs[f"{row[0]}-{row[1]}"]), row[3]) for row in lines]
    return sum(any(began_us <= at_us <= ended_us for began_us, ended_us in spans) for at_us in moments_us)


def _runs(journal: Path) -> Mapping[str, list[int]]:
    """When engines received each request. The id of a job's attempt ends with the fencing token."""
    runs: defaultdict[str, list[int]] = defaultdict(list)
    for entry in journal.read_text().splitlines():
        at_us, _, request_id = entry.partition(" ")
        if request_id:
            runs[request_id.partition(".")[0]].append(int(at_us))
    return runs
