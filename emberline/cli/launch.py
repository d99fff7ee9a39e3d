"""`emberline launch AGENT`: start a coding agent with a model of this machine, and the server if none runs."""

import argparse
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Sequence
from typing import Any

from emberline.catalog.model_store import ModelStore
from emberline.cli import common
from emberline.cli import http_client as client
from emberline.cli.agents import AGENTS, Agent, Endpoint
from emberline.cli.model import known_model
from emberline.cli.server_target import served_id, server
from emberline.config import Config, needs_keys
from emberline.protocol.errors import BadInput
from emberline.server.address import ServerAddress

DEFAULT_MODEL = "qwen2.5-coder"  # where no model that calls tools is on this machine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "emberline launch [options] AGENT [-- ARGUMENTS ...]"
    names = ", ".join(AGENTS)
    parser.add_argument("agent", choices=AGENTS, metavar="AGENT", help=names)
    parser.add_argument("arguments", nargs="*", metavar="ARGUMENTS", help="for the agent itself, after `--`")
    parser.add_argument("--model", metavar="MODEL", help="default: the largest one here that calls tools")
    parser.add_argument("--print", action="store_true", help="print the settings as shell commands; start nothing")
    common.add_address(parser)
    common.add_data_dir(parser)


def run(args: argparse.Namespace) -> int:
    agent, config = AGENTS[args.agent], common.config_of(args)
    program = shutil.which(agent.program)
    if program is None and not args.print:
        raise BadInput(f"{agent.title} is not installed here: {agent.install}")
    required, store = common.names_server(args, config), ModelStore(config.home)
    address = ServerAddress.for_client(config)
    rows = _rows(address) if required or client.is_running(address) else []
    model = args.model or _tool_model(rows, store)
    served = client.served_models(address) if rows else {}
    if args.print:
        found_id = served_id(config, model, served, required=required)
        name = model if model.lower() in served else found_id or model
        print(shell_commands(agent, _endpoint(address, name, rows, config), args.arguments))
        return 0
    with server(config, model, served, required=required) as (found, model_id):
        name = model if model.lower() in client.served_models(found) else model_id
        settings = agent.settings(_endpoint(found, name, _rows(found), config))
        common.print_note(f"{agent.title} with {model_id} at {found.url}")
        return _run([str(program), *settings.arguments, *args.arguments], settings.environment)


def shell_commands(agent: Agent, to: Endpoint, arguments: Sequence[str] = ()) -> str:
    """The agent's settings as lines for a shell: the variables, then the command."""
    settings = agent.settings(to)
    exports = [f"export {name}={shlex.quote(value)}" for name, value in settings.environment.items()]
    return "\n".join([*exports, shlex.join([agent.program, *settings.arguments, *arguments])])


def _rows(address: ServerAddress) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = client.get(address, "/v1/models")["data"]
    return rows


def _tool_model(rows: Sequence[dict[str, Any]], store: ModelStore) -> str:
    """The model for an agent: one of the server's that calls tools, else the largest of those on this machine, else
    the one to download."""
    callers = [row for row in rows if row["capabilities"].get("function_calling")]
    callers.sort(key=lambda row: row.get("state") not in ("loaded", "provider"))
    if callers:
        return str(callers[0]["id"])
    here = [entry.card for entry in store.entries() if entry.card.capabilities.function_calling]
    return max(here, key=lambda card: card.weight_bytes).id if here else DEFAULT_MODEL


def _endpoint(address: ServerAddress, model: str, rows: Sequence[dict[str, Any]], config: Config) -> Endpoint:
    """The agent's view of the server. Raises BadInput if the server wants a key and none is given."""
    if address.key is None and needs_keys(config):
        raise BadInput(
            "the server wants a key, also of an agent: `emberline key create` makes one; give it as --api-key"
        )
    names = (model.lower(), *(alias.lower() for row in rows for alias in row["aliases"] if row["id"] == model))
    row = next((row for row in rows if row["id"].lower() in names or model.lower() in row["aliases"]), None)
    if row:
        context, sees = row["context_window"], row["capabilities"].get("vision", False)
    else:
        card = known_model(ModelStore(config.home), model)[0]
        context, sees = card.context_window, card.capabilities.vision
    return Endpoint(url=address.url, model=model, context_window=context, key=address.key or "none", sees=sees)


def _run(command: list[str], variables: dict[str, str]) -> int:
    """Run the agent on this terminal. Ctrl-C is the agent's: a handler here is reset in the process it starts."""
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        return subprocess.run(command, env={**os.environ, **variables}, check=False).returncode
    finally:
        signal.signal(signal.SIGINT, before)
