"""Token ids to text, as they come: what is not yet a whole character is held back."""

from codecs import getincrementaldecoder
from collections.abc import Iterable, Mapping

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
