"""`emberline price`: what models cost.

emberline price set MODEL --input 0.60 --cached-input 0.10 --output 3.00
emberline price ls
emberline price history MODEL
emberline price rm MODEL
"""

import argparse
from typing import Any

from emberline.accounts.prices import ACCOUNTS_MODELS
from emberline.catalog.model_card import OF_ACCOUNTS
from emberline.cli import common
from emberline.cli.admin_client import AdminApi
from emberline.protocol.price import UNITS

_AMOUNTS = (  # flag, what it is the price of
    ("--input", "a million input tokens"),
    ("--cached-input", "a million input tokens from the prefix cache (default: as --input)"),
    ("--output", "a million output tokens, reasoning included"),
    *((f"--{name.replace('_', '-')}", unit.what) for name, unit in UNITS.items()),
    ("--neuron", "a neuron, for the header cf-ai-neurons (Workers AI: 0.000011)"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    new = actions.add_parser("set", help="set a model's price", allow_abbrev=False)
    new.add_argument("model", metavar="MODEL", help="its id, or an alias of a served model")
    for flag, what in _AMOUNTS:
        new.add_argument(flag, metavar="AMOUNT", help=f"the price of {what}")
    for kind in ("flex", "batch", "priority"):
        new.add_argument(f"--{kind}", type=int, metavar="PERCENT", help=f"of the price, in the class {kind} (100)")
    new.add_argument("--valid-from", metavar="TIME", help="2026-12-01T00:00:00Z (default: now)")
    every = actions.add_parser("ls", help="list the prices that are valid now", allow_abbrev=False)
    past = actions.add_parser("history", help="list all versions of a model's price", allow_abbrev=False)
    gone = actions.add_parser("rm", help="take a model's price away; its past prices stay", allow_abbrev=False)
    for action in (past, gone):
        action.add_argument("model", metavar="MODEL")
    for action in (new, every, past, gone):
        common.add_client_options(action)


def run(args: argparse.Namespace) -> int:
    api = AdminApi(args)
    if args.action == "set":
        answer = api.post("/api/prices", _body(args))
    elif args.action == "rm":
        answer = api.post("/api/prices/remove", {"model": args.model})
    else:
        answer = api.get("/api/prices", model=args.model if args.action == "history" else None)
    if args.json:
        common.print_json(answer)
        return 0
    versions = answer.get("data", [answer])
    if args.action == "rm" and _is_defaulted(answer["model"]):  # the default price, if there is one, is valid now
        versions += [each for each in api.get("/api/prices")["data"] if each["model"] == ACCOUNTS_MODELS]
    if not versions:
        print("No model has a price: requests are recorded without a cost. `emberline price set` sets one.")
        return 0
    headings = ("MODEL", "VERSION", "VALID FROM", "INPUT", "CACHED", "OUTPUT", "OTHER", "SOURCE")
    common.print_table([headings, *(_row(version) for version in versions)])
    return 0


def _body(args: argparse.Namespace) -> dict[str, Any]:
    names = [flag.removeprefix("--").replace("-", "_") for flag, _ in _AMOUNTS]
    given = {name: getattr(args, name) for name in (*names, "flex", "batch", "priority", "valid_from")}
    return {"model": args.model, **{name: value for name, value in given.items() if value is not None}}


def _is_defaulted(model: str) -> bool:
    """True if the default price of accounts' models is valid for the model where it has none of its own."""
    return model.startswith(OF_ACCOUNTS) and model != ACCOUNTS_MODELS


def _row(version: dict[str, Any]) -> tuple[str, ...]:
    price = version["price"]
    head = (version["model"], str(version["version"]), version["valid_from"])
    if price is None:
        shown = "none of its own" if _is_defaulted(version["model"]) else "no price"
        return *head, shown, "", "", "", version["source"]
    tokens = [str(price.pop(name, "–")) for name in ("input", "cached_input", "output")]
    other = ", ".join(
        f"{name} {value}%" if name in ("flex", "batch", "priority") else f"{name.replace('_', ' ')} {value}"
        for name, value in price.items()
    )
    return *head, *tokens, other, version["source"]
