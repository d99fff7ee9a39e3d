"""A worker's flags of several ranks. Without torch: a start that fails is quick."""

import argparse
import os
import sys
from collections.abc import Sequence

from emberline.engine.addresses import positive
from emberline.protocol.errors import BadInput
from emberline.protocol.parallel_layout import Layout

STEP_TIMEOUT_S = 60.0  # of a step in which no rank advances
_NOT_INHERITED = {"--nice": 1, "--rank": 1, "--rendezvous": 1}  # flags of rank 0, with their number of values


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--tp", type=positive, default=1, metavar="N", help="tensor parallelism: ranks that divide each layer")
    add("--pp", type=positive, default=1, metavar="N", help="pipeline parallelism: stages that divide layers")
    add("--ep", action="store_true", help="expert parallelism: ranks of --tp hold whole experts")
    add("--dcp", type=positive, default=1, metavar="N", help="decode context parallelism, of models with MLA")
    add("--stages", type=_bounds, metavar="N,N", help="where stages begin and end, by layer: 0,14,30; default: evenly")
    add("--rank", type=int, default=0, metavar="R", help="join a group as rank R instead of leading one")
    add("--rendezvous", metavar="ADDRESS", help="where ranks meet, if others start them: unix:PATH or tcp:HOST:PORT")
    add(
        "--step-timeout",
        type=_seconds,
        default=STEP_TIMEOUT_S,
        metavar="SECONDS",
        help="a rank group whose step takes longer hangs, and ends",
    )


def layout_of(args: argparse.Namespace) -> Layout:
    layout = Layout(tp=args.tp, pp=args.pp, ep=args.ep, dcp=args.dcp)
    layout.check()
    if args.rank >= layout.n_ranks or args.rank < 0:
        raise BadInput(
            f"--rank {args.rank}: the layout {layout.name} has ranks 0 to {layout.n_ranks - 1}", param="rank"
        )
    if args.rank and not args.rendezvous:
        raise BadInput("--rank needs --rendezvous, the address where rank 0 waits", param="rendezvous")
    return layout


def threads_of_rank(threads: int | None, layout: Layout) -> int:
    """CPU threads of each rank, of those that the whole worker has."""
    if threads is None:
        threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, threads // layout.n_ranks)


def follower_command(words: Sequence[str]) -> list[str]:
    """Rank 0's command line without what is its own."""
    kept: list[str] = []
    skip = 0
    for word in words:
        if skip:
            skip -= 1
        elif word in _NOT_INHERITED:
            skip = _NOT_INHERITED[word]
        elif word.partition("=")[0] not in _NOT_INHERITED:
            kept.append(word)
    return kept


def command_of(argv: Sequence[str] | None) -> list[str]:
    return list(sys.argv[1:] if argv is None else argv)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError("must be above 0")
    return value


def _bounds(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))
