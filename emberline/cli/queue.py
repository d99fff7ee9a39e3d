"""`emberline queue`: queued jobs per model and account, and the dead-letter queue.

emberline queue
emberline queue replay batch_… [LINE]
"""

import argparse
from typing import Any

from emberline.cli import common
from emberline.cli import http_client as client
from emberline.cli.terminal import printable
from emberline.server.address import ServerAddress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action", nargs="?", choices=("show", "replay"), default="show", help="show (default) or replay"
    )
    parser.add_argument("batch", nargs="?", help="replay: the batch whose dead jobs to run again")
    parser.add_argument("line", nargs="?", type=int, help="replay: only the job of this input line")
    common.add_client_options(parser)


def run(args: argparse.Namespace) -> int:
    address = ServerAddress.for_client(common.config_of(args))
    if args.action == "replay":
        return _replay(address, args)
    report = client.get(address, "/api/queue")
    if args.json:
        common.print_json(report)
    else:
        _print_queue(report)
    return 0


def _print_queue(report: dict[str, Any]) -> None:
    if not report["waiting"]:
        print("The queue is empty.")
    else:
        headings = ("MODEL", "ACCOUNT", "QUEUED", "RUNNING", "QUARANTINED", "OLDEST")
        common.print_table([headings, *(_queue_row(item) for item in report["waiting"])])
    if report["n_dead"]:
        print(f"\n{report['n_dead']:,} in the dead-letter queue: every attempt ended with the death of its worker")
        common.print_table([("BATCH", "LINE", "CUSTOM ID", "MODEL"), *(_dead_row(item) for item in report["dead"])])
        print("`emberline queue replay BATCH [LINE]` runs them again.")


def _queue_row(item: dict[str, Any]) -> tuple[str, ...]:
    age = "–" if item["age_s"] is None else common.format_duration(item["age_s"])
    counts = (f"{item[name]:,}" for name in ("queued", "running", "quarantined"))
    return _short(item["model"]), item["account"], *counts, age


def _dead_row(item: dict[str, Any]) -> tuple[str, ...]:
    return item["batch"], str(item["line"]), printable(item["custom_id"])[:20], _short(item["model"])


def _short(model: str) -> str:
    return model.rpartition("/")[2] or model


def _replay(address: ServerAddress, args: argparse.Namespace) -> int:
    if not args.batch:
        print("emberline queue replay: which batch? `emberline queue` lists the dead-letter queue")
        return 2
    answer = client.post(address, "/api/queue/replay", {"batch": args.batch, "line": args.line})
    if args.json:
        common.print_json(answer)
    else:
        print(f"{answer['replayed']:,} jobs returned to the queue")
    return 0
