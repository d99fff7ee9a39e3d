"""`context` of `/api/generate`: the token ids of a conversation, which its client sends back with the next prompt.

The first number is not a token: it names the model whose ids follow. It is beyond every vocabulary, and fits into the
signed 32 bits that some clients have for it.
"""

from collections.abc import Sequence
from zlib import crc32

from emberline.catalog.model_card import ModelCard
from emberline.protocol.errors import BadInput
from emberline.protocol.token_ids import pack, unpack

_NOT_A_TOKEN = 1 << 30


def encode_context(card: ModelCard, ids: bytes) -> list[int]:
    """The `context` of a reply; `ids` are those of prompt and reply."""
    return [_mark(card), *unpack(ids)]


def decode_context(card: ModelCard, context: Sequence[int]) -> bytes:
    """Token ids of the `context` of an earlier reply. Raises BadInput if another model has made it."""
    mark, *ids = context
    if mark != _mark(card) or any(not 0 <= token_id < _NOT_A_TOKEN for token_id in ids):
        raise BadInput(
            f"`context` is not of {card.id}: send back the one of its last reply, or leave it out", param="context"
        )
    return pack(ids)


def _mark(card: ModelCard) -> int:
    return _NOT_A_TOKEN | crc32(f"{card.id}\0{card.fingerprint}".encode()) & (_NOT_A_TOKEN - 1)
