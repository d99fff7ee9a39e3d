"""Token ids to text, as they come: what is not yet a whole character is held back."""

from codecs import getincrementaldecoder
from collections.abc import Iterable, Mapping, Sequence

_Utf8 = getincrementaldecoder("utf-8")


class Detokenizer:
    """One reply's. Bytes that can never become a character come out as U+FFFD.

    `strip_space`: the tokenizer puts a space of its own at the beginning of text like this; it is not the text's.
    """

    __slots__ = ("_decode", "_strip_space", "_token_bytes")

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
        """What was held back, now that nothing follows."""
        return self._decode(b"", True)


class StopMatcher:
    """Emits text up to the first stop string to be complete; holds back what may still become one.

    Which stop string ends the text does not depend on how the text was cut into pieces: the one that is complete
    first, and of several complete at the same character the longest.
    """

    __slots__ = ("_held", "_last_chars", "_prefixes", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        prefixes = {stop[:n] for stop in self._stops for n in range(1, len(stop))}
        self._prefixes = sorted(prefixes, key=len, reverse=True)
        self._last_chars = frozenset(prefix[-1] for prefix in prefixes)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that may go out, and the stop string that ended it, if one did. Nothing is pushed after that."""
        if not self._stops:
            return text, None
        text = self._held + text
        self._held = ""
        ends = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            _, at, stop = min(ends)
            return text[:at], stop
        if text and text[-1] in self._last_chars:
            for prefix in self._prefixes:
                if text.endswith(prefix):
                    self._held = prefix
                    return text[: -len(prefix)], None
        return text, None

    def finish(self) -> str:
        """What was held back, now that nothing follows."""
        held, self._held = self._held, ""
        return held
