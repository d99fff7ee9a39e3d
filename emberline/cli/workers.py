"""`emberline drain`, `undrain`, `leave` and `join`: change the workers of a running server.

emberline drain NAME [--wait]
EMBERLINE_ENDPOINTS_<NAME>_KEY=… emberline join NAME URL --kind emberline --model MODEL
"""

import argparse
import os
import time
from typing import Any

from emberline.cli import common
from emberline.cli import http_client as client
from emberline.cli.terminal import transient_line
from emberline.config import endpoint_key_variable
from emberline.server.address import ServerAddress

POLL_S = 0.5
_DONE = {"drain": "drains", "undrain": "gets requests again", "leave": "leaves", "join": "has joined"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    action = parser.get_default("command")
    parser.add_argument("name", metavar="NAME", help="of the worker, as `emberline ps` shows it")
    if action == "join":
        parser.add_argument("url", metavar="URL", help="tcp://host:port of a worker, http(s)://… of another server")
        parser.add_argument("--kind", default="openai", help="emberline, vllm, sglang or openai (default openai)")
        parser.add_argument("--model", action="append", default=[], metavar="MODEL", help="that it serves; repeatable")
        parser.add_argument("--role", default="both", help="both, prefill or decode (default both)")
    if action in ("drain", "leave"):
        parser.add_argument("--wait", action="store_true", help="return when its last request has ended")
    if action == "leave":
        parser.add_argument("--stop", action="store_true", help="end a worker on another machine, too")
    common.add_client_options(parser)


def run(args: argparse.Namespace) -> int:
    address, action = ServerAddress.for_client(common.config_of(args)), args.command
    answer = client.post(address, f"/api/workers/{action}", _body(args))
    names = {worker["name"] for worker in answer["workers"]}
    if getattr(args, "wait", False):
        with transient_line("waiting for its requests to end …"):
            while any(engine["in_flight"] for engine in _engines(address, names)):
                time.sleep(POLL_S)
    if args.json:
        common.print_json(answer)
        return 0
    for worker in answer["workers"]:
        waits = action in ("drain", "leave") and not args.wait and worker["in_flight"]
        rest = f"; {worker['in_flight']} sequences are still running" if waits else ""
        print(f"{worker['name']} {_DONE[action]}{rest}")
    return 0


def _body(args: argparse.Namespace) -> dict[str, Any]:
    if args.command == "leave":
        return {"name": args.name, "stop": args.stop}
    if args.command != "join":
        return {"name": args.name}
    key = os.environ.get(endpoint_key_variable(args.name))  # not a flag: command lines are visible to others
    body = {"name": args.name, "url": args.url, "kind": args.kind, "role": args.role, "models": args.model}
    return {**body, **({"key": key} if key else {})}


def _engines(address: ServerAddress, names: set[str]) -> list[dict[str, Any]]:
    return [engine for engine in client.get(address, "/api/ps")["engines"] if engine["name"] in names]
