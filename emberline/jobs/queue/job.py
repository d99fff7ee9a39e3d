"""A job: one request of a batch, its state, and the lease under which a worker runs it. The tables call it a line."""

from hashlib import blake2b
from typing import Literal

import msgspec

from emberline.accounts.usage_row import UsageRow
from emberline.protocol.complete_response import Answer
from emberline.protocol.errors import ErrorInfo
from emberline.protocol.request import GenerateRequest

JobState = Literal["held", "queued", "leased", "succeeded", "failed", "cancelled", "expired", "dead"]
JobKey = tuple[str, int]  # batch id, number

_PREFIX_CHARS = 1024
_DEFAULT_OUTPUT_TOKENS = 256  # assumed for the estimated cost where max_tokens is not set


class NewJob(msgspec.Struct):
    custom_id: str
    request: GenerateRequest | None
    error: ErrorInfo | None = None  # the request is invalid: the job fails at once, the others run
    prefix: int = 0  # jobs with the same number run together; 0: a hash of the prompt's start


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
    answer: Answer | None = None  # if it succeeded
    error: ErrorInfo | None = None  # if it ended otherwise

    @property
    def request_id(self) -> str:
        return request_id(self.batch_id, self.number)


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """The right to run a job while the worker sends heartbeats. `epoch` is the fencing token."""

    batch_id: str
    number: int
    epoch: int
    owner: str
    account: str
    key_id: str
    kind: str
    model: str
    deadline_us: int
    created_us: int = 0
    attempts: int  # including this one
    kills: int
    prefix: int
    traceparent: str = ""  # of the request that submitted the batch
    request: GenerateRequest

    @property
    def key(self) -> JobKey:
        return self.batch_id, self.number

    @property
    def request_id(self) -> str:
        return request_id(self.batch_id, self.number)


class HeartbeatReply(msgspec.Struct, frozen=True):
    """The worker's jobs that must be aborted."""

    stopped: frozenset[JobKey] = frozenset()  # cancelled or expired: abort, then call `finish_stopped`
    lost: frozenset[JobKey] = frozenset()  # leased to another worker now: abort without writing anything


class JobOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The state that a leased job gets if it is still leased under this epoch."""

    key: JobKey
    epoch: int
    owner: str
    state: JobState
    ready_us: int = 0
    attempts: int = 0  # added
    kills: int = 0  # added
    data: bytes | None = None  # the encoded result, or
    blob: str | None = None  # the name of its blob
    n_bytes: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    usage: UsageRow | None = None


def request_id(batch_id: str, number: int) -> str:
    """The same for every attempt, so that there is one usage row."""
    return f"{batch_id}-{number}"


def prefix_of(request: GenerateRequest) -> int:
    """A signed 64-bit hash of the prompt's start."""
    if request.messages:
        start = request.messages[0].content[:_PREFIX_CHARS].encode()
    elif request.prompt is not None:
        start = request.prompt[:_PREFIX_CHARS].encode()
    else:
        start = (request.prompt_ids or b"")[:_PREFIX_CHARS]
    return int.from_bytes(blake2b(start, digest_size=8).digest(), "little", signed=True)


def estimate_cost(request: GenerateRequest, n_bytes: int) -> int:
    """Estimated tokens, charged to the account in fair queueing until the real number is known."""
    if request.encode is not None or request.predict is not None:
        return n_bytes // 4
    return n_bytes // 4 + request.n * (request.sampling.max_tokens or _DEFAULT_OUTPUT_TOKENS)
