"""Remove a model from this machine. A file of your own that was only linked stays where it is."""

import argparse

from emberline.catalog.model_store import ModelStore
from emberline.cli import common


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="+", help="id or short name, see `emberline ls`")
    common.add_data(parser)
    common.add_json(parser)


def run(args: argparse.Namespace) -> int:
    shelf = ModelStore(common.config_of(args).home)
    removed = []
    for name in args.name:
        removed.append(shelf.remove(name).id)
        if not args.json:
            print(f"removed {removed[-1]}")
    if args.json:
        common.print_json({"removed": removed})
    return 0
