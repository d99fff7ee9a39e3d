"""The frames between a door process and the core: calls with a number, answers with the same number."""

import msgspec

from emberline.balancer.route_request import Route, RouteRequest
from emberline.protocol.answer import StoredResponse
from emberline.protocol.errors import ErrorInfo
from emberline.protocol.frames import EngineLoad
from emberline.service.core import Settlement
from emberline.service.health import Health
from emberline.text.prompt import Known


class Find(msgspec.Struct, tag="find"):
    seq: int
    account: str
    model_version: str
    digests: list[bytes]


class Admit(msgspec.Struct, tag="admit"):
    seq: int
    ask: RouteRequest


class Settle(msgspec.Struct, tag="settle"):
    seq: int
    settlement: Settlement


class Keep(msgspec.Struct, tag="keep"):
    seq: int
    record: StoredResponse


class Recall(msgspec.Struct, tag="recall"):
    seq: int
    account: str
    response_id: str
    whole: bool


class Forget(msgspec.Struct, tag="forget"):
    seq: int
    account: str
    response_id: str


class AskHealth(msgspec.Struct, tag="health"):
    seq: int


class AskMetrics(msgspec.Struct, tag="metrics"):
    seq: int


class Seen(msgspec.Struct, array_like=True):
    """An engine as a door sees it on its own connection."""

    name: str
    load: EngineLoad
    age_s: float  # of the last step


class Notice(msgspec.Struct, tag="notice"):
    """What a door tells by itself, about once a second; not answered."""

    seen: list[Seen]
    refused: dict[str, int]


class Began(msgspec.Struct, tag="began"):
    """The first token of a request is there; not answered."""

    request_id: str
    cached_tokens: int


class Answer(msgspec.Struct, omit_defaults=True):
    """The result of a call, in the field its kind uses, or an error. All empty: done, or nothing found."""

    seq: int
    error: ErrorInfo | None = None
    known: Known | None = None
    route: Route | None = None
    health: Health | None = None
    metrics: bytes = b""
    records: list[StoredResponse] = []
    done: bool = False  # of keep and forget


Call = Find | Admit | Settle | Keep | Recall | Forget | AskHealth | AskMetrics
to_core_decoder = msgspec.msgpack.Decoder(Call | Notice | Began)
from_core_decoder = msgspec.msgpack.Decoder(Answer)
