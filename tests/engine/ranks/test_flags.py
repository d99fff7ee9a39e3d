"""A worker's flags of several ranks: layouts whose numbers do not fit are refused by name."""

from pathlib import Path

import pytest

from emberline.engine.ranks.flags import follower_command, layout_of, threads_of_rank
from emberline.engine.worker.main import parse_arguments
from emberline.protocol.errors import BadInput
from emberline.protocol.parallel_layout import Layout

COMMAND = ["--model", "m", "--socket", "s"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--tp", "4", "--dcp", "3"], "--dcp 3 does not divide --tp 4: use 2 or 4"),
        (["--tp", "2", "--rank", "2", "--rendezvous", "unix:r"], "has ranks 0 to 1"),
        (["--tp", "2", "--rank", "1"], "--rank needs --rendezvous"),
        (["--ep"], "give --tp 2 or more"),
    ],
)
def test_numbers_that_do_not_fit(flags: list[str], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        layout_of(parse_arguments([*COMMAND, *flags]))


def test_a_follower_is_started_with_the_same_flags() -> None:
    words = [*COMMAND, "--tp", "2", "--nice", "5", "--rank=0", "--device", "cpu"]
    assert follower_command(words) == [*COMMAND, "--tp", "2", "--device", "cpu"]
    args = parse_arguments([*COMMAND, "--tp", "4", "--pp", "2", "--ep", "--dcp", "4", "--stages", "0,10,30"])
    assert layout_of(args) == Layout(tp=4, pp=2, ep=True, dcp=4)
    assert args.stages == (0, 10, 30)
    assert args.model == Path("m")
    assert args.command[:2] == ["--model", "m"]


def test_ranks_divide_the_threads() -> None:
    assert threads_of_rank(8, Layout(tp=2, pp=2)) == 2
    assert threads_of_rank(1, Layout(tp=2)) == 1
    assert threads_of_rank(None, Layout(tp=64)) == 1


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "soon"])
def test_a_step_timeout_is_a_time(seconds: str) -> None:
    with pytest.raises(SystemExit):
        parse_arguments([*COMMAND, "--tp", "2", "--step-timeout", seconds])
