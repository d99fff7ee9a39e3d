"""What a line has said so far, for those who watch it run: on disk before anybody is shown it.

A running attempt adds a part every moment. Whatever dies, the next attempt takes the parts up and goes on behind their
last token, so that nothing anybody has seen is ever taken back. Parts are bodies of the line, gone when it goes.
"""

from collections.abc import Sequence

import msgspec

from emberline.jobs.line import Lease
from emberline.protocol.events import (
    ChoiceDone,
    FinishReason,
    ReasoningDelta,
    TextDelta,
    TokenDelta,
    TokenLogprobs,
    ToolCallDelta,
    ToolCallStarted,
)
from emberline.store import Database, Sql, Step, Work

Piece = TextDelta | ReasoningDelta | ToolCallStarted | ToolCallDelta | ChoiceDone
_KINDS: tuple[type[Piece], ...] = (TextDelta, ReasoningDelta, ToolCallStarted, ToolCallDelta, ChoiceDone)

_FIRST = 2  # kinds of bodies from here on are parts, in order
_HELD = "SELECT 1 FROM lines WHERE batch_id = ? AND number = ? AND epoch = ? AND owner = ? AND state = 'leased'"
# Whoever claims the line anew waits for us, and then finds this part too.
_HELD_BY_US = Sql(_HELD, postgres=f"{_HELD} FOR SHARE")
_ADD = """
    INSERT INTO bodies (batch_id, number, kind, data, blob) VALUES (?, ?, ?, ?, NULL)
    ON CONFLICT (batch_id, number, kind) DO UPDATE SET data = bodies.data RETURNING data
"""
_AFTER = f"SELECT data FROM bodies WHERE batch_id = ? AND number = ? AND kind >= {_FIRST} + ? ORDER BY kind"


class Part(msgspec.Struct, array_like=True):
    """What some tokens said. The tokens are kept too: they are where another attempt goes on."""

    pieces: list[Piece] = []
    token_ids: bytes = b""  # u32 little-endian
    logprobs: list[TokenLogprobs] | None = None
    finish: FinishReason | None = None  # set: the engine was done with these


class _Stored(msgspec.Struct, array_like=True):
    pieces: list[tuple[int, msgspec.Raw]]  # each with its place among the kinds
    token_ids: bytes
    logprobs: list[TokenLogprobs] | None
    finish: FinishReason | None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Stored)
_piece_decoders = [msgspec.msgpack.Decoder(kind) for kind in _KINDS]


class Transcripts:
    def __init__(self, store: Database) -> None:
        self._store = store

    async def add(self, lease: Lease, place: int, part: Part) -> bool:
        """The next part. False: the line is no longer the caller's, and nothing was written."""
        row = (*lease.key, _FIRST + place, _encode(part))

        def work() -> Work[bool]:
            if not (yield Step(_HELD_BY_US, (*lease.key, lease.epoch, lease.owner))):
                return False
            ((kept,),) = yield Step(_ADD, row)  # what was there before, where an answer of the store was lost
            return kept == row[-1]

        added = await self._store.run(work)
        await self._store.notify("batches", lease.batch_id)
        return added

    async def read(self, batch_id: str, number: int, after: int = 0) -> list[Part]:
        """All parts but the first `after`."""
        rows = await self._store.read(_AFTER, (batch_id, number, after))
        return [_decode(data) for (data,) in rows if isinstance(data, bytes)]


def so_far(parts: Sequence[Part], request_id: str) -> TokenDelta | None:
    """All tokens of the parts, as if an engine had given them at once."""
    if not parts:
        return None
    logprobs = [entry for part in parts for entry in part.logprobs or ()]
    ids = b"".join(part.token_ids for part in parts)
    return TokenDelta(request_id, ids, parts[-1].finish, None, logprobs or None)


def _encode(part: Part) -> bytes:
    told = [(_KINDS.index(type(piece)), piece) for piece in part.pieces]
    return _encoder.encode((told, part.token_ids, part.logprobs, part.finish))


def _decode(data: bytes) -> Part:
    stored = _decoder.decode(data)
    pieces = [_piece_decoders[kind].decode(raw) for kind, raw in stored.pieces]
    return Part(pieces, stored.token_ids, stored.logprobs, stored.finish)
