"""`emberline account`: the tenants of a server and their limits.

emberline account create acme --tpm 100000 --budget 50/month
emberline account limit acme --budget none
emberline account disable acme
"""

import argparse
from typing import Any

from emberline.cli import common
from emberline.cli.admin_client import AdminApi, segment
from emberline.cli.key import add_limits, format_limits, limits_of
from emberline.protocol.errors import BadInput

_ACTIONS = {
    "create": "create an account",
    "limit": "change an account's limits; none removes one",
    "disable": "refuse its keys; its queued jobs fail",
    "enable": "let a disabled account work again",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, text in _ACTIONS.items():
        action = actions.add_parser(name, help=text, allow_abbrev=False)
        action.add_argument("account", metavar="NAME", help="as in /client/v4/accounts/NAME/…")
        if name in ("create", "limit"):
            add_limits(action)
    actions.add_parser("ls", help="list accounts", allow_abbrev=False)
    for action in actions.choices.values():
        common.add_client_options(action)


def run(args: argparse.Namespace) -> int:
    api = AdminApi(args)
    if args.action == "ls":
        return _list(api, args)
    if args.action == "create":
        account = api.post("/api/accounts", {"id": args.account, **limits_of(args)})
    else:
        account = api.patch(f"/api/accounts/{segment(args.account)}", _changes(args))
    if args.json:
        common.print_json(account)
    else:
        print(f"{account['id']}: {_state(account)}, limits: {format_limits(account)}")
    return 0


def _changes(args: argparse.Namespace) -> dict[str, Any]:
    if args.action in ("disable", "enable"):
        return {"disabled": args.action == "disable"}
    if not (body := limits_of(args)):
        raise BadInput("what is to change? `emberline account limit --help` lists the limits")
    return body


def _list(api: AdminApi, args: argparse.Namespace) -> int:
    accounts = list(api.pages("/api/accounts"))
    if args.json:
        common.print_json(accounts)
        return 0
    rows = [(account["id"], _state(account), format_limits(account)) for account in accounts]
    common.print_table([("ACCOUNT", "STATE", "LIMITS"), *rows])
    return 0


def _state(account: dict[str, Any]) -> str:
    return "active" if account["disabled_at"] is None else "disabled"
