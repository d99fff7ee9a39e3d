"""The panel that `emberline serve` prints when it is ready."""

import json
import os
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from emberline import __version__
from emberline.catalog.model_store import ModelEntry
from emberline.cli.common import format_size
from emberline.config import Config, home_dir, needs_keys
from emberline.server.address import ServerAddress


def show(
    config: Config,
    address: ServerAddress,
    entries: Sequence[ModelEntry],
    workers: Sequence[dict[str, Any]],
    start_s: float,
) -> None:
    """On a terminal. `workers`: the ready lines of the engine processes."""
    bold, dim, plain = ("\x1b[1m", "\x1b[2m", "\x1b[0m") if sys.stdout.isatty() else ("", "", "")
    lines = [f"{bold}Emberline {__version__}{plain} is ready {dim}({start_s:.1f} s){plain}", ""]
    rows = [
        ("address", f"{bold}{address.url}{plain}"),
        *(("model", _model(entry)) for entry in entries),
        *(("worker", _worker(worker)) for worker in workers),
        ("data", str(config.home)),
    ]
    lines += [f"{dim}{name:<8}{plain}{value}" for name, value in rows]
    lines += [
        "",
        f"{dim}try it in a browser, at the address, or:{plain}",
        *_example(config, address, entries[0]),
        *(["", f"{dim}make a key, which is shown once:{plain}", *_key_command(config)] if needs_keys(config) else []),
        "",
        f"{dim}Ctrl-C stops it.{plain}",
    ]
    print("\n" + "\n".join(f"  {line}" if line else "" for line in lines) + "\n", flush=True)


def as_dict(
    address: ServerAddress, entries: Sequence[ModelEntry], workers: Sequence[dict[str, Any]], start_s: float
) -> dict[str, Any]:
    """The same as JSON, for `--json`."""
    ids = [entry.card.id for entry in entries]
    return {"ready": True, "url": address.url, "models": ids, "workers": list(workers), "seconds": round(start_s, 3)}


def _model(entry: ModelEntry) -> str:
    card = entry.card
    size = format_size(card.weight_bytes)
    return f"{card.id} ({card.architecture}, {size}, {card.context_window:,} tokens of context)"


def _worker(worker: dict[str, Any]) -> str:
    cache = f"KV cache {format_size(worker.get('kv_bytes', 0))} for {worker.get('kv_tokens', 0):,} tokens"
    return f"{worker.get('device', '?')}, {worker.get('backend', '?')} kernels, {cache}"


def _key_command(config: Config) -> list[str]:
    """The command that creates a key of an account, for this server's data folder."""
    folder = "" if config.home == home_dir(os.environ) else f" --data-dir {shlex.quote(str(config.home))}"
    return [f"emberline key create --account me{folder}"]


def _example(config: Config, address: ServerAddress, entry: ModelEntry) -> list[str]:
    name = entry.card.aliases[0] if entry.card.aliases else entry.card.id
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": "Hello!"}]})
    headers = ["Authorization: Bearer <key>"] if needs_keys(config) else []
    return [
        f"curl {address.url}/v1/chat/completions \\",
        *(f"  -H '{header}' \\" for header in [*headers, "Content-Type: application/json"]),
        f"  -d '{body}'",
    ]
