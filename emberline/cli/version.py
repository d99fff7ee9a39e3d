"""Print the version."""

import argparse
import json

from emberline import __version__


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(args: argparse.Namespace) -> int:
    print(json.dumps({"version": __version__}) if args.json else f"emberline {__version__}")
    return 0
