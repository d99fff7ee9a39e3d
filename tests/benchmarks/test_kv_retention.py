"""The benchmark of tiers in simulation: every kind of cell runs, and what it changes in a trace is as said."""

import json
from pathlib import Path

import pytest

from benchmarks.kv_retention import N_PAUSES, PAUSE_S, SEARCH, main, part_of, priors, with_pauses
from emberline.kv.retention import N_BINS, PRIOR_TURNS
from emberline.simulator.trace_sources import synthetic_agents

CONTEXT = 262_144


def test_quick(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ["device", "tiers, 12 GB/s", "pool", SEARCH, "few: tiers, oracle"]
    assert main(["--quick", "--jobs", "1", "--cells", "; ".join(chosen), "--json", str(tmp_path / "out.json")]) == 0
    found = json.loads((tmp_path / "out.json").read_text())["cells"]
    assert list(found) == chosen
    assert all(len(seeds) == 1 for seeds in found.values())
    assert found["pool"][0]["hit_pool"] > 0
    assert found[SEARCH][0]["sessions"] >= 1
    assert "Sessions at" in capsys.readouterr().out


def test_halves_are_disjoint_and_priors_are_of_one() -> None:
    parts = [part_of(synthetic_agents(1, CONTEXT, 10), part) for part in ("tuning", "held-out", "all")]
    tuning, held_out, every = [{session.turns[0].n_prompt for session in trace.sessions} for trace in parts]
    assert tuning | held_out == every
    assert not tuning & held_out
    found = priors(parts[0])
    assert len(found["IDLE"]) == N_BINS
    assert 0.8 * PRIOR_TURNS < sum(found["IDLE"]) <= PRIOR_TURNS


def test_pauses_delay_what_follows_them() -> None:
    plain, paused = synthetic_agents(1, CONTEXT, 6), with_pauses(synthetic_agents(1, CONTEXT, 6))
    for before, after in zip(plain.sessions, paused.sessions):
        added_s = [b.wait_s - a.wait_s for a, b in zip(before.turns, after.turns)]
        pauses_s = [each for each in added_s if each > 1]
        assert len(pauses_s) <= N_PAUSES
        assert all(PAUSE_S[0] - 1 <= each <= PAUSE_S[1] + 1 for each in pauses_s)
        assert after.times_s[-1] - before.times_s[-1] == pytest.approx(sum(pauses_s), abs=1.0)
