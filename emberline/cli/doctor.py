"""Check this machine and say how to fix what is wrong: each line is ok, warn or fail, with the remedy."""

import argparse
import sys

from emberline.cli import common
from emberline.cli.checks import Check, examine
from emberline.cli.http_client import Address
from emberline.config import Config, ConfigError

_MARKS = {"ok": ("✓", "\x1b[32m"), "warn": ("!", "\x1b[33m"), "fail": ("✗", "\x1b[31m")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_address(parser)
    common.add_data(parser)
    common.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Exit status 1 when something fails."""
    config: Config | None
    try:
        config = common.config_of(args)
        first = Check("configuration", "ok", f"{config.home}, {Address.of(config).url}")
    except ConfigError as error:
        config, first = None, Check("configuration", "fail", error.message, "correct or remove that key")
    checks = [first]
    if not args.json:
        _show(first)
    for check in examine(config):
        checks.append(check)
        if not args.json:
            _show(check)
    failed = any(check.status == "fail" for check in checks)
    if args.json:
        common.print_json({"ok": not failed, "checks": [check.as_dict() for check in checks]})
    return 1 if failed else 0


def _show(check: Check) -> None:
    mark, colour = _MARKS[check.status]
    label = f"{colour}{mark} {check.status:<4}\x1b[0m" if sys.stdout.isatty() else f"{mark} {check.status:<4}"
    print(f"{label}  {check.name:<14} {check.detail}")
    if check.fix:
        print(f"{'':<8}{'':<14} → {check.fix}")
