"""A custom tool's plain text, read out of the JSON that the model writes it in, as it is written."""

import re

from emberline.api.openai_responses_items import CUSTOM_ARGUMENT

_OPENING = re.compile(rf'\s*\{{\s*"{CUSTOM_ARGUMENT}"\s*:\s*"')
_PLAIN = re.compile(r'[^"\\]+')
_UNIT = re.compile(r"\\u([0-9A-Fa-f]{4})")
_SHORT = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


class ArgumentText:
    """Fed with the arguments' pieces, gives the string inside them piece by piece."""

    def __init__(self) -> None:
        self._rest = ""  # not understood yet: the opening, or an escape that is cut
        self._inside = False
        self._ended = False

    def push(self, piece: str) -> str:
        rest = self._rest + piece
        if not self._inside:
            opening = _OPENING.match(rest)
            if opening is None:
                self._rest = rest
                return ""
            self._inside, rest = True, rest[opening.end() :]
        texts: list[str] = []
        at = 0
        while at < len(rest) and not self._ended:
            if plain := _PLAIN.match(rest, at):
                texts.append(plain[0])
                at = plain.end()
            elif rest[at] == '"':
                self._ended = True
            elif (escape := _escape(rest, at)) is not None:
                texts.append(escape[0])
                at = escape[1]
            else:
                break
        self._rest = rest[at:]
        return "".join(texts)


def _escape(text: str, at: int) -> tuple[str, int] | None:
    """The character that the escape at `at` stands for and where it ends; None: more is to come."""
    kind = text[at + 1 : at + 2]
    if kind in _SHORT:
        return _SHORT[kind], at + 2
    unit = _unit(text, at)
    if unit is None:
        return None
    if not 0xD800 <= unit < 0xDC00:
        return chr(unit if not 0xDC00 <= unit < 0xE000 else 0xFFFD), at + 6
    if len(text) < at + 8 and "\\u".startswith(text[at + 6 :]):
        return None
    low = _unit(text, at + 6)
    if low is None:
        return None if text.startswith("\\u", at + 6) else ("\ufffd", at + 6)
    if not 0xDC00 <= low < 0xE000:
        return "\ufffd", at + 6
    return chr(0x10000 + ((unit - 0xD800) << 10) + (low - 0xDC00)), at + 12


def _unit(text: str, at: int) -> int | None:
    """The number of the \\uXXXX at `at`; None: it is not whole, or none."""
    found = _UNIT.match(text, at)
    return int(found[1], 16) if found else None
