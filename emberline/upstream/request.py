"""A request on its way to one of other people's servers."""

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from emberline.catalog.model_card import ModelCard
from emberline.protocol.request import Principal, Priority
from emberline.service.job_context import JobContext
from emberline.service.request_log import Clock

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@dataclass(slots=True)
class UpstreamRequest:
    id: str
    card: ModelCard
    principal: Principal
    path: str  # CHAT or COMPLETIONS
    fields: dict[str, Any]  # the body; large values are `msgspec.Raw`
    keys: bytes  # content keys of the prompt
    input_tokens: int  # an estimate until the server says
    stream: bool = True
    hides_usage: bool = False  # the client has not asked for what we need
    n: int = 1
    max_tokens: int = 0
    priority: Priority = Priority.DEFAULT
    session: str | None = None
    reject_if_busy: bool = False
    deadline_s: float | None = None
    job: JobContext | None = None
    clock: Clock = field(default_factory=Clock)


CHUNK_BYTES = 512
BYTES_PER_TOKEN = 4
KEYS_PER_CHUNK = CHUNK_BYTES // (16 * BYTES_PER_TOKEN)
_STEM_BYTES = 15
_NUMBERS = [bytes([number]) for number in range(KEYS_PER_CHUNK)]


def byte_keys(model: str, salt: bytes, *parts: bytes) -> bytes:
    """Equal up to where the parts' bytes are equal; another model's or tenant's are never equal."""
    chain = blake2b(b"%d/%s%s" % (len(salt), salt, model.encode()), person=b"emberline.bytes").digest()
    text = b"".join(parts)
    keys: list[bytes] = []
    for start in range(0, len(text) - CHUNK_BYTES + 1, CHUNK_BYTES):
        chain = blake2b(text[start : start + CHUNK_BYTES], key=chain, digest_size=_STEM_BYTES).digest()
        keys += [chain + number for number in _NUMBERS]
    return b"".join(keys)


def estimated_tokens(n_bytes: int) -> int:
    return max(1, n_bytes // BYTES_PER_TOKEN)
