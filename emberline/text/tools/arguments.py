"""Where a call's arguments end: at the brace that closes the one they began with."""

import re

_OUTSIDE = re.compile(r'["{}\ud800-\udfff]')
_INSIDE = re.compile(r'["\\\ud800-\udfff]')


class ArgumentScanner:
    """Reads a JSON object piece by piece. A sign (a lone surrogate: a special token) ends it wherever it stands."""

    __slots__ = ("_depth", "_escaped", "_in_string")

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def push(self, text: str) -> int | None:
        """Where in the text the object ends; None: beyond it."""
        at = 0
        if self._escaped and text:
            self._escaped = False
            at = 0 if "\ud800" <= text[0] <= "\udfff" else 1
        while (found := (_INSIDE if self._in_string else _OUTSIDE).search(text, at)) is not None:
            at = found.end()
            char = found[0]
            if char == '"':
                self._in_string = not self._in_string
            elif char == "\\":
                if at == len(text):
                    self._escaped = True
                    return None
                at += not "\ud800" <= text[at] <= "\udfff"
            elif char == "{":
                self._depth += 1
            elif char == "}":
                self._depth -= 1
                if self._depth == 0:
                    return at
            else:
                return found.start()
        return None
