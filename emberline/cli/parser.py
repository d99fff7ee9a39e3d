"""The command line's parser: argparse, which names the nearest flag for one that it does not know."""

import argparse
import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

_UNKNOWN = "unrecognized arguments: "
_FLAG = re.compile(r"--?[A-Za-z][^\s=]*")


# Two words for one action: where a parser has one of them, the other is accepted.
_SYNONYMS = {
    **dict.fromkeys(("ls", "list"), ("ls", "list", "members")),
    **dict.fromkeys(("rm", "delete", "remove"), ("rm", "delete", "remove", "revoke")),
}


class CommandParser(argparse.ArgumentParser):
    """Parser of a command. `renamed` and `answers` are of other servers' flags: ours instead, or what to do."""

    renamed: Mapping[str, str] = {}
    answers: Mapping[str, str] = {}

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **{name: one for name, one in options.items() if name != "allow_abbrev"})

    def add_subparsers(self, **options: Any) -> Any:
        self._actions_of_command = super().add_subparsers(parser_class=_ActionParser, **options)
        return self._actions_of_command

    @property
    def flags(self) -> list[str]:
        """Long flags, as completion offers them."""
        return [name for name in self._option_string_actions if name.startswith("--")]

    @property
    def actions(self) -> "dict[str, CommandParser]":
        """The parsers of the actions, by name."""
        found = getattr(self, "_actions_of_command", None)
        return {} if found is None else dict(found.choices)

    def canonical(self, words: Sequence[str]) -> list[str]:
        """The words in this parser's own terms: `list` as `ls` where the action is called so, and other servers' flags
        as ours."""
        found = list(words)
        if found and self.actions and found[0] not in self.actions:
            found[0] = next((name for name in _SYNONYMS.get(found[0], ()) if name in self.actions), found[0])
        for n, word in enumerate(found):
            flag, equals, value = word.partition("=")
            if flag in self.answers:
                self.error(f"{flag}: {self.answers[flag]}")
            found[n] = f"{self.renamed.get(flag, flag)}{equals}{value}"
        return found

    def error(self, message: str) -> NoReturn:
        if message.startswith(_UNKNOWN):
            flags = _FLAG.findall(message)
            near = [found for flag in flags if (found := self._nearest(flag))]
            message += f"; did you mean {' and '.join(near)}?" if near else ""
        super().error(message)

    def _nearest(self, flag: str) -> str | None:
        """The flag that is spelt most like an unknown one. Returns None if no flag is near.

        Dashes do not count: every flag has them, so they would make short flags look alike."""
        by_name = {each.strip("-"): each for each in self.flags}
        near = difflib.get_close_matches(flag.strip("-"), by_name, 1)
        return by_name[near[0]] if near else None


class _ActionParser(CommandParser):
    """Parser of one action of a command. It refuses what it does not know itself, since it knows the nearest flag."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(_UNKNOWN + " ".join(unknown))
        return found, unknown
