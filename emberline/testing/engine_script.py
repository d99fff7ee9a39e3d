"""What a stand-in engine says to a request, how fast, and how it fails.

A script is written `key=value,key=value`: as `--script` for every request, and after the marker `standin:` in a
request's session for that request, on top of the former. For example `standin:say=count,ttft_ms=50,die_after=3`.
What a model would say in its own tokens, tool calls too, is written as their ids; several replies, one for each request
of a session in turn, with slashes between them: `standin:say=17.4.9/8.2`.
"""

import msgspec

from emberline.protocol.errors import BadInput
from emberline.protocol.request import EngineRequest
from emberline.protocol.token_ids import unpack

MARKER = "standin:"


class Script(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`..._after` counts tokens of the request that went out before the fault; -1 is never."""

    say: str = "echo"  # "echo" (the prompt without end tokens, then one), "count" (0, 1, 2, ...), or ids: "17.4/9.1"
    ttft_ms: float = 0.0  # a step with a first token takes this long,
    itl_ms: float = 0.0  # any other step this long
    chunk_ms: float = 0.0  # and one that computes a prompt without drawing, this long
    die_at: int = -1  # the process ends when so many tokens of the prompt are computed
    error_after: int = -1  # the request fails, as if its logits were not numbers
    drop_after: int = -1  # the connection is closed
    hang_after: int = -1  # the process stops answering
    die_after: int = -1  # the process ends at once
    refuse: bool = False  # the request is not accepted: Overloaded

    def __post_init__(self) -> None:
        if self.say not in ("echo", "count"):
            _turns(self.say)  # a ValueError otherwise

    @property
    def has_turns(self) -> bool:
        return "/" in self.say

    def words(self, prompt_ids: bytes, eos_ids: tuple[int, ...], turn: int = 0) -> list[int]:
        """What is said before the end token; nothing for a script that counts. The last turn is said over and over."""
        if self.say == "count":
            return []
        if self.say == "echo":
            return [token for token in unpack(prompt_ids) if token not in eos_ids]
        turns = _turns(self.say)
        return turns[min(turn, len(turns) - 1)]


def countable(n: int, vocab_size: int, eos_ids: tuple[int, ...]) -> int:
    """The n-th id that is not an end token, over and over."""
    token = n % max(1, vocab_size - len(eos_ids))
    for eos_id in sorted(eos_ids):
        token += token >= eos_id
    return token


def _turns(text: str) -> list[list[int]]:
    return [[int(part) for part in turn.split(".")] for turn in text.split("/")]


def parse(text: str, base: Script | None = None) -> Script:
    """The script that `text` describes on top of `base`; BadInput names what is wrong with it."""
    fields = dict(part.partition("=")[::2] for part in text.split(",") if part)
    try:
        return msgspec.convert({**msgspec.to_builtins(base or Script()), **fields}, Script, strict=False)
    except msgspec.ValidationError as error:
        raise BadInput(f"not a script: {text!r}: {error}", param="session") from None


def of_request(request: EngineRequest, base: Script) -> Script:
    _, marker, text = (request.session or "").partition(MARKER)
    return parse(text, base) if marker else base
