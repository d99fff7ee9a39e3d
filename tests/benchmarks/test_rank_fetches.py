"""The benchmark of fetches of a rank group: its trace is the same for any number of ranks, and its figures add up."""

import json

from benchmarks.rank_fetches import main, run, trace
from emberline.protocol.token_ids import unpack


def test_the_trace_is_seeded_and_sessions_return_with_all_they_had():
    wanted = list(trace(60, seed=3))
    assert wanted == list(trace(60, seed=3))
    assert wanted != list(trace(60, seed=4))
    last: dict[str, list[int]] = {}
    n_returns = 0
    for each in wanted:
        ids = unpack(each.prompt_ids)
        before = last.get(each.session, [])
        n_returns += bool(before) and ids[: len(before)] == before
        last[each.session] = ids
    assert n_returns > 20


def test_what_is_recomputed_was_promised(capsys):
    alone = run(1, 60, seed=1)
    assert alone["evicted_blocks"] > 0, "memory is short"
    assert alone["promised_blocks"] > 0
    assert alone["recomputed_blocks"] == 0, "one rank knows what it has"
    assert main(["--ranks", "2", "--requests", "60", "--json"]) == 0
    (two,) = json.loads(capsys.readouterr().out)
    assert two["promised_blocks"] > 0
    assert two["recomputed_blocks"] == 0, "ranks evict the same blocks"
    assert two["recomputed_share"] == round(two["recomputed_blocks"] / two["promised_blocks"], 4)
