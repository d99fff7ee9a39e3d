"""`emberline gateway`: the gateways of an account, and their logs.

emberline gateway create support --cache-ttl 3600 --max-attempts 3 --fallback openai/gpt-5=anthropic/claude-sonnet-4-5
emberline gateway create support --file settings.json
emberline gateway list
emberline gateway show support
emberline gateway logs support --status error --metadata user:42
emberline gateway delete support
"""

import argparse
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from emberline.cli import common
from emberline.cli.admin_client import AdminApi, segment
from emberline.protocol.errors import BadInput

_SETTINGS = (  # flag, setting, type, help
    ("--cache-ttl", "cache_ttl_s", int, "seconds for which a reply is served again"),
    ("--max-attempts", "max_attempts", int, "of a model, 1 to 5"),
    ("--retry-delay", "retry_delay_ms", int, "milliseconds before the second attempt"),
    ("--backoff", "backoff", str, "constant, linear or exponential"),
    ("--request-timeout", "request_timeout_ms", int, "milliseconds until the first byte of a reply"),
    ("--log-retention-days", "log_retention_days", float, "days for which log rows are kept"),
)
_FILTERS = ("model", "provider", "status", "error", "metadata", "text")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    create = actions.add_parser("create", help="create a gateway, or replace its settings", allow_abbrev=False)
    create.add_argument("name", metavar="NAME")
    create.add_argument("--file", metavar="FILE", help="all settings as JSON; flags replace single ones")
    for flag, name, kind, text in _SETTINGS:
        create.add_argument(flag, dest=name, type=kind, metavar=kind.__name__.upper(), help=text)
    create.add_argument(
        "--fallback", action="append", metavar="MODEL=MODEL,…", help="what to try where a model fails; repeatable"
    )
    create.add_argument("--block", action="append", metavar="PATTERN", help="text that blocks a request; repeatable")
    create.add_argument("--log-content", action="store_true", help="record prompts and replies")
    every = actions.add_parser("list", help="list gateways", allow_abbrev=False)
    show = actions.add_parser("show", help="show a gateway's settings", allow_abbrev=False)
    gone = actions.add_parser("delete", help="delete a gateway; its log rows stay", allow_abbrev=False)
    logs = actions.add_parser("logs", help="search a gateway's log", allow_abbrev=False)
    for action in (show, gone, logs):
        action.add_argument("name", metavar="NAME")
    for name in _FILTERS:
        logs.add_argument(f"--{name}", metavar=name.upper(), help=f"only rows with this {name}")
    logs.add_argument("--id", dest="log", metavar="LOG_ID", help="one row, with its attempts")
    logs.add_argument("--limit", type=int, default=50, metavar="N", help="rows to print (default 50)")
    for action in (create, every, show, gone, logs):
        action.add_argument("--account", metavar="NAME", help="whose gateways (default: the caller's)")
        common.add_client_options(action)


def run(args: argparse.Namespace) -> int:
    api = AdminApi(args)
    if args.action == "create":
        return _print(args, api.post("/api/gateways", _body(args)))
    if args.action == "list":
        listed = api.get("/api/gateways", account=args.account)
        if args.json:
            return _print(args, listed)
        headings = ("NAME", "ACCOUNT", "CACHE", "ATTEMPTS", "TIMEOUT", "FALLBACKS", "ROUTES", "GUARDRAILS", "SOURCE")
        common.print_table([headings, *(_row(one) for one in listed["data"])])
        return 0
    path = f"/api/gateways/{segment(args.name)}"
    if args.action == "show":
        return _print(args, api.get(path, account=args.account))
    if args.action == "delete":
        return _print(args, api.delete(path, account=args.account))
    query = {name: getattr(args, name) for name in (*_FILTERS, "log")}
    found = api.get(f"{path}/logs", account=args.account, limit=args.limit, **query)
    if args.json or args.log:
        return _print(args, found["data"][0] if args.log and found["data"] else found)
    columns = ("TIME", "STATUS", "MODEL", "PROVIDER", "CACHE", "TOKENS", "COST", "TOTAL", "TTFT", "ATTEMPTS", "ID")
    common.print_table([columns, *(_log_row(row) for row in found["data"])])
    return 0


def _print(args: argparse.Namespace, answer: Any) -> int:
    common.print_json(answer)
    return 0


def _body(args: argparse.Namespace) -> dict[str, Any]:
    body: dict[str, Any] = {}
    if args.file:
        try:
            body = json.loads(Path(args.file).read_text(encoding="utf-8"))
        except ValueError as error:
            raise BadInput(f"{args.file} is not JSON: {error}") from None
        if not isinstance(body, dict):
            raise BadInput(f"{args.file} is no JSON object")
    body["name"] = args.name
    if args.account:
        body["account"] = args.account
    body |= {name: value for _, name, _, _ in _SETTINGS if (value := getattr(args, name)) is not None}
    if args.fallback:
        body["fallbacks"] = body.get("fallbacks", {}) | dict(map(_chain, args.fallback))
    if args.block:
        rules = [{"name": f"block-{number}", "pattern": text} for number, text in enumerate(args.block, 1)]
        body["guardrails"] = [*body.get("guardrails", []), *rules]
    if args.log_content:
        body["log_content"] = True
    return body


def _chain(text: str) -> tuple[str, list[str]]:
    model, separator, others = text.partition("=")
    if not (model and separator and others):
        raise BadInput(f"--fallback is MODEL=MODEL,…, not {text!r}")
    return model, others.split(",")


def _row(one: dict[str, Any]) -> tuple[str, ...]:
    return (
        one["name"],
        one["account"] or "(all)",
        f"{one['cache_ttl_s']} s" if one["cache_ttl_s"] else "–",
        str(one["max_attempts"]),
        f"{one['request_timeout_ms']} ms" if one["request_timeout_ms"] else "–",
        str(len(one["fallbacks"])),
        str(len(one["routes"])),
        str(len(one["guardrails"])),
        one["source"],
    )


def _log_row(row: dict[str, Any]) -> tuple[str, ...]:
    at = datetime.fromtimestamp(row["created_at_us"] / 1e6, UTC).strftime("%Y-%m-%d %H:%M:%S")
    return (
        at,
        row["error"] or row["status"],
        row["model"],
        row["provider"],
        row["cache_status"] or "–",
        f"{row['input_tokens']}+{row['output_tokens']}",
        "–" if row["cost"] is None else f"{row['cost']:.6g}",
        f"{row['duration_ms']:.0f} ms",
        "–" if row["ttft_ms"] is None else f"{row['ttft_ms']:.0f} ms",
        str(len(row["attempts"])),
        row["id"],
    )
