"""`emberline usage`: what was used and what it costs, by account, key, model, session and day.

emberline usage --account acme --by day,model --since 2026-11-01
"""

import argparse
import csv
import sys
from typing import Any

from emberline.cli import common
from emberline.cli.admin_client import AdminApi


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--account", metavar="NAME", help="of this account (default: all that the key may see)")
    add("--key", metavar="ID", help="of this API key")
    add("--model", metavar="MODEL", help="of this model")
    add("--by", metavar="LIST", help="group by day, account, key, model, class, session (default account,model)")
    add("--since", metavar="DAY", help="2026-11-01, or 7d for seven days ago (default: the last 30 days; UTC)")
    add("--until", metavar="DAY", help="the last day (default: today)")
    add(
        "--compare", metavar="MODEL", help="say what the same tokens cost at this model's prices, and without the cache"
    )
    add("--csv", action="store_true", help="print CSV")
    common.add_client_options(parser)


def run(args: argparse.Namespace) -> int:
    api, names = AdminApi(args), ("account", "key", "model", "since", "until", "compare")
    query = {"by": args.by or "account,model", **{name: getattr(args, name) for name in names}}
    report = api.get("/api/usage", **query)
    if args.json:
        common.print_json(report)
    elif args.csv:
        _print_csv(report)
    else:
        _print(report)
    return 0


def _print_csv(report: dict[str, Any]) -> None:
    writer = csv.DictWriter(sys.stdout, [*report["by"], *report["total"]], lineterminator="\n")
    writer.writeheader()
    writer.writerows(report["data"])


def _print(report: dict[str, Any]) -> None:
    print(f"{report['since']} to {report['until']} (UTC)")
    if not report["data"]:
        print("Nothing was used.")
        return
    by, total = report["by"], report["total"]
    amounts = ("REQUESTS", "INPUT", "CACHED", "OUTPUT", "DEVICE S", "COST", "SAVED BY CACHE")
    headings = (*(name.upper() for name in by), *amounts)
    total_group = ("total", *[""] * (len(by) - 1)) if by else ()
    rows = [_row(tuple(str(row[name]) or "–" for name in by), row) for row in report["data"]]
    common.print_table([headings, *rows, *([_row(total_group, total)] if by else [])])
    if report.get("folded_rows"):  # older servers have none
        print(f"\nThe row `other` adds up {report['folded_rows']:,} groups that cost the least.")
    if total["without_price"]:
        print(f"\n{total['without_price']:,} requests have no cost: their model had no price (`emberline price set`).")
    if total["cached_tokens"]:
        print(
            f"The prefix cache served {total['cached_tokens']:,} input tokens and saved {total['cache_savings']}; "
            f"{total['affinity_tokens']:,} of them ({total['affinity_savings']}) in sessions with affinity."
        )
    if "comparison" in report:
        print(report["comparison"]["sentence"])


def _row(group: tuple[str, ...], row: dict[str, Any]) -> tuple[str, ...]:
    share = f" ({row['cached_tokens'] / row['input_tokens']:.0%})" if row["input_tokens"] else ""
    cached, device_s = f"{row['cached_tokens']:,}{share}", f"{float(row.get('device_seconds', 0)):,.1f}"
    counts = (f"{row['requests']:,}", f"{row['input_tokens']:,}", cached, f"{row['output_tokens']:,}", device_s)
    cost = "no price" if row["cost"] is None else row["cost"] + (" *" if row["without_price"] else "")
    return *group, *counts, cost, row["cache_savings"]
