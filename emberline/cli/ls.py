"""Models on this machine."""

import argparse
from typing import Any

from emberline.catalog.model_store import ModelEntry, ModelStore
from emberline.cli import common


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_data(parser)
    common.add_json(parser)


def run(args: argparse.Namespace) -> int:
    entries = ModelStore(common.config_of(args).home).entries()
    if args.json:
        common.print_json([row(entry) for entry in entries])
        return 0
    if not entries:
        print("No models yet. `emberline pull` fetches the default one.")
        return 0
    table = [("MODEL", "SHORT NAME", "SIZE", "CONTEXT", "KIND")]
    for card, _ in entries:
        short = card.aliases[0] if card.aliases else ""
        table.append((card.id, short, common.size(card.weight_bytes), f"{card.context_window:,}", card.architecture))
    common.print_table(table)
    return 0


def row(entry: ModelEntry) -> dict[str, Any]:
    card = entry.card
    return {
        "id": card.id,
        "aliases": card.aliases,
        "path": str(entry.path),
        "bytes": card.weight_bytes,
        "context_window": card.context_window,
        "architecture": card.architecture,
        "fingerprint": card.fingerprint,
    }
