"""`emberline key`: API keys, each bound to an account.

emberline key create --account NAME --rpm 60 --budget 20/month
emberline key ls
emberline key rotate key_… --overlap 1h
"""

import argparse
import re
import time
from datetime import UTC, datetime
from typing import Any

from emberline.cli import common
from emberline.cli.admin_client import AdminApi, segment
from emberline.cli.terminal import printable
from emberline.protocol.errors import BadInput

_DURATION = re.compile(r"(\d{1,9})(s|m|h|d)?")
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_NONE = "none"  # removes a limit


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    create = actions.add_parser("create", help="create a key, which is shown once", allow_abbrev=False)
    create.add_argument("--account", required=True, metavar="NAME", help="whose key; created if it does not exist")
    create.add_argument("--admin", action="store_true", help="an admin key: every account, and the server itself")
    listing = actions.add_parser("ls", help="list keys", allow_abbrev=False)
    listing.add_argument("--account", metavar="NAME", help="only this account's")
    limit = actions.add_parser("limit", help="change a key's limits and scope", allow_abbrev=False)
    rotate = actions.add_parser("rotate", help="replace a key; the old one stays valid for a while", allow_abbrev=False)
    rotate.add_argument("--overlap", default="24h", metavar="TIME", help="for which the old key stays valid (24h)")
    revoke = actions.add_parser("revoke", help="revoke a key", allow_abbrev=False)
    for action in (limit, rotate, revoke):
        action.add_argument("key", metavar="ID", help="the key's id, as `emberline key ls` shows it")
    for action in (create, limit):
        add_limits(action)
        action.add_argument("--models", metavar="LIST", help="ids or aliases it may use, comma-separated; org/* too")
        action.add_argument("--apis", metavar="LIST", help="APIs it may use: chat, responses, messages, batches, …")
        action.add_argument("--expires", metavar="TIME", help="30d, 12h, or a date such as 2027-01-31")
        action.add_argument("--name", metavar="TEXT", help="to recognize it by")
    for action in actions.choices.values():
        common.add_client_options(action)


def add_limits(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rpm", metavar="N", help="requests a minute")
    parser.add_argument("--tpm", metavar="N", help="tokens a minute")
    parser.add_argument("--concurrency", metavar="N", help="requests in flight")
    parser.add_argument("--budget", metavar="AMOUNT[/day|/month]", help="what it may spend, e.g. 20/month")


def run(args: argparse.Namespace) -> int:
    return {"create": _create, "ls": _list, "limit": _limit, "rotate": _rotate, "revoke": _revoke}[args.action](args)


def limits_of(args: argparse.Namespace) -> dict[str, Any]:
    """The limit fields of the admin API that the flags set; "none" removes a limit."""
    body: dict[str, Any] = {}
    for flag, field in (("rpm", "requests_per_minute"), ("tpm", "tokens_per_minute"), ("concurrency", "concurrency")):
        if (text := getattr(args, flag)) is not None:
            body[field] = None if text == _NONE else _count(text, flag)
    if args.budget is not None:
        amount, _, period = args.budget.partition("/")
        body["budget"] = None if amount == _NONE else amount
        body["budget_period"] = period or "total"
    return body


def _count(text: str, flag: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text[:19]) > 0 and len(text) < 19):
        raise BadInput(f"--{flag} is a positive integer, or none")
    return int(text)


def _key_fields(args: argparse.Namespace) -> dict[str, Any]:
    body = limits_of(args)
    for name in ("models", "apis"):
        if (text := getattr(args, name)) is not None:
            body[name] = [] if text == _NONE else [word.strip() for word in text.split(",") if word.strip()]
    if args.expires is not None:
        body["expires_at"] = None if args.expires == _NONE else _expiry(args.expires)
    if args.name is not None:
        body["name"] = args.name
    return body


def _expiry(text: str) -> int | str:
    """A Unix time for a duration; a date is left to the server."""
    return int(time.time()) + duration_s(text) if _DURATION.fullmatch(text) else text


def duration_s(text: str) -> int:
    """Seconds of a duration such as 90s, 30m, 24h or 7d. Raises BadInput if the text is none."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise BadInput(f"{text[:40]!r} is not a time such as 90s, 30m, 24h or 7d")
    return int(match[1]) * _UNIT_S[match[2] or "s"]


def _create(args: argparse.Namespace) -> int:
    role = {"role": "admin"} if args.admin else {}
    return _print_issued(args, AdminApi(args).post("/api/keys", {"account": args.account, **role, **_key_fields(args)}))


def _rotate(args: argparse.Namespace) -> int:
    body = {"overlap_s": duration_s(args.overlap)}
    return _print_issued(args, AdminApi(args).post(f"/api/keys/{segment(args.key)}/rotate", body))


def _limit(args: argparse.Namespace) -> int:
    if not (body := _key_fields(args)):
        raise BadInput("what is to change? `emberline key limit --help` lists the limits")
    return _print_one(args, AdminApi(args).patch(f"/api/keys/{segment(args.key)}", body), "changed")


def _revoke(args: argparse.Namespace) -> int:
    return _print_one(args, AdminApi(args).post(f"/api/keys/{segment(args.key)}/revoke"), "revoked")


def _list(args: argparse.Namespace) -> int:
    keys = list(AdminApi(args).pages("/api/keys", account=args.account))
    if args.json:
        common.print_json(keys)
        return 0
    headings = ("ID", "ACCOUNT", "NAME", "KEY", "STATE", "LIMITS", "SCOPE")
    common.print_table([headings, *(_row(key) for key in keys)])
    return 0


def _print_issued(args: argparse.Namespace, issued: dict[str, Any]) -> int:
    if args.json:
        common.print_json(issued)
    else:
        print(issued["key"])
        common.print_note(f"{issued['id']} of account {issued['account']}. The key is not shown again: keep it now.")
    return 0


def _print_one(args: argparse.Namespace, key: dict[str, Any], what: str) -> int:
    if args.json:
        common.print_json(key)
    else:
        print(f"{key['id']} of account {key['account']} is {what}")
    return 0


def _row(key: dict[str, Any]) -> tuple[str, ...]:
    scope = [*key["models"], *key["apis"]]
    role = "admin " if key["role"] == "admin" else ""
    name = printable(key["name"])[:24] or "–"
    return (
        *(key["id"], key["account"], name, role + key["hint"], _state(key)),
        format_limits(key),
        printable(", ".join(scope))[:60] or "–",
    )


def _state(key: dict[str, Any]) -> str:
    if key["revoked_at"] is not None:
        return "revoked"
    if key["expires_at"] is None:
        return "valid"
    day = datetime.fromtimestamp(key["expires_at"], UTC).strftime("%Y-%m-%d %H:%M")
    return "expired" if key["expires_at"] <= time.time() else f"until {day}"


def format_limits(limits: dict[str, Any]) -> str:
    """The limits of an account or a key in one cell."""
    names = (("requests_per_minute", "rpm"), ("tokens_per_minute", "tpm"), ("concurrency", "at once"))
    parts = [f"{limits[field]:,} {name}" for field, name in names if limits[field] is not None]
    if limits["budget"] is not None:
        period = limits["budget_period"]
        parts.append(limits["budget"] + ("" if period == "total" else f"/{period}"))
    return ", ".join(parts) or "–"
