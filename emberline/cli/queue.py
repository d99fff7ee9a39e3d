"""What waits in the queue, for whom and for how long; dead letters, and running them again.

emberline queue
emberline queue replay batch_… [LINE]
"""

import argparse
from typing import Any

from emberline.cli import common
from emberline.cli import http_client as client
from emberline.cli.batch import seconds
from emberline.cli.http_client import Address
from emberline.cli.terminal import printable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action", nargs="?", choices=("show", "replay"), default="show", help="show (default) or replay"
    )
    parser.add_argument("batch", nargs="?", help="replay: the batch with dead letters")
    parser.add_argument("line", nargs="?", type=int, help="replay: this one alone")
    common.add_address(parser)
    common.add_data(parser)
    common.add_json(parser)


def run(args: argparse.Namespace) -> int:
    address = Address.of(common.config_of(args))
    if args.action == "replay":
        return _replay(address, args)
    found = client.get(address, "/api/queue")
    if args.json:
        common.print_json(found)
        return 0
    _show(found)
    return 0


def _show(found: dict[str, Any]) -> None:
    if not found["waiting"]:
        print("Nothing waits.")
    else:
        heads = ("MODEL", "ACCOUNT", "WAITS", "RUNS", "ALONE", "AGE OF NEXT")
        common.print_table([heads, *(_row(item) for item in found["waiting"])])
    if not found["n_dead"]:
        return
    print(f"\n{found['n_dead']:,} dead: workers died under each of them, time after time")
    letters = [_letter(item) for item in found["dead"]]
    common.print_table([("BATCH", "LINE", "CUSTOM ID", "MODEL"), *letters])
    print("`emberline queue replay BATCH [LINE]` runs them again.")


def _row(item: dict[str, Any]) -> tuple[str, ...]:
    age = "–" if item["age_s"] is None else seconds(item["age_s"])
    figures = (f"{item[name]:,}" for name in ("queued", "running", "quarantined"))
    return _short(item["model"]), item["account"], *figures, age


def _letter(item: dict[str, Any]) -> tuple[str, ...]:
    return item["batch"], str(item["line"]), printable(item["custom_id"])[:20], _short(item["model"])


def _short(model: str) -> str:
    return model.rpartition("/")[2] or model


def _replay(address: Address, args: argparse.Namespace) -> int:
    if not args.batch:
        print("emberline queue replay: which batch? `emberline queue` lists the dead letters")
        return 2
    answer = client.post(address, "/api/queue/replay", {"batch": args.batch, "line": args.line})
    if args.json:
        common.print_json(answer)
    else:
        print(f"{answer['replayed']:,} lines go back to the queue")
    return 0
