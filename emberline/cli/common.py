"""What the commands share: the options every one has, and the way to the configuration."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from emberline.config import Config, resolve


def add_data(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", metavar="DIR", help="data folder (EMBERLINE_HOME; default ~/.emberline)")


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_address(parser: argparse.ArgumentParser) -> None:
    """Where a server listens, or is to be found. A dotted `dest` is a configuration key."""
    parser.add_argument("--host", dest="server.host", metavar="HOST", help="address (default 127.0.0.1)")
    parser.add_argument("--port", dest="server.port", metavar="PORT", help="port (EMBERLINE_PORT; default 8686)")


def add_engine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", dest="engine.device", metavar="DEVICE", help="auto, cpu or cuda (default auto)")
    parser.add_argument(
        "--replicas", dest="engine.replicas", metavar="N", help="workers per model (default one per GPU, else 1)"
    )
    parser.add_argument("--prefill", dest="engine.prefill", metavar="N", help="workers per model for prompts alone")
    parser.add_argument("--decode", dest="engine.decode", metavar="N", help="workers per model for replies alone")
    parser.add_argument("--threads", dest="engine.threads", metavar="N", help="CPU threads per worker (default: cores)")
    parser.add_argument(
        "--kv-bytes",
        dest="engine.kv_bytes",
        metavar="SIZE",
        help="KV cache per worker, e.g. 512M or 4G (default: a quarter of the free memory, at most 2G)",
    )
    parser.add_argument("--max-running", dest="engine.max_running", metavar="N", help="sequences in a batch")
    parser.add_argument("--token-budget", dest="engine.token_budget", metavar="N", help="tokens computed in a step")
    parser.add_argument(
        "--deterministic",
        dest="engine.deterministic",
        action="store_const",
        const=True,
        help="same seed, same tokens, whatever else runs (the CPU kernels always do; slower on a GPU)",
    )


def config_of(args: argparse.Namespace, **fixed: Any) -> Config:
    """The configuration with this command's flags on top."""
    given = vars(args)
    flags = {name: value for name, value in given.items() if "." in name}
    return resolve({**flags, **fixed}, home=Path(given["data"]) if given.get("data") else None)


def print_json(value: Any) -> None:
    json.dump(value, sys.stdout, indent=2, default=str)
    print()


def print_table(rows: Sequence[tuple[str, ...]]) -> None:
    """Columns as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    for cells in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths)).rstrip())


def size(n_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n_bytes < 1024 or unit == "GiB":
            return f"{n_bytes:.0f} {unit}" if unit == "B" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1024
    raise AssertionError
