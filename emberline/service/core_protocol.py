"""The frames between an HTTP worker and the core: numbered calls, and replies with the same number."""

from typing import Any, Literal

import msgspec

from emberline.accounts.usage_row import UsageRow
from emberline.balancer.route_request import Route, RouteRequest
from emberline.catalog.aliases import AliasTable
from emberline.cluster.cluster import ClusterStatus
from emberline.cluster.membership import Members, WorkerChange
from emberline.protocol.complete_response import StoredResponse
from emberline.protocol.errors import ErrorInfo
from emberline.protocol.frames import EngineLoad
from emberline.protocol.member import Challenge, Signed
from emberline.service.core import RequestEnd
from emberline.service.event_log import LogPart, NewLog
from emberline.telemetry.health import Health
from emberline.telemetry.status import Status, StatusQuery
from emberline.text.prompt import KnownPrefix


class Find(msgspec.Struct, tag="find"):
    seq: int
    account: str
    model_version: str
    digests: list[bytes]


class Admit(msgspec.Struct, tag="admit"):
    seq: int
    request: RouteRequest


class Finalize(msgspec.Struct, tag="settle"):
    seq: int
    end: RequestEnd


class PutResponse(msgspec.Struct, tag="keep"):
    seq: int
    record: StoredResponse


class GetResponse(msgspec.Struct, tag="recall"):
    seq: int
    account: str
    response_id: str
    whole: bool


class DeleteResponse(msgspec.Struct, tag="forget"):
    seq: int
    account: str
    response_id: str


class GetHealth(msgspec.Struct, tag="health"):
    seq: int


class GetMetrics(msgspec.Struct, tag="metrics"):
    seq: int


class GetStatus(msgspec.Struct, tag="status"):
    seq: int
    query: StatusQuery


class RefreshPrices(msgspec.Struct, tag="prices"):
    seq: int


class ChangeWorkers(msgspec.Struct, tag="workers"):
    seq: int
    change: WorkerChange


class AskCluster(msgspec.Struct, tag="cluster"):
    seq: int
    action: Literal["challenge", "announce", "status"]
    signed: Signed | None = None  # of announce


class AskPlanner(msgspec.Struct, tag="planner"):
    seq: int
    action: Literal["plan", "set_bounds"]
    model: str
    limit: int = 0  # of plan
    changes: dict[str, Any] | None = None  # of set_bounds


class ChangeAlias(msgspec.Struct, tag="alias"):
    seq: int
    name: str
    targets: dict[str, int] | None


class LoadModel(msgspec.Struct, tag="load_model"):
    seq: int
    model: str
    action: Literal["load", "unload"]


class OpenLog(msgspec.Struct, tag="open_log"):
    seq: int
    log: NewLog


class ReadLog(msgspec.Struct, tag="read_log"):
    seq: int
    account: str
    log_id: str
    after: int
    wait_s: float


class LogIdle(msgspec.Struct, tag="log_idle"):
    seq: int
    log_id: str


class CancelLog(msgspec.Struct, tag="cancel_log"):
    seq: int
    account: str
    log_id: str


class AppendLog(msgspec.Struct, tag="append_log"):
    """Not replied to."""

    log_id: str
    events: list[bytes]
    done: bool


class Observation(msgspec.Struct, array_like=True):
    """The last load report that an HTTP worker received on its own connection to a worker."""

    name: str
    load: EngineLoad
    age_s: float


class Notice(msgspec.Struct, tag="notice"):
    """Sent about once a second while there is news; not replied to."""

    observed: list[Observation]
    refused: dict[str, int]  # requests not admitted, by kind of error
    spans: dict[str, int] = {}  # of traces, by what became of them


class FirstToken(msgspec.Struct, tag="began"):
    """A request has its first token; not replied to."""

    request_id: str
    cached_tokens: int


class Checkpoint(msgspec.Struct, tag="checkpoint"):
    """What running requests have used by now; not replied to."""

    rows: list[UsageRow]


class WorkerLeft(msgspec.Struct, tag="left"):
    """From the core: it has lost a worker, or found it stuck. No reply."""

    name: str
    reason: str


class CoreReply(msgspec.Struct, tag="reply", omit_defaults=True):
    """The result of a call, in the field of its kind, or an error. All empty: done, or nothing found."""

    seq: int
    error: ErrorInfo | None = None
    known: KnownPrefix | None = None
    route: Route | None = None
    health: Health | None = None
    metrics: bytes = b""
    status: Status | None = None
    records: list[StoredResponse] = []
    done: bool = False  # of PutResponse and DeleteResponse
    names: list[str] = []  # of ChangeWorkers
    part: LogPart | None = None  # of ReadLog
    idle_s: float = 0.0  # of LogIdle
    challenge: Challenge | None = None  # of AskCluster, as the two below
    signed: Signed | None = None
    cluster: ClusterStatus | None = None
    plain: dict[str, Any] | None = None  # of AskPlanner


Call = (
    Find
    | Admit
    | Finalize
    | PutResponse
    | GetResponse
    | DeleteResponse
    | GetHealth
    | GetMetrics
    | GetStatus
    | ChangeWorkers
    | RefreshPrices
    | ChangeAlias
    | LoadModel
    | OpenLog
    | ReadLog
    | LogIdle
    | CancelLog
    | AskCluster
    | AskPlanner
)
to_core_decoder = msgspec.msgpack.Decoder(Call | Notice | FirstToken | Checkpoint | AppendLog)
from_core_decoder = msgspec.msgpack.Decoder(CoreReply | WorkerLeft | Members | AliasTable)
