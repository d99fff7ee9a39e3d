"""`emberline provider`: keys of other providers, whose models are asked for as provider/model.

emberline provider add openai --key-env OPENAI_API_KEY
emberline provider add acme --url https://llm.acme.example/v1 --account NAME
emberline provider ls
emberline provider test openai
emberline provider rm openai
"""

import argparse
import getpass
import os
import sys

from emberline.cli import common
from emberline.cli.admin_client import AdminApi, segment
from emberline.protocol.errors import BadInput


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    add = actions.add_parser("add", help="store a key: from a variable, standard input or a prompt", allow_abbrev=False)
    add.add_argument("--key-env", metavar="VARIABLE", help="the environment variable with the key")
    add.add_argument("--url", default="", help="of its API, where the name does not tell it")
    add.add_argument(
        "--kind", default="", choices=["openai", "anthropic", "gemini"], help="the API at --url (default: OpenAI's)"
    )
    actions.add_parser("ls", aliases=["list"], help="list providers with a key", allow_abbrev=False)
    check = actions.add_parser("test", help="ask the provider for its models", allow_abbrev=False)
    gone = actions.add_parser("rm", aliases=["remove"], help="remove a stored key", allow_abbrev=False)
    for action in (add, check, gone):
        action.add_argument("name", metavar="NAME", help="openai, anthropic, gemini, groq, … or a name of yours")
    for action in (add, gone):
        action.add_argument("--account", metavar="NAME", help="whose key it is (default: all accounts')")
    for action in dict.fromkeys(actions.choices.values()):
        common.add_client_options(action)


def run(args: argparse.Namespace) -> int:
    api = AdminApi(args)
    if args.action in ("ls", "list"):
        answer = api.get("/api/providers")
    elif args.action == "add":
        body = {"name": args.name, "key": _key(args), "url": args.url, "kind": args.kind, "account": args.account}
        answer = api.post("/api/providers", {name: value for name, value in body.items() if value})
    elif args.action == "test":
        answer = api.post(f"/api/providers/{segment(args.name)}/test")
    else:
        query = f"?account={segment(args.account)}" if args.account else ""
        answer = api.delete(f"/api/providers/{segment(args.name)}{query}")
    if args.json:
        common.print_json(answer)
    elif args.action == "test":
        models = answer["models"]
        more = f", … ({len(models)} in all)" if len(models) > 5 else ""
        print(f"{args.name} accepts the key and has {', '.join(models[:5])}{more}")
    elif args.action in ("rm", "remove"):
        print(f"removed the key of {args.name}")
    elif args.action == "add":
        print(f"stored: {args.name}/… can be used now; `emberline provider test {args.name}` checks the key")
    elif not answer["data"]:
        print("No provider has a key. `emberline provider add openai` stores one.")
    else:
        rows = [
            (row["name"], row["account"] or "all", row["kind"], row.get("url") or "–", row["source"])
            for row in answer["data"]
        ]
        common.print_table([("PROVIDER", "ACCOUNT", "API", "URL", "FROM"), *rows])
    return 0


def _key(args: argparse.Namespace) -> str:
    """Not a flag: command lines are visible to others."""
    if args.key_env:
        if not (key := os.environ.get(args.key_env, "")):
            raise BadInput(f"the environment variable {args.key_env} is not set")
        return key
    if sys.stdin.isatty():
        return getpass.getpass(f"Key of {args.name}: ").strip()
    return sys.stdin.readline().strip()
