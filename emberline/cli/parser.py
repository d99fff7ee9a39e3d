"""The command line's parser: argparse, which names the nearest flag for one that it does not know."""

import argparse
import difflib
import re
from typing import Any, NoReturn

_UNKNOWN = "unrecognized arguments: "
_FLAG = re.compile(r"--?[A-Za-z][^\s=]*")


class CommandParser(argparse.ArgumentParser):
    """Parser of a command."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **{name: one for name, one in options.items() if name != "allow_abbrev"})

    def add_subparsers(self, **options: Any) -> Any:
        return super().add_subparsers(parser_class=_ActionParser, **options)

    def error(self, message: str) -> NoReturn:
        if message.startswith(_UNKNOWN):
            known = [name for name in self._option_string_actions if name.startswith("--")]
            near = [found[0] for flag in _FLAG.findall(message) if (found := difflib.get_close_matches(flag, known, 1))]
            message += f"; did you mean {' and '.join(near)}?" if near else ""
        super().error(message)


class _ActionParser(CommandParser):
    """Parser of one action of a command. It refuses what it does not know itself, since it knows the nearest flag."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(_UNKNOWN + " ".join(unknown))
        return found, unknown
