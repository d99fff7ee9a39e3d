"""`emberline load` and `stop`: load and unload models of a running server."""

import argparse

from emberline.cli import common
from emberline.cli import http_client as client
from emberline.server.address import ServerAddress

_ACTIONS = {"load": ("load", "is loaded"), "stop": ("unload", "is unloaded; the next request for it loads it again")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="+", metavar="MODEL", help="id or alias, see `emberline ps`")
    common.add_client_options(parser)


def run(args: argparse.Namespace) -> int:
    address = ServerAddress.for_client(common.config_of(args))
    action, done = _ACTIONS[args.command]
    answers = []
    for model in args.models:
        answers.append(client.post(address, f"/api/models/{action}", {"model": model}, timeout_s=None))
        if not args.json:
            print(f"{answers[-1]['model']} {done}")
    if args.json:
        common.print_json(answers)
    return 0
