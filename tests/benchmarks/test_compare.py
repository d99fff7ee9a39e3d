"""`benchmarks.compare`: ratios from saved runs, and what counts as slipped."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import baseline, compare
from benchmarks.baseline import Ratio, Samples

GPU = {
    "emberline": {"device": "NVIDIA H200, 570.86", "decode": {"b1": {"tok_s": 300.0}}, "prefill": {"8192": 0.2}},
    "vllm": {"decode": {"b1": {"tok_s": 200.0}}, "prefill": {"8192": 0.3}},
}


def ratio(value: float, spread: float = 0.0, better: str = "less", reference: str = "peer") -> Ratio:
    return Ratio(value, spread, better, reference)


def cpu(ms: float) -> dict[str, Any]:
    """A server's row, at eight connections."""
    return {"8": {"cpu_ms": ms}}


def test_a_ratio_is_the_best_round_of_each_side() -> None:
    assert Samples("less", "peer", [3.0, 2.2, 2.0], [4.0, 9.0, 4.2]).ratio() == ratio(0.5, 0.1)
    assert Samples("more", "peer", [10.0, 9.0], [20.0, 19.6]).ratio() == ratio(0.5, 0.1, "more")
    assert Samples("less", "peer", [3.0], [2.0]).ratio() == ratio(1.5)


@pytest.mark.parametrize(
    ("old", "new", "state"),
    [
        (ratio(1.0), ratio(1.04), "same"),
        (ratio(1.0), ratio(1.06), "slipped"),
        (ratio(1.0, 0.04), ratio(1.06, 0.03), "same"),
        (ratio(1.0, 0.04), ratio(1.08, 0.03), "slipped"),
        (ratio(1.0), ratio(0.9), "better"),
        (ratio(1.0, better="more"), ratio(0.9, better="more"), "slipped"),
        (ratio(1.0, better="more"), ratio(1.1, better="more"), "better"),
        (ratio(1.0), ratio(3.0, reference="another peer"), "new"),
    ],
)
def test_what_counts_as_slipped(old: Ratio, new: Ratio, state: str) -> None:
    (verdict,) = baseline.compare({"a": old}, {"a": new})
    assert verdict.state == state


def test_figures_that_only_one_run_has() -> None:
    verdicts = baseline.compare({"a": ratio(1.0)}, {"b": ratio(1.0)})
    assert [(verdict.name, verdict.state) for verdict in verdicts] == [("a", "not measured"), ("b", "new")]


