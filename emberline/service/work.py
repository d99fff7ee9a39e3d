"""One request on its way through the pipeline: the task, who asked for it, the rules around it, and how it ended."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import msgspec

from emberline.catalog.model_card import ModelCard
from emberline.protocol.events import Completed, TextEvent
from emberline.protocol.media import MediaRequest
from emberline.protocol.provider import OwnKey
from emberline.protocol.rate_limits import RateLimits
from emberline.protocol.request import EncodeRequest, GenerateRequest, PredictRequest, Principal, SpeechRequest
from emberline.service.request_run import RequestRun, Transport
from emberline.telemetry.request_log import ONLY_ATTEMPT, AttemptContext, JobContext
from emberline.upstream.target import Target
from emberline.upstream.upstream_request import UpstreamRequest

# Output of a task: text events, or the bytes of a relayed reply. The last item is always Completed; it has the result
# of a task whose result comes whole, and the last bytes of a relayed reply.
TaskEvents = AsyncGenerator[Any, None]
Tap = Callable[[TextEvent], Awaitable[Sequence[TextEvent]]]  # returns the events to hand out now


class RelayRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A body that an upstream server takes as it came, and whose reply goes to the client as it comes.

    `make` writes the request for a target and an id, and refuses what the target's server must not be sent.
    `canonical` reads the body as a canonical request, from which the pipeline makes prefix keys over token ids if the
    tokenizer of the server is here.
    """

    id: str
    model: str
    make: Callable[[Target, str], UpstreamRequest]
    stream: bool
    canonical: Callable[[], GenerateRequest] | None = None
    session: str | None = None
    api: str = ""


Task = GenerateRequest | EncodeRequest | SpeechRequest | MediaRequest | PredictRequest | RelayRequest


class Begun(NamedTuple):
    """An admitted attempt that has begun to answer."""

    run: RequestRun[Any]
    transport: Transport[Any]
    output: Any  # the first
    result: Callable[[], Any]  # called once, after the last output


Start = Callable[[ModelCard, AttemptContext], Awaitable[Begun]]


class Stage(Protocol):
    """A rule around one request. It is called twice, and sees events only if it adds a tap."""

    async def begin(self, work: "Work") -> None:
        """Refuse the request by raising, answer it by `replay`, watch it by a tap, choose models by `attempts`."""

    def end(self, work: "Work", error: BaseException | None) -> BaseException | None:
        """Handle the end of the request, however it ended. Returns the error for the caller."""


@dataclass(slots=True)
class Work:
    """A request for the pipeline. Its caller sets the first fields, its stages and the pipeline the others."""

    task: Task
    principal: Principal
    job: JobContext | None = None
    card: ModelCard | None = None  # the task's model; None: its name was not looked up yet
    target: Target | None = None  # the card's, if the caller had to make it; None: the pipeline makes it
    own_key: OwnKey | None = None  # a provider's key that the client sent along
    wants_cost: bool = False  # the usage of the terminal event states the cost
    attempt: AttemptContext = ONLY_ATTEMPT  # the only one, if no stage chooses models
    stages: Sequence[Stage] = ()

    attempts: Callable[[Start], Awaitable[Begun]] | None = None  # tries models until one begins to answer
    taps: list[Tap] = field(default_factory=list)  # each gets what the one before has let through
    replay: Sequence[TextEvent] | None = None  # the events of a known answer: nothing is computed
    admitted_ns: int = 0  # monotonic, of the last attempt that was admitted; 0: none has counted for the limits yet
    rate_limits: RateLimits | None = None  # of the caller, once an attempt was admitted
    ignores_reasoning: bool = False  # it asked for reasoning, and the model of the last attempt does not reason
    completed: Completed | None = None  # once the usage row is durable
    is_done: bool = False  # the terminal event was handed out

    @property
    def was_admitted(self) -> bool:
        return self.admitted_ns > 0


class TaskRunner(Protocol):
    """The pipeline, as those use it who have tasks: APIs, jobs, moderation."""

    def run(self, work: Work) -> TaskEvents:
        """Run a task to its end: finished, failed, or cancelled by `aclose`. A refusal raises before the first item."""
