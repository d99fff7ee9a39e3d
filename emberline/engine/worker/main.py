"""The engine process: `python -m emberline.engine.worker --model PATH --socket ADDRESS`."""

import argparse
import gc
import logging
import os
import signal
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from emberline import log
from emberline.engine.addresses import TOKEN_VARIABLE, listening, positive
from emberline.engine.ranks.flags import add_arguments as add_parallel_arguments
from emberline.engine.ranks.flags import command_of
from emberline.engine.runners.gpu.weight_storage import STORAGES
from emberline.engine.speculation.opening import add_arguments as add_draft_arguments
from emberline.engine.speculation.speculator import AUTO, SETTINGS
from emberline.engine.tiers.opening import add_arguments as add_tier_arguments
from emberline.engine.worker import process
from emberline.engine.worker.alive_file import open_alive_file
from emberline.engine.worker.announcer import open_joining
from emberline.engine.worker.build import build, build_follower
from emberline.engine.worker.device_sensor import gpu_uuid, open_sensor
from emberline.engine.worker.socket_server import Server
from emberline.engine.worker.start_timeline import StartTimeline

_log = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> int:
    """Serve until the worker is drained, or follow rank 0 until it ends. Returns the exit status."""
    args = parse_arguments(argv)
    log.setup("engine", extra={"rank": args.rank} if args.rank else None)  # followers write to rank 0's log
    parent = process.Parent()  # before the model is loaded, which takes seconds
    process.end_on_signals()
    process.share_interpreter()  # with threads that read weights while torch is imported
    timeline = StartTimeline()
    try:
        with ExitStack() as group:
            if args.rank:
                follow(args, timeline, by_rank_0=parent.is_rank_0)
                return 0
            joining, alive_file = open_joining(args), open_alive_file(args.alive_file)
            token = process.join_token(args.socket) if joining is None else joining.token
            args.token, args.pem = token, "" if joining is None else joining.credential.pem
            loop, info, facts, transfers, stored = build(args, timeline, group)
            gc.freeze()  # permanent objects: collections between steps need not scan them
            secure = None if joining is None else joining.secure(transfers)
            with listening(args.socket) as (listener, address):
                accept = None if transfers is None else transfers.accept
                sensor = open_sensor(info.device, gpu_uuid)
                group.callback(sensor.close)
                use = partial(getattr, sensor, "use")
                server = Server(listener, loop, info, token, secure, alive_file, None, stored, accept, use)
                server.on_role = priority = process.NicePrefill(args.prefill_nice)
                priority(info.role, is_first=True)
                timeline.end("socket")
                facts |= {"id": args.id, "address": address, "load_s": round(sum(timeline.seconds.values()), 3)}
                timeline.log()
                _log.info("serving %s", info.model, extra=facts)
                announcer = None if joining is None else joining.announcer(info, address)
                return process.serve(server, parent, facts, announcer)
    except Exception as error:
        return process.fail(error)


def follow(args: argparse.Namespace, timeline: StartTimeline, *, by_rank_0: bool) -> None:
    """Compute what rank 0 plans, on rank 1 and up, until rank 0 ends.

    A follower that rank 0 has started ignores signals, which rank 0 gets as well and handles. A follower that was
    started by hand ends on a signal, and the group ends with it.
    """
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN if by_rank_0 else signal.SIG_DFL)
    if not by_rank_0:
        process.end_on_signals()
    args.by_rank_0 = by_rank_0
    with ExitStack() as group:
        loop = build_follower(args, timeline, group)
        gc.freeze()
        loop.run()


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError("must be above 0 and at most 1")
    return value


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse the flags of a worker; None stands for those of this process."""
    parser = process.arguments("emberline.engine.worker", "Serve one model on one socket.")
    parser.add_argument("--model", type=Path, required=True, metavar="PATH", help="a GGUF file or a checkpoint folder")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.set_defaults(max_running=None, token_budget=None)  # depend on the device
    parser.add_argument(
        "--kv-bytes", type=positive, metavar="N", help="size of the KV cache; default: from the free memory"
    )
    parser.add_argument(
        "--context-len", type=positive, metavar="N", help="most tokens of a sequence; default: the model's"
    )
    parser.add_argument(
        "--memory-share",
        type=_share,
        default=1.0,
        metavar="F",
        help="of the GPU's memory, for weights, KV and all else",
    )
    parser.add_argument(
        "--random-weights", type=int, metavar="SEED", help="for a folder with config.json only: to measure, not to use"
    )
    add_draft_arguments(parser)
    parser.add_argument("--threads", type=positive, metavar="N", help="CPU threads; default: one per core")
    parser.add_argument(
        "--cpu-share", metavar="FILE:SLOT", help="use fewer threads while other workers compute; all have the same file"
    )
    add_tier_arguments(parser)
    add_parallel_arguments(parser)
    parser.add_argument(
        "--speculation", choices=SETTINGS, default=AUTO, help="drafters of speculative decoding: all, none, or one"
    )
    parser.add_argument("--deterministic", action="store_true", help="the same tokens whatever else is in the batch")
    parser.add_argument("--weights", choices=STORAGES, default="plain", help="BF16 weights in a GPU's memory")
    parser.add_argument("--verify-weights", action="store_true", help="check a compressed checkpoint's SHA-256 first")
    args = parser.parse_args(argv)
    args.command = command_of(argv)  # which rank 0 starts its followers with
    args.token, args.pem = os.environ.get(TOKEN_VARIABLE, ""), ""  # for senders of KV; another in a cluster
    return args