def test_writing_keeps_other_suites(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "machine.json"
    baseline.write(path, {"cpu: a": ratio(1.0), "cpu: gone": ratio(1.0)}, ["cpu"], {"cpu": "x"})
    baseline.write(path, {"router: b": ratio(2.0, 0.1)}, ["router"], {"cpu": "x"})
    baseline.write(path, {"cpu: a": ratio(3.0)}, ["cpu"], {"cpu": "x"})
    assert baseline.read(path) == {"cpu: a": ratio(3.0), "router: b": ratio(2.0, 0.1)}
    assert json.loads(path.read_text())["cpu"] == "x"


def test_files_are_named_by_the_kind_of_machine() -> None:
    assert baseline.slug("x86_64", "Intel(R) Xeon(R) @ 2.50GHz") == "x86_64-intel-r-xeon-r-2-50ghz"
    assert baseline.gpu_baseline(GPU["emberline"]["device"]).name == "nvidia-h200.json"
    assert baseline.cpu_baseline().suffix == ".json"


@pytest.mark.parametrize(
    ("suite", "report", "expected"),
    [
        (
            "cpu",
            {"runs": {"emberline": {"decode_tok_s": [50.0, 40.0]}, "llama.cpp": {"decode_tok_s": [25.0, 25.0]}}},
            {"cpu: decode tok/s / llama.cpp": 2.0},
        ),
        (
            "cpu",
            {"runs": {"emberline": {"decode_tok_s": [50.0], "start_s": [4.0]}}},
            {"cpu: decode tok/s": 100.0, "cpu: start s": 2.0},
        ),
        (
            "router",
            {
                "relaying": {"direct": cpu(0.1), "emberline": cpu(1.0), "sglang-router": {"error": "x"}},
                "own_engine": {"fresh_4_kb": {"cpu_ms": 3.0}},
            },
            {"router: relayed request": 0.5, "router: own engine, fresh_4_kb": 1.5},
        ),
        (
            "gateway",
            {"servers": {"emberline relay": cpu(1.0), "emberline gateway": cpu(1.5)}},
            {"gateway: request / relay": 1.5, "gateway: request": 0.75},
        ),
        (
            "http_frontend",
            {"request_ms": [2.0, 3.0], "token_us": [50.0]},
            {"http_frontend: request": 1.0, "http_frontend: token": 0.025},
        ),
        (
            "accounts",
            {"runs": [{"http_workers": 2, "cpu_ms": {"none": 1.0, "keys": 1.2}}]},
            {"accounts: request, 2 HTTP workers / without keys": 1.2},
        ),
        (
            "host_step",
            {"runs": {"this": [{"off 1": {"thread_us": 30.0}}, {"off 1": {"thread_us": 20.0}}]}},
            {"host_step: off 1": 0.01},
        ),
        ("gpu", GPU, {"gpu: decode, batch 1 / vllm": 1.5, "gpu: prefill 8,192 / vllm": 0.6667}),
    ],
)
def test_ratios_of_every_suite(suite: str, report: dict[str, Any], expected: dict[str, float]) -> None:
    found: compare.Found = {}
    compare.SUITES[suite][1](found, report, 2.0)
    assert {name: samples.ratio().value for name, samples in found.items()} == pytest.approx(expected)


def test_a_slip_is_named_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved, recorded = tmp_path / "gpu.json", tmp_path / "baseline.json"
    flags = ["--from-json", f"gpu={saved}", "--baseline", str(recorded)]
    saved.write_text(json.dumps(GPU))
    assert compare.main([*flags]) == 0
    assert "nothing is recorded" in capsys.readouterr().out
    assert compare.main([*flags, "--write"]) == 0
    assert compare.main(flags) == 0
    assert "SLIPPED" not in capsys.readouterr().out
    slower = {**GPU, "emberline": {**GPU["emberline"], "decode": {"b1": {"tok_s": 240.0}}}}
    saved.write_text(json.dumps(slower))
    assert compare.main(flags) == 1
    out = capsys.readouterr().out
    assert "SLIPPED: gpu: decode, batch 1 / vllm is 1.25 times worse" in out
    assert out.count("SLIPPED") == 1
    as_before = tmp_path / "again.json"
    as_before.write_text(json.dumps(GPU))
    assert compare.main([*flags, "--from-json", f"gpu={as_before}"]) == 0, "one good round clears a suspect"


@pytest.mark.parametrize(
    "flags", [["unknown"], ["gpu"], ["--from-json", "gpu=nowhere.json"], ["--from-json", "other=pyproject.toml"]]
)
def test_bad_arguments_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        compare.main(flags)
    assert exit_.value.code == 2
    assert "gpu" in capsys.readouterr().err


def test_the_calibration_loop_takes_its_time() -> None:
    assert 0.1 < compare.calibrate() < 1000


@pytest.mark.slow
def test_a_suite_is_run_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded = tmp_path / "baseline.json"
    assert compare.main(["host_step", "--rounds", "1", "--baseline", str(recorded), "--write"]) == 0
    entries = json.loads(recorded.read_text())["ratios"]
    impossible = {name: {**entry, "value": entry["value"] / 100, "spread": 0.0} for name, entry in entries.items()}
    recorded.write_text(json.dumps({"ratios": impossible}))
    assert compare.main(["host_step", "--rounds", "1", "--baseline", str(recorded)]) == 1
    assert "SLIPPED: host_step: off 16" in capsys.readouterr().out
