"""`emberline logs`: the server's log lines, from the file in the data folder.

emberline logs -f
emberline logs --request 3f0e…
emberline logs --model NAME [--version N] [--remote]
"""

import argparse
import calendar
import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from emberline import log
from emberline.catalog.model_store import ModelStore
from emberline.cli import common
from emberline.cli import http_client as client
from emberline.cli.log_file import follow, lines_backward, log_path
from emberline.config import Config
from emberline.predictor.output_log import MAX_BYTES, last_lines
from emberline.predictor.versions import OWNER, PredictorVersions
from emberline.protocol.errors import BadInput, ModelNotFound, NotFound
from emberline.server.address import ServerAddress

LEVELS = ("debug", "info", "warning", "error")
N_LINES = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-f", "--follow", action="store_true", help="keep printing new lines, until Ctrl-C")
    add("-n", "--lines", type=int, metavar="N", help=f"the last N matching lines (default {N_LINES}; of a request all)")
    add("--request", metavar="ID", help="only lines of this request, job or trace; the beginning of its id is enough")
    add("--level", choices=LEVELS, help="only lines of this level or above")
    add("--model", metavar="NAME", help="what a pushed model has printed, instead")
    add("--version", type=int, metavar="N", help="with --model: of this version (default: the served one)")
    add("--remote", action="store_true", help="with --model: of the key's account, on a server over HTTP")
    common.add_address(parser)
    common.add_data_dir(parser)
    add("--json", action="store_true", help="print the lines as they are: JSON")


def run(args: argparse.Namespace) -> int:
    config = common.config_of(args)
    home = config.home
    if args.model:
        return _print_predictor_log(config, args)
    if args.remote or args.version is not None:
        raise BadInput("--remote and --version are about the log of a pushed model: give its --model NAME")
    path = log_path(home)
    n_lines = args.lines if args.lines is not None else None if args.request else N_LINES
    follower = follow(path)
    if args.follow:
        next(follower)  # remember the end before the older lines are printed: none is missed
    elif not path.exists():
        raise NotFound(f"there is no log at {path}: `emberline serve` with the same data folder writes it")
    show, level = _Printer(args.json), args.level or "debug"
    found: list[dict[str, Any]] = []
    for line in lines_backward(path):
        if n_lines is not None and len(found) >= n_lines:
            break
        if (entry := _match(line, args.request, level)) is not None:
            found.append(entry)
    for entry in reversed(found):
        show(entry)
    if args.follow:
        for new in follower:
            if new is None:
                sys.stdout.flush()
            elif (entry := _match(new, args.request, level)) is not None:
                show(entry)
    return 0


def _match(line: bytes, request: str | None, level: str) -> dict[str, Any] | None:
    if request is not None and request.encode() not in line:
        return None  # most lines, without decoding them
    try:
        entry = json.loads(line)
    except ValueError:  # cut off by a crash or a full disk
        return None
    if not isinstance(entry, dict) or LEVELS.index(level) > _rank(entry):
        return None
    ids = (str(entry.get("request_id", "")), str(entry.get("trace_id", "")), str(entry.get("client_request_id", "")))
    return entry if request is None or any(each.startswith(request) for each in ids) else None


def _rank(entry: dict[str, Any]) -> int:
    level = entry.get("level")
    return LEVELS.index(level) if level in LEVELS else len(LEVELS)  # critical


class _Printer:
    """Prints entries as on the server's own terminal."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._text = log.TextFormatter(color=sys.stdout.isatty() and "NO_COLOR" not in os.environ)

    def __call__(self, entry: dict[str, Any]) -> None:
        print(json.dumps(entry, ensure_ascii=False) if self._as_json else self._text.format(_record(entry)))


def _record(entry: dict[str, Any]) -> logging.LogRecord:
    fields = dict(entry)
    level = str(fields.pop("level", "info")).upper()
    known = {
        "created": _seconds(str(fields.pop("time", ""))),
        "levelname": level,
        "levelno": logging.getLevelNamesMapping().get(level, logging.INFO),
        "name": fields.pop("logger", ""),
        "process_name": fields.pop("process", ""),
        "msg": str(fields.pop("message", "")),
    }
    safe = {name: value for name, value in fields.items() if name == "request_id" or not hasattr(_BLANK, name)}
    return logging.makeLogRecord({**safe, **known})


_BLANK = logging.makeLogRecord({})


def _seconds(text: str) -> float:
    try:
        return calendar.timegm(time.strptime(text[:19], "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return 0.0


def _print_predictor_log(config: Config, args: argparse.Namespace) -> int:
    """Print the end of a predictor's log, of this machine or of a server. Raises BadInput for flags that it cannot
    honour."""
    _check_flags(args)
    n_lines = N_LINES if args.lines is None else max(0, args.lines)
    for line in _remote_lines(config, args, n_lines) if args.remote else _local_lines(config.home, args, n_lines):
        print("".join(each if each.isprintable() or each == "\t" else "\N{REPLACEMENT CHARACTER}" for each in line))
    return 0


def _check_flags(args: argparse.Namespace) -> None:
    """Raise BadInput that names the given flags which do not apply to the log of a pushed model."""
    lines = {"--follow": args.follow, "--request": args.request, "--level": args.level, "--json": args.json}
    if refused := [flag for flag, value in lines.items() if value]:
        raise BadInput(
            f"{', '.join(refused)}: only for the server's own log. The log of a pushed model is the text that it has "
            "printed, without requests and levels: leave such flags out; -n N sets how many lines"
        )
    server = {"--url": "client.url", "--api-key": "client.key", "--host": "server.host", "--port": "server.port"}
    if not args.remote and (named := [flag for flag, name in server.items() if getattr(args, name) is not None]):
        raise BadInput(f"{', '.join(named)}: only with --remote, which reads the log from that server; add it")


def _remote_lines(config: Config, args: argparse.Namespace, n_lines: int) -> list[str]:
    version = {} if args.version is None else {"version": args.version}
    query = urlencode({"model": args.model, "lines": max(1, n_lines), **version})  # the server refuses 0
    lines: list[str] = client.get(ServerAddress.for_client(config), f"/api/models/logs?{query}")["data"]
    return lines[:n_lines]


def _local_lines(home: Path, args: argparse.Namespace, n_lines: int) -> list[str]:
    versions, model = PredictorVersions(home), args.model if args.model.startswith("@") else f"{OWNER}/{args.model}"
    entry = ModelStore(home).find(model)
    if entry is None or entry.card.predictor is None:
        raise ModelNotFound(f"no model {model} was pushed here")
    manifest = versions.find(entry.card.id, args.version or entry.card.predictor.version)
    return last_lines(versions.log_path(manifest), n_lines, 2 * MAX_BYTES)
