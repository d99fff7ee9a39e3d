"""`emberline simulate`: its table, plots, JSON and error messages."""

import json
import xml.etree.ElementTree as ET
from functools import partial
from pathlib import Path

import pytest

from emberline.cli.main import main
from emberline.simulator import trace_sources
from emberline.simulator.experiment import POLICIES

SMALL = ["--trace", "agents", "--workers", "2", "--load", "0.004", "--warmup", "20", "--duration", "60"]


@pytest.fixture(autouse=True)
def _few_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    small = partial(trace_sources.synthetic_agents, n_sessions=20)
    monkeypatch.setitem(trace_sources.SYNTHETIC, "agents", small)


def test_a_table_and_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *SMALL, "--policy", "sticky,plain_round_robin", "--plots", str(tmp_path / "plots")]) == 0
    out = capsys.readouterr().out
    assert "TTFT p50" in out
    assert "plain_round_robin" in out
    for name in ("ttft", "time-per-token", "busy"):
        root = ET.parse(tmp_path / "plots" / f"{name}.svg").getroot()
        assert sum(element.tag.endswith("polyline") for element in root) == 2


def test_the_planner_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    planned = [*SMALL, "--workers", "1", "--swing", "2", "--planner", "--min-replicas", "2", "--max-replicas", "3"]
    assert main(["simulate", *planned]) == 0
    out = capsys.readouterr().out
    assert "GPU-hours" in out
    assert "min_replicas 2" in out
    assert main(["simulate", *planned, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["plans"][0]["decisions"][0]["action"] == "start"
    assert report["runs"][0]["gpu_hours"] > 0


def test_help_names_every_policy(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", "--help"])
    shown = capsys.readouterr().out
    assert all(policy in shown for policy in POLICIES)


def test_json_is_the_same_every_time(capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for _ in range(2):
        assert main(["simulate", *SMALL, "--json"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    (run,) = json.loads(texts[0])["runs"]
    assert run["policy"] == "sticky"
    assert run["requests"] > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--policy", "best"], "no policy 'best'"),
        (["--trace", "none.jsonl"], "no trace 'none.jsonl'"),
        (["--engine", "abacus"], "no coefficients 'abacus'"),
        (["--prefill-workers", "2"], "need each other"),
        (["--token-budget", "many"], "--token-budget is"),
        (["--workers", "0"], "1 to 256"),
        (["--duration", "0"], "above 0"),
        (["--kv-tokens", "1000"], "KV"),
    ],
)
def test_invalid_options_are_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *SMALL, *words]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_several_seeds_give_intervals(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *SMALL, "--seeds", "2", "--faults", "1", "--upstream", "--unstreamed", "0.5"]) == 0
    out = capsys.readouterr().out
    assert "2 seeds" in out
    assert "±" in out
    assert main(["simulate", *SMALL, "--seeds", "0"]) != 0


def test_progress_is_told_and_no_load_is_searched_for_unasked(capsys: pytest.CaptureFixture[str]) -> None:
    short = ["--trace", "agents", "--workers", "2", "--warmup", "20", "--duration", "40"]
    assert main(["simulate", *short]) == 0
    shown = capsys.readouterr()
    assert shown.err.count("simulating 60 s of sticky at load ") == 1
    assert "TTFT p50" in shown.out
    assert main(["simulate", *short, "--utilization", "0.3", "--json"]) == 0
    shown = capsys.readouterr()
    assert 2 <= shown.err.count("simulating 60 s of sticky at load ") <= 13
    assert json.loads(shown.out)["runs"]
