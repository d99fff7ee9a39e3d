"""`emberline audit`: the audit log of what admins did, and its verification.

emberline audit
emberline audit --verify --head 17:5f0c…
"""

import argparse
import json
from datetime import UTC, datetime
from typing import Any

from emberline.cli import common
from emberline.cli.admin_client import AdminApi
from emberline.cli.terminal import printable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-n", type=int, default=50, metavar="N", help="the latest N entries (50, at most 1000)")
    parser.add_argument("--verify", action="store_true", help="check that no entry was changed or removed")
    parser.add_argument("--head", metavar="HEAD", help="with --verify: the head that an earlier verification printed")
    common.add_client_options(parser)


def run(args: argparse.Namespace) -> int:
    api = AdminApi(args)
    if args.verify:
        return _verify(api, args)
    entries = api.get("/api/audit", limit=args.n)["data"]
    if args.json:
        common.print_json(entries)
        return 0
    headings = ("NUMBER", "TIME (UTC)", "ACTOR", "FROM", "ACT", "TARGET", "DETAILS")
    common.print_table([headings, *(_row(entry) for entry in entries)])
    return 0


def _verify(api: AdminApi, args: argparse.Namespace) -> int:
    found = api.get("/api/audit/verify", head=args.head)
    if args.json:
        common.print_json(found)
    elif found["intact"]:
        print(f"The log is intact: {found['entries']:,} entries. Its head, for --head next time: {found['head']}")
    else:
        print(f"The log was tampered with: {found['problem']}")
    return 0 if found["intact"] else 1


def _row(entry: dict[str, Any]) -> tuple[str, ...]:
    at = datetime.fromtimestamp(entry["at"], UTC).strftime("%Y-%m-%d %H:%M:%S")
    details = ", ".join(f"{name}={json.dumps(value)}" for name, value in entry["details"].items() if value)
    words = (entry["actor"], entry["source"], entry["act"], entry["target"], details[:80])
    return (str(entry["number"]), at, *(printable(word) or "–" for word in words))
