"""Common options of the commands, access to the configuration, and printing."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from emberline.config import Config, resolve
from emberline.protocol.errors import BadInput


def add_data_dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data-dir", metavar="DIR", help="data folder (EMBERLINE_HOME; default ~/.emberline)")


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_listen_address(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add the flags for where a server listens. A dotted `dest` is a configuration key."""
    parser.add_argument("--host", dest="server.host", metavar="HOST", help="address (default 127.0.0.1)")
    parser.add_argument("--port", dest="server.port", metavar="PORT", help="port (EMBERLINE_PORT; default 8686)")


def add_address(parser: argparse.ArgumentParser) -> None:
    """Add the flags for the server that a command talks to."""
    group = parser.add_argument_group("the server")
    if "--url" not in parser._option_string_actions:  # else another address that the command is about
        group.add_argument("--url", dest="client.url", metavar="URL", help="its address, also https (EMBERLINE_URL)")
    group.add_argument("--api-key", dest="client.key", metavar="KEY", help="an API key for it (EMBERLINE_KEY)")
    add_listen_address(group)


def names_server(args: argparse.Namespace, config: Config) -> bool:
    """True if the user has named a server: then no other one will do."""
    return bool(config.client.url) or any(vars(args).get(name) is not None for name in ("server.host", "server.port"))


def add_client_options(parser: argparse.ArgumentParser) -> None:
    """The options of a command that asks a running server and prints a table or JSON."""
    add_address(parser)
    add_data_dir(parser)
    add_json(parser)


def config_of(args: argparse.Namespace) -> Config:
    """The configuration with this command's flags applied."""
    given = vars(args)
    flags = {name: value for name, value in given.items() if "." in name and value != []}
    if flags.get("client.url") and (flags.get("server.host") or flags.get("server.port")):
        raise BadInput("--url names the server already: leave out --host and --port")
    if flags.get("server.host") or flags.get("server.port"):
        flags["client.url"] = ""  # a flag comes before EMBERLINE_URL
    return resolve(flags, home=Path(given["data_dir"]) if given.get("data_dir") else None)


def print_json(value: Any) -> None:
    json.dump(value, sys.stdout, indent=2, default=str)
    print()


def print_note(text: str) -> None:
    """Print a note for a person to standard error, apart from the output, which another program may read."""
    print(text, file=sys.stderr)


def print_table(rows: Sequence[tuple[str, ...]]) -> None:
    """Columns as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    for cells in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths)).rstrip())


def format_size(n_bytes: float) -> str:
    unit = "B"
    for larger in ("KiB", "MiB", "GiB"):
        if n_bytes < 1024:
            break
        n_bytes, unit = n_bytes / 1024, larger
    return f"{n_bytes:.0f} B" if unit == "B" else f"{n_bytes:.1f} {unit}"


def format_duration(seconds: float) -> str:
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    if seconds < 5940:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86_400:.0f} d"
