"""Scripts of the stand-in engine: which tokens it generates, with what latency, and how it fails.

A script is written `key=value,key=value`: as `--script` for every request, and after the marker `standin:` in the
session of a request to override it for that request, e.g. `standin:say=count,ttft_ms=50,die_after=3`. Token ids are
separated by dots; the replies to successive requests of a session by slashes: `standin:say=17.4.9/8.2`.
"""

import msgspec

from emberline.protocol.errors import BadInput
from emberline.protocol.request import EngineRequest
from emberline.protocol.token_ids import unpack

MARKER = "standin:"


class EngineScript(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`…_after` counts output tokens of the request before the fault; -1 is never."""

    say: str = "echo"  # "echo" (the prompt, then EOS), "count" (0, 1, 2, …), or token ids: "17.4/9.1"
    ttft_ms: float = 0.0  # duration of a step with a first token,
    itl_ms: float = 0.0  # of any other step,
    chunk_ms: float = 0.0  # and of one that only prefills
    die_at: int = -1  # the process exits once so many prompt tokens are computed
    error_after: int = -1  # the request fails, as with NaN logits
    drop_after: int = -1  # the connection is closed
    hang_after: int = -1  # the process stops answering
    die_after: int = -1  # the process exits
    refuse: bool = False  # the request is rejected as Overloaded

    def __post_init__(self) -> None:
        if self.say not in ("echo", "count"):
            _turns(self.say)  # a ValueError otherwise

    @property
    def has_turns(self) -> bool:
        return "/" in self.say

    def output(self, prompt_ids: bytes, eos_ids: tuple[int, ...], turn: int = 0) -> list[int]:
        """Token ids before EOS; none for "count". The last turn repeats."""
        if self.say == "count":
            return []
        if self.say == "echo":
            return [token for token in unpack(prompt_ids) if token not in eos_ids]
        turns = _turns(self.say)
        return turns[min(turn, len(turns) - 1)]


def counting_token(n: int, vocab_size: int, eos_ids: tuple[int, ...]) -> int:
    """The n-th token id that is not EOS, modulo the vocabulary."""
    token = n % max(1, vocab_size - len(eos_ids))
    for eos_id in sorted(eos_ids):
        token += token >= eos_id
    return token


def _turns(text: str) -> list[list[int]]:
    return [[int(part) for part in turn.split(".")] for turn in text.split("/")]


def parse(text: str, base: EngineScript | None = None) -> EngineScript:
    """The script that `text` describes, based on `base`; BadInput if it is invalid."""
    fields = dict(part.partition("=")[::2] for part in text.split(",") if part)
    try:
        return msgspec.convert({**msgspec.to_builtins(base or EngineScript()), **fields}, EngineScript, strict=False)
    except msgspec.ValidationError as error:
        raise BadInput(f"not a script: {text!r}: {error}", param="session") from None


def of_request(request: EngineRequest, base: EngineScript) -> EngineScript:
    """The script of a request: `base`, overridden by its session."""
    _, marker, text = (request.session or "").partition(MARKER)
    return parse(text, base) if marker else base
