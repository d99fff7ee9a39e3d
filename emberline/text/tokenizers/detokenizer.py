"""Incremental detokenizing and stop strings: text is emitted as soon as it is certain."""

import re
from codecs import getincrementaldecoder
from collections.abc import Iterable, Mapping, Sequence

_Utf8 = getincrementaldecoder("utf-8")


class Detokenizer:
    """Detokenizer of one reply. It holds back incomplete characters; bytes that can never become a character become
    U+FFFD.

    `strip_space`: the tokenizer itself prepends a space to such text, which the detokenizer removes again.
    """

    def __init__(self, token_bytes: Mapping[int, bytes], *, strip_space: bool = False) -> None:
        self._token_bytes = token_bytes
        self._decode = _Utf8("replace").decode
        self._strip_space = strip_space

    def push(self, ids: Iterable[int]) -> str:
        token_bytes = self._token_bytes
        data = b"".join([token_bytes[token_id] for token_id in ids])
        if self._strip_space and data:
            self._strip_space = False
            data = data.removeprefix(b" ")
        return self._decode(data)

    def finish(self) -> str:
        """The rest that was held back."""
        return self._decode(b"", True)


class MarkerFinder:
    """Finds some strings in text that arrives in pieces."""

    def __init__(self, markers: Sequence[str]) -> None:
        self._pattern = re.compile("|".join(map(re.escape, markers)) or r"(?!)")
        prefixes = {marker[:n] for marker in markers for n in range(1, len(marker))}
        self._prefixes = sorted(prefixes, key=len, reverse=True)
        self._last_chars = frozenset(prefix[-1] for prefix in prefixes)

    def find(self, text: str) -> re.Match[str] | None:
        return self._pattern.search(text)

    def n_undecided(self, text: str) -> int:
        """Count the last characters that may be the beginning of a marker."""
        if not text or text[-1] not in self._last_chars:
            return 0
        return next((len(prefix) for prefix in self._prefixes if text.endswith(prefix)), 0)


class StopMatcher:
    """Emits text up to the first complete stop string; holds back what may still become one.

    Which stop string ends the text does not depend on how the text is split into pieces: the one that is complete
    first, and of several that are complete at the same character the longest.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._n_undecided = MarkerFinder(self._stops).n_undecided
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """The text to emit, and the stop string that ended it, if any. Nothing may be pushed after that."""
        if not self._stops:
            return text, None
        text = self._held + text
        self._held = ""
        ends = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            _, at, stop = min(ends)
            return text[:at], stop
        if n := self._n_undecided(text):
            self._held = text[-n:]
            return text[:-n], None
        return text, None

    def finish(self) -> str:
        """The rest that was held back."""
        held, self._held = self._held, ""
        return held
