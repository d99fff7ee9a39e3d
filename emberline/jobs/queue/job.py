"""A line of a batch: one request, its state, and the lease under which a worker runs it."""

from hashlib import blake2b
from typing import Literal

import msgspec

from emberline.accounts.usage_ledger import UsageRow
from emberline.protocol.answer import Answer
from emberline.protocol.errors import ErrorInfo
from emberline.protocol.request import GenerateRequest

JobState = Literal["held", "queued", "leased", "succeeded", "failed", "cancelled", "expired", "dead"]
ENDED = ("succeeded", "failed", "cancelled", "expired", "dead")
JobKey = tuple[str, int]  # batch id, number

_PREFIX_CHARS = 1024
_USUAL_TOKENS = 256  # of a reply whose length nobody bounds, for the estimate of its cost


class NewJob(msgspec.Struct):
    custom_id: str
    request: GenerateRequest | None
    error: ErrorInfo | None = None  # a line that cannot run: it ends at once, failed, and the rest goes on
    prefix: int = 0  # lines with the same are run together; 0: from the beginning of the prompt


class Job(msgspec.Struct, kw_only=True):
    batch_id: str
    number: int
    custom_id: str
    model: str
    state: JobState
    epoch: int
    owner: str
    attempts: int
    kills: int
    created_us: int
    started_us: int | None
    ended_us: int | None
    answer: Answer | None = None  # of one that succeeded
    error: ErrorInfo | None = None  # of one that ended otherwise

    @property
    def request_id(self) -> str:
        return request_id(self.batch_id, self.number)


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """The right to run a line until the worker's heartbeats stop. `epoch` fences: an older lease can write nothing."""

    batch_id: str
    number: int
    epoch: int
    owner: str
    account: str
    key_id: str
    kind: str
    model: str
    deadline_us: int
    attempts: int  # this one included
    kills: int
    prefix: int
    cost: int
    request: GenerateRequest
    alone: bool = False  # workers died under it: nothing else of the queue runs beside it

    @property
    def key(self) -> JobKey:
        return self.batch_id, self.number

    @property
    def request_id(self) -> str:
        return request_id(self.batch_id, self.number)


class HeartbeatReply(msgspec.Struct, frozen=True):
    """What a heartbeat brings back about the lines that the worker runs."""

    cancelled: frozenset[JobKey] = frozenset()  # abort, then say `cancelled`
    lost: frozenset[JobKey] = frozenset()  # no longer the worker's: abort, say nothing


class JobOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What is to become of a leased line, if it is still leased under this epoch."""

    key: JobKey
    epoch: int
    owner: str
    state: JobState
    ready_us: int = 0
    attempts: int = 0  # added
    kills: int = 0  # added
    data: bytes | None = None  # the result, or
    blob: str | None = None  # its name
    n_bytes: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    usage: UsageRow | None = None


def request_id(batch_id: str, number: int) -> str:
    """The same at every attempt, so that there is one usage row."""
    return f"{batch_id}-{number}"


def prefix_of(request: GenerateRequest) -> int:
    """A number that requests share whose prompts begin alike; signed, 64 bits."""
    if request.messages:
        head = request.messages[0].content[:_PREFIX_CHARS].encode()
    elif request.prompt is not None:
        head = request.prompt[:_PREFIX_CHARS].encode()
    else:
        head = (request.prompt_ids or b"")[:_PREFIX_CHARS]
    return int.from_bytes(blake2b(head, digest_size=8).digest(), "little", signed=True)


def cost_of(request: GenerateRequest, n_bytes: int) -> int:
    """A guess at its tokens, charged to the account until the true number is known."""
    return n_bytes // 4 + request.n * (request.sampling.max_tokens or _USUAL_TOKENS)
