"""How one family of models writes tool calls, as data: the prompt, the grammar and the reply's automaton read it."""

import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from string import ascii_letters, digits
from typing import Literal

import msgspec

from emberline.protocol.request import ToolCall

MISTRAL_ID = re.compile(r"[a-zA-Z0-9]{9}")
_BASE62 = digits + ascii_letters
_FIRST_SIGN = 0xD800  # lone surrogates: decoded text never has one

IdStyle = Literal["call", "mistral", "kimi"]


class ToolForm(msgspec.Struct, frozen=True, kw_only=True):
    """A reply's calls are `begin`, calls with `between` between them, `close`. A call is `call`, `prefix`, the name,
    `number` and which call it is where there is one, `arguments`, the arguments, `end`."""

    family: str
    begin: str = ""
    call: str
    prefix: str = ""
    number: str = ""
    arguments: str
    end: str
    between: str = ""
    close: str = ""
    openings: tuple[str, ...]  # what text may contain only as the beginning of calls
    alone: bool = False  # calls are all of a reply: text has none behind it
    parallel: bool = True  # several calls in a reply
    ids: IdStyle = "call"
    marks: tuple[str, ...] = ()  # strings that are special tokens where the tokenizer has them so
    tokens: dict[str, int] = {}  # those marks that are, in this tokenizer
    own: bool = False  # the template knows nothing of it: tools, calls and results are written by us

    def at(self, special: Mapping[str, int]) -> "ToolForm":
        """The form in a tokenizer that has these special tokens."""
        tokens = {mark: special[mark] for mark in self.marks if mark in special}
        return msgspec.structs.replace(self, tokens=tokens)

    def write(self, calls: Sequence[ToolCall]) -> str:
        """The calls as the model would have written them."""
        texts = [
            f"{self.call}{self.prefix}{call.name}{self.number}{number if self.number else ''}"
            f"{self.arguments}{call.arguments}{self.end}"
            for number, call in enumerate(calls)
        ]
        return self.begin + self.between.join(texts) + self.close

    def call_id(self, origin: str, name: str, number: str) -> str:
        """The id of a call. `origin` says which request's, choice's and call it is; the model wrote `number`."""
        if self.ids == "kimi":
            return f"{self.prefix}{name}{self.number}{number}"
        digest = blake2b(origin.encode("utf-8", "surrogatepass"), digest_size=12)
        return f"call_{digest.hexdigest()}" if self.ids == "call" else _base62(digest.digest())


def signs(tokens: Mapping[str, int]) -> dict[str, str]:
    """A character for each mark that is a special token. Replies are read as text in which these stand for tokens, so
    that the same string written out in ordinary tokens is not mistaken for one."""
    return {mark: chr(_FIRST_SIGN + n) for n, mark in enumerate(sorted(tokens, key=len, reverse=True))}


def signed(text: str, signs_of: Mapping[str, str]) -> str:
    for mark, sign in signs_of.items():
        text = text.replace(mark, sign)
    return text


def split_tokens(text: str, tokens: Mapping[str, int]) -> list[str | int]:
    """The text with its special tokens as ids."""
    if not tokens:
        return [text] if text else []
    pattern = "|".join(re.escape(mark) for mark in sorted(tokens, key=len, reverse=True))
    return [tokens.get(piece, piece) for piece in re.split(f"({pattern})", text) if piece]


def family_ids(style: IdStyle, calls: Sequence[ToolCall]) -> dict[str, str]:
    """What a family's templates insist on, for the ids of a conversation's calls; the same every turn."""
    if style == "mistral":
        return {call.id: _mistral_id(call.id) for call in calls}
    if style == "kimi":
        return {call.id: _kimi_id(call, number) for number, call in enumerate(calls)}
    return {}


def _mistral_id(call_id: str) -> str:
    if MISTRAL_ID.fullmatch(call_id):
        return call_id
    return _base62(blake2b(call_id.encode("utf-8", "surrogatepass"), digest_size=12).digest())


def _kimi_id(call: ToolCall, number: int) -> str:
    known = re.fullmatch(r"functions\.[\w.-]+:\d+", call.id)
    return call.id if known else f"functions.{call.name}:{number}"


def _base62(data: bytes) -> str:
    value = int.from_bytes(data, "little")
    return "".join(_BASE62[value // 62**place % 62] for place in range(9))
