"""`benchmarks.host_step`: the host's CPU of an engine step, and its comparison with another checkout."""

import json
import math
from pathlib import Path

import pytest

from benchmarks import host_step

MAX_ROUNDS = 30


@pytest.mark.parametrize("setting", host_step.SETTINGS)
def test_a_step_of_every_setting(setting: str) -> None:
    """More rows take more time. The least of several rounds counts, as in the benchmark: other work only adds."""
    one = many = math.inf
    for _ in range(MAX_ROUNDS):
        figures, of_many = (host_step.measure(n, 20, setting) for n in (1, 64))
        one, many = min(one, figures["thread_us"]), min(many, of_many["thread_us"])
        assert of_many["process_us"] > 0
        if one < many:
            break
    assert 0 < one < many


def test_the_least_time_and_its_noise() -> None:
    runs = [{"off 1": {"thread_us": value}} for value in (12.0, 10.0, 11.0, 90.0)]
    assert host_step.least(runs, "off 1", "thread_us") == (10.0, pytest.approx(0.1))
    assert host_step.least(runs[:1], "off 1", "thread_us") == (12.0, 0.0)


def test_another_checkout_is_measured_in_turn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The other checkout's own module measures it: here one that is ten times slower."""
    (tmp_path / "emberline").mkdir()
    (tmp_path / "benchmarks").mkdir()
    fake = "import json\nprint(json.dumps({'off 1': {'thread_us': 1e6, 'process_us': 2e6}}))\n"
    (tmp_path / "benchmarks" / "host_step.py").write_text(fake)
    measured = host_step.measured_in(tmp_path, [1], 20)
    assert measured == {"off 1": {"thread_us": 1e6, "process_us": 2e6}}
    ours = [{"off 1": {"thread_us": 5e5, "process_us": 1e6}}]
    assert "0.500 ±0%" in host_step.table({"this": ours, "other": [measured]})


def test_a_folder_without_the_package_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        host_step.main(["--against", str(tmp_path)])
    assert "has no folder emberline" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = tmp_path / "found.json"
    assert (
        host_step.main(["--quick", "--rows", "1,4", "--json", str(written), "--against", str(host_step.REPOSITORY)])
        == 0
    )
    found = json.loads(written.read_text())
    assert {name: len(rounds) for name, rounds in found["runs"].items()} == {"this": 4, "other": 4}
    assert found["runs"]["this"][0].keys() == {"off 1", "idle 1", "off 4", "idle 4"}
    assert "idle 4" in capsys.readouterr().out
