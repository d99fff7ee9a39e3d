"""Medians, spreads, ratios and remarks of a report."""

import pytest

from benchmarks import reference_figures, report

RUNS: report.Runs = {
    "emberline": {"decode_tok_s": [100.0, 120.0, 110.0], "replay_s": [10.0], "memory_mb": [300.0]},
    "llama.cpp Q4_1": {"decode_tok_s": [55.0, 50.0, 60.0], "replay_s": [30.0], "memory_mb": [600.0]},
}


def test_ratios_above_one_always_mean_ahead() -> None:
    ratios = report.ratios(report.medians(RUNS))
    assert ratios == {"llama.cpp Q4_1": {"decode_tok_s": pytest.approx(2.0), "replay_s": pytest.approx(3.0)}}


def test_spread_is_half_the_range_over_the_median() -> None:
    assert report.spread([100.0, 120.0, 110.0]) == pytest.approx(10 / 110)


def test_the_table_shows_medians_spreads_and_ratios() -> None:
    text = report.tables(RUNS)
    assert "110.0 ±9%" in text
    assert "emberline / llama.cpp Q4_1" in text
    assert "2.00x" in text
    assert "3.00x" in text


def test_a_table_without_emberline_has_no_ratios() -> None:
    text = report.tables({"llama.cpp Q4_1": RUNS["llama.cpp Q4_1"]})
    assert "x" not in text.splitlines()[-1]


def test_json_holds_the_single_runs() -> None:
    document = report.as_json(RUNS, {"seed": "s"})
    assert document["seed"] == "s"
    assert document["runs"]["emberline"]["decode_tok_s"] == [100.0, 120.0, 110.0]
    assert document["medians"]["emberline"]["decode_tok_s"] == 110.0


def test_reference_figures_are_per_architecture() -> None:
    assert reference_figures.remarks({"llama.cpp Q4_0": {"decode_tok_s": 98.0}}, "x86_64")[0].startswith(
        "No reference figures for x86_64"
    )
    near = reference_figures.remarks({"llama.cpp Q4_0": {"decode_tok_s": 90.0}}, "aarch64")
    assert "near its reference 98" in near[1]
    far = reference_figures.remarks({"llama.cpp Q4_0": {"decode_tok_s": 30.0}}, "aarch64")
    assert "FAR from its reference 98" in far[1]
