"""Fetch a model: a name of the built-in shelf, the path of a GGUF file or model folder, or hf:org/repo."""

import argparse

from emberline.catalog.model_card import DEFAULT_MODEL
from emberline.catalog.model_store import ModelStore
from emberline.cli import common
from emberline.cli.fetch import fetch, load_text
from emberline.cli.ls import row


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", default=DEFAULT_MODEL, help=f"default {DEFAULT_MODEL}")
    common.add_data(parser)
    common.add_json(parser)


def run(args: argparse.Namespace) -> int:
    entry = fetch(args.name, ModelStore(common.config_of(args).home))
    load_text(entry)  # better told now than when it is to be served
    if args.json:
        common.print_json(row(entry))
    else:
        print(f"{entry.card.id} ({common.size(entry.card.weight_bytes)}) is on this machine:\n{entry.path}")
    return 0
