"""A fake service that answers from a script, and clients that reach the app without a socket."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Literal

import httpx
import msgspec

from emberline.accounts.account_service import AccountService
from emberline.accounts.auth import Authenticator
from emberline.accounts.secret import Secret
from emberline.api.app import ApiSettings, App
from emberline.api.batch_loader import BatchService
from emberline.api.http.large_requests import LargeRequestRelay
from emberline.catalog.aliases import AliasTable
from emberline.catalog.model_card import SPEECH_RECOGNITION, Capabilities, ModelCard, PathSource
from emberline.cluster.cluster import ClusterStatus
from emberline.cluster.membership import WorkerChange
from emberline.gateway.gateways import GatewayService
from emberline.jobs.webhooks.service import WebhookService
from emberline.net.http_server import ASGIApp
from emberline.protocol.complete_response import Encoded, StoredResponse
from emberline.protocol.errors import BadInput, MalformedModelId, ModelNotFound
from emberline.protocol.events import (
    ChoiceDone,
    Completed,
    Cost,
    ReasoningDelta,
    Started,
    TextDelta,
    TextEvent,
    ToolCallDelta,
    ToolCallStarted,
    Usage,
)
from emberline.protocol.media import Media, MediaRequest
from emberline.protocol.member import Challenge, Signed
from emberline.protocol.price import Price
from emberline.protocol.provider import OwnKey
from emberline.protocol.rate_limits import RateLimits
from emberline.protocol.request import EncodeRequest, GenerateRequest, Principal, SamplingDefaults, SpeechRequest
from emberline.protocol.speech import TimedWord, Transcript, TranscriptSegment
from emberline.service.core import PurgedTexts
from emberline.service.engine_tasks import ChatFormat
from emberline.service.event_log import MemoryEventLogs
from emberline.service.model_pulls import ModelPulls
from emberline.service.responses import ResponseStore
from emberline.service.tokenization import TokenizedPrompt
from emberline.service.work import Task, TaskEvents, Work
from emberline.telemetry.health import Health
from emberline.telemetry.status import Status, StatusQuery
from emberline.upstream.models import UpstreamModels
from emberline.upstream.target import Target

MODEL = "@cf/huggingfacetb/smollm2-135m-instruct"
SECRET = Secret("0" * 64)
KEY = "correct-horse-battery-staple"
Script = Callable[[GenerateRequest], AsyncIterator[TextEvent]]


def card(model_id: str, author: str, **fields: Any) -> ModelCard:
    return ModelCard(
        id=model_id,
        aliases=(model_id.rpartition("/")[2],),
        description=f"{model_id}, for tests.",
        author=author,
        context_window=8192,
        source=PathSource("/nowhere"),
        created_at="2024-10-31 00:00:00.000",
        **fields,
    )


CARDS = [
    card(MODEL, "huggingfacetb", license="apache-2.0", sampling=SamplingDefaults(temperature=0.2)),
    card("@hf/acme/tiny", "acme"),
]
PRICED = card(
    "@cf/acme/priced",
    "acme",
    capabilities=Capabilities(function_calling=True, beta=True, languages=("en", "de")),
    price=Price(input=600_000, cached_input=100_000, output=3_000_000),
    deprecation_date="2027-03-31",
)
SPEECH = card("@cf/acme/ears", "acme", task=SPEECH_RECOGNITION, price=Price(audio_second=8_333))
USAGE = Usage(prompt_tokens=12, completion_tokens=3, cached_by_tier={"device": 8})


async def hello(request: GenerateRequest) -> AsyncIterator[TextEvent]:
    """Every choice generates "Hello!" in three deltas."""
    yield Started(Usage(prompt_tokens=12, completion_tokens=1, cached_by_tier={"device": 8}))
    for index in range(request.n):
        for piece in ("Hel", "lo", "!"):
            yield TextDelta(index, piece)
        yield ChoiceDone(index, "stop")
    yield Completed(Usage(prompt_tokens=12, completion_tokens=3 * request.n, cached_by_tier={"device": 8}))


class MemoryResponses:
    """Stored responses in a dict; the real store has its own tests."""

    def __init__(self) -> None:
        self.records: dict[str, StoredResponse] = {}

    async def put(self, record: StoredResponse) -> bool:
        self.records[record.id] = record
        return True

    async def get(self, account: str, response_id: str, whole: bool = False) -> list[StoredResponse]:
        record = self.records.get(response_id)
        if record is None or record.account != account:
            return []
        earlier = await self.get(account, record.parent, True) if whole and record.parent else []
        return [*earlier, record]

    async def delete(self, account: str, response_id: str) -> bool:
        return bool(await self.get(account, response_id)) and self.records.pop(response_id) is not None


AGENT = (
    ReasoningDelta(0, "Two "),
    ReasoningDelta(0, "towns."),
    TextDelta(0, "Let me "),
    TextDelta(0, "look."),
    ToolCallStarted(0, 0, "call_a", "weather"),
    ToolCallDelta(0, 0, '{"town":'),
    ToolCallDelta(0, 0, '"Oslo"}'),
    ToolCallStarted(0, 1, "call_b", "weather"),
    ToolCallDelta(0, 1, '{"town":"Rome"}'),
    ChoiceDone(0, "tool_calls"),
)
AGENT_USAGE = Usage(prompt_tokens=12, completion_tokens=30, reasoning_tokens=4, cached_by_tier={"device": 8})


def says(*events: TextEvent, usage: Usage = USAGE) -> Script:
    """A script of these events between Started and Completed."""

    async def script(request: GenerateRequest) -> AsyncIterator[TextEvent]:
        yield Started(Usage(prompt_tokens=12, completion_tokens=1, cached_by_tier={"device": 8}))
        for event in events:
            yield event
        yield Completed(usage)

    return script


agent = says(*AGENT, usage=AGENT_USAGE)  # thinks, speaks, and calls a function twice


class FakeModels:
    """The models of a fake service, all of them our own."""

    def __init__(
        self,
        cards: Sequence[ModelCard] = CARDS,
        hidden: Sequence[ModelCard] = (SPEECH,),
        on_demand: Sequence[ModelCard] = (),
    ) -> None:
        """`hidden` models are not listed; `on_demand` ones are listed, and were not named at start."""
        self._at_start, self._on_demand, self._hidden = cards, on_demand, hidden

    def cards(self) -> Sequence[ModelCard]:
        return (*self._at_start, *self._on_demand)

    def find(self, name: str, account: str | None, caller: str = "") -> ModelCard:
        if not name.isascii() or not name.isprintable() or " " in name:
            raise MalformedModelId("a model id is @source/author/name")
        for known in (*self.cards(), *self._hidden):
            if name in (known.id, *known.aliases):
                return known
        raise ModelNotFound(f"No such model {name} or task", param="model")

    def target(self, card: ModelCard, principal: Principal, own_key: OwnKey | None = None) -> Target:
        principal.check_model(card.id, card.aliases)
        return Target(card)

    def check_scope(self, card: ModelCard, principal: Principal) -> None:
        principal.check_model(card.id, card.aliases)

    def is_upstream(self, card: ModelCard) -> bool:
        return False

    aliases = AliasTable()
    upstream = UpstreamModels(())

    def is_named_at_start(self, model_id: str) -> bool:
        return any(model_id == card.id for card in self._at_start)

    def state(self, model_id: str) -> str:
        return "loaded" if model_id == MODEL else ""

    def problem(self, card: ModelCard, principal: Principal) -> str:
        return ""


class FakeService:
    def __init__(self, script: Script = hello) -> None:
        self.script = script
        self.models = FakeModels()
        self.requests: list[GenerateRequest] = []
        self.speech_requests: list[SpeechRequest] = []
        self.principals: list[Principal] = []
        self.rate_limits: RateLimits | None = None  # of every caller
        self.ahead: int | None = None  # requests that wait before every one
        self.open = 0  # event streams not closed yet
        self.ok = True
        self.price_refreshes = 0
        self.price: Price | None = None  # of every model
        self.cost_pico = 0  # of every request, if there is a price
        self.responses: ResponseStore = MemoryResponses()
        self.event_logs = MemoryEventLogs()
        self.changes: list[WorkerChange] = []
        self.alias_changes: list[tuple[str, Mapping[str, int] | None]] = []
        self.loads: list[tuple[str, str]] = []
        self.keep_alive_s: float | None = None  # of the last model that was loaded
        self.engine_load: dict[str, Any] = {}  # reported besides the usual
        self.engine_device = "cpu"
        self.unload_in_s: float | None = None  # of the model, if it is to be unloaded
        self.purges: list[tuple[str | None, str | None]] = []  # of account and session

    @property
    def operations(self) -> "FakeService":
        return self

    @property
    def cluster_admin(self) -> "FakeService":
        return self

    async def purge(self, account: str | None, session: str | None) -> PurgedTexts:
        self.purges.append((account, session))
        return PurgedTexts(4, 1)

    async def n_ahead(self, request_id: str) -> int | None:
        return self.ahead

    async def run(self, work: Work) -> TaskEvents:
        task = work.task
        self.models.find(task.model, None)
        self.principals.append(work.principal)
        self.open += 1
        work.admitted_ns, work.rate_limits = time.monotonic_ns(), self.rate_limits
        try:
            async for event in self._events(task):
                if isinstance(event, Completed):
                    cost_pico = None if self.price is None else self.cost_pico
                    usage = event.usage
                    if work.wants_cost:
                        usage = msgspec.structs.replace(usage, cost=Cost(cost_pico))
                    event = work.completed = Completed(usage, self.price, cost_pico, event.result)
                yield event
        finally:
            self.open -= 1

    def _events(self, task: Task) -> AsyncIterator[TextEvent]:
        if isinstance(task, GenerateRequest):
            self.requests.append(task)
            return self.script(task)
        return self._whole(task)

    async def _whole(self, task: Task) -> AsyncIterator[TextEvent]:
        if isinstance(task, SpeechRequest):
            self.speech_requests.append(task)
            segment = TranscriptSegment(
                start_s=0.0,
                end_s=3661.5,
                text=" Hello -->  world.",
                words=(TimedWord(" Hello", 0.0, 0.5), TimedWord(" world.", 0.5, 1.25)),
            )
            transcript = Transcript(language="en", audio_ms=1250, segments=(segment,))
            yield Completed(Usage(audio_ms=1250), result=transcript)
        elif isinstance(task, EncodeRequest):
            encoded = self.encode(task)
            yield Completed(encoded.usage, result=encoded)
        else:
            assert isinstance(task, MediaRequest)
            yield Completed(Usage(), result=self.make_media(task))

    def encode(self, request: EncodeRequest) -> Encoded:
        raise NotImplementedError

    def make_media(self, request: MediaRequest) -> Media:
        raise NotImplementedError

    async def count_tokens(self, request: GenerateRequest, principal: Principal, target: Target | None = None) -> int:
        self.models.find(request.model, None)
        self.requests.append(request)
        return sum(len(message.content.split()) for message in request.messages or ())

    async def chat_format(self, card: ModelCard) -> ChatFormat:
        return ChatFormat("{{ messages }}", ("<|im_end|>",))

    async def tokenize(self, request: GenerateRequest, target: Target, special: bool, entries: bool) -> TokenizedPrompt:
        self.requests.append(request)
        texts = [request.prompt or "", *(message.content for message in request.messages or ())]
        words = [word for text in texts for word in text.split()]
        return TokenizedPrompt(list(range(len(words))), 1024, words if entries else None)

    async def detokenize(self, ids: list[int], target: Target) -> str:
        return " ".join(map(str, ids))

    async def tokenizer_info(self, target: Target) -> dict[str, str | None]:
        return {"eos_token": "</s>"}

    async def change_alias(self, name: str, targets: Mapping[str, int] | None) -> None:
        self.alias_changes.append((name, targets))

    async def health(self) -> Health:
        load = {"running": 1, "waiting": 0, "kv_used_blocks": 5, "kv_total_blocks": 100, "tiers": ()}
        load |= {"output_tokens": 7, "cached_tokens": 8} | self.engine_load
        engine = {
            "name": "smollm2-0",
            "model": MODEL,
            "ok": self.ok,
            "problem": "",
            "device": self.engine_device,
            "load": load,
        }
        engine |= {"state": "ready", "in_flight": 1}
        models = {MODEL: {"ready": self.ok, "workers": 1, "workers_ready": int(self.ok)}}
        detail: dict[str, Any] = {"engines": [engine], "models": models}
        if self.unload_in_s is not None:
            detail["model_states"] = [{"id": MODEL, "unload_in_s": self.unload_in_s}]
        return Health(self.ok, detail)

    async def load_model(
        self, model_id: str, action: Literal["load", "unload"], keep_alive_s: float | None = None
    ) -> None:
        self.loads.append((model_id, action))
        self.keep_alive_s = keep_alive_s

    async def refresh_prices(self) -> None:
        self.price_refreshes += 1

    async def change_workers(self, change: WorkerChange) -> list[str]:
        self.changes.append(change)
        return ["smollm2-0"]

    async def join_challenge(self) -> Challenge:
        return Challenge("challenge", "cluster")

    async def announce(self, signed: Signed) -> Signed:
        raise BadInput("not an announcement of a worker")

    async def cluster_status(self) -> ClusterStatus:
        return ClusterStatus(id="cluster", region="", release="0.2.0", members=[])

    async def scaling_plan(self, model: str, limit: int) -> dict[str, Any]:
        return {"models": [], "asked": [model, limit]}

    async def set_scaling_bounds(self, model: str, changes: dict[str, Any] | None) -> dict[str, Any] | None:
        return changes

    async def status(self, query: StatusQuery) -> Status:
        return Status(
            time_s=1e9,
            uptime_s=60.0,
            ok=self.ok,
            problem="",
            workers=[],
            models=[],
            waiting={"default": query.requests},
            phases={},
            requests=[],
            recent=[],
            step_s=10,
            series={"time_s": [query.since_s]},
        )

    async def metrics(self) -> bytes:
        return b"# TYPE emberline_requests counter\nemberline_requests_total 1.0\n"


def app_of(
    service: FakeService,
    key: str | None = None,
    webhooks: WebhookService | None = None,
    batches: BatchService | None = None,
    large_requests: LargeRequestRelay | None = None,
    accounts: AccountService | None = None,
    gateways: GatewayService | None = None,
    pulls: ModelPulls | None = None,
    **settings: Any,
) -> ASGIApp:
    """With `accounts`, every request needs a key."""
    directory = None if accounts is None else accounts.directory
    auth = Authenticator(SECRET, key, directory, required=accounts is not None)
    return App(
        service, ApiSettings(auth=auth, **settings), webhooks, batches, large_requests, accounts, gateways, pulls
    )


def client_of(
    service: FakeService,
    key: str | None = None,
    webhooks: WebhookService | None = None,
    batches: BatchService | None = None,
    accounts: AccountService | None = None,
    gateways: GatewayService | None = None,
    pulls: ModelPulls | None = None,
    **settings: Any,
) -> httpx.AsyncClient:
    app = app_of(service, key, webhooks, batches, accounts=accounts, gateways=gateways, pulls=pulls, **settings)
    transport = httpx.ASGITransport(app=app)
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8686")


class Wire:
    """One ASGI request driven by hand, message by message."""

    def __init__(self, app: ASGIApp, path: str, body: bytes, method: str = "POST", **headers: str) -> None:
        fields = {"host": "127.0.0.1:8686", **{name.replace("_", "-"): value for name, value in headers.items()}}
        self.scope: dict[str, Any] = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "scheme": "http",
            "headers": [(name.encode(), value.encode()) for name, value in fields.items()],
            "server": ("127.0.0.1", 8686),
        }
        self.inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.inbox.put_nowait({"type": "http.request", "body": body, "more_body": False})
        self.sent: list[dict[str, Any]] = []
        self.progress = asyncio.Event()
        self.task = asyncio.create_task(app(self.scope, self.inbox.get, self._send))  # type: ignore[arg-type]

    async def _send(self, message: Any) -> None:
        self.sent.append(message)
        self.progress.set()

    def leave(self) -> None:
        self.inbox.put_nowait({"type": "http.disconnect"})

    async def until_sent(self, text: bytes) -> None:
        while text not in self.body:
            self.progress.clear()
            await asyncio.wait_for(self.progress.wait(), 60)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)
