"""Fuzzing of every route from its OpenAPI document: no input breaks the server or the documented responses."""

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import CheckFunction
from schemathesis.checks import ignored_auth, negative_data_rejection, positive_data_acceptance
from schemathesis.generation.feedback import FeedbackSources
from schemathesis.pytest._test_builder import build_operation_test

from emberline.accounts.account_service import AccountService
from emberline.api.batch_loader import BatchService
from emberline.catalog.model_card import TEXT_CLASSIFICATION, TEXT_EMBEDDINGS
from emberline.gateway.gateways import GatewayService
from emberline.jobs.batches.batch import Batch, NewBatch
from emberline.jobs.batches.blobs import BlobStore
from emberline.jobs.limits import QueueLimits
from emberline.jobs.queue.queue import Queue
from emberline.net.http_server import ASGIApp, Receive, Scope, Send
from emberline.protocol.complete_response import Encoded
from emberline.protocol.errors import BadInput
from emberline.protocol.events import TextEvent, Usage
from emberline.protocol.media import Media, MediaRequest
from emberline.protocol.request import EncodeRequest, GenerateRequest
from emberline.store import open_store
from tests.api.admin.test_kv_cache import FakeCache
from tests.api.fake_service import CARDS, KEY, SECRET, FakeModels, FakeService, Script, agent, app_of, card, hello
from tests.examples import EVERY_EXAMPLE
from tests.jobs.webhooks.helpers import webhook_service

MODELS = (
    *CARDS,
    card("@cf/acme/vectors", "acme", task=TEXT_EMBEDDINGS),
    card("rank", "acme", task=TEXT_CLASSIFICATION),
)


class Obliging(FakeService):
    """Serves models of every task; the document names them, and no other name is known."""

    def __init__(self, script: Script = hello) -> None:
        super().__init__(script)
        self.models = FakeModels(MODELS)

    def make_media(self, request: MediaRequest) -> Media:
        return Media(b'{"data":[]}')

    def encode(self, request: EncodeRequest) -> Encoded:
        """A score for each text, or one number as its vector."""
        if not request.n_texts:
            raise BadInput("there are no texts")
        values = np.linspace(0, 1, request.n_texts, dtype="<f4").tobytes()
        return Encoded(values=values, n_rows=request.n_texts, usage=Usage(prompt_tokens=request.n_texts))


def obliging(request: GenerateRequest) -> AsyncIterator[TextEvent]:
    """Calls the first tool of a request that declares any."""
    return agent(request) if request.tools else hello(request)


service = Obliging(obliging)


class Opened:
    """The app on a store that opens with the first request, on schemathesis's event loop, and stays open until `close`.
    The document needs no store: every test process reads it when it collects the tests."""

    def __init__(self) -> None:
        self._document = app_of(service, KEY, hosts=("testserver",))
        self._closing = contextlib.AsyncExitStack()
        self._opening: asyncio.Task[ASGIApp] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope["path"] == "/openapi.json":
            await self._document(scope, receive, send)
            return
        if self._opening is None:
            self._opening = asyncio.create_task(self._closing.enter_async_context(self._open()))
        await (await asyncio.shield(self._opening))(scope, receive, send)

    def close(self) -> None:
        if self._opening is not None:
            asyncio.run_coroutine_threadsafe(self._closing.aclose(), self._opening.get_loop()).result()

    @contextlib.asynccontextmanager
    async def _open(self) -> AsyncIterator[ASGIApp]:
        async with contextlib.AsyncExitStack() as closing:
            folder = Path(closing.enter_context(tempfile.TemporaryDirectory()))
            service.kv_cache = FakeCache(folder)  # type: ignore[attr-defined]
            store = await open_store(folder / "store.db")
            closing.push_async_callback(store.close)
            queue = Queue(store, BlobStore(folder / "blobs"), QueueLimits())
            closing.push_async_callback(queue.close)
            webhooks = await closing.enter_async_context(webhook_service(store, deliver=False))
            webhooks.feed.end()  # no events occur in this test: do not wait for any
            gateways, accounts = GatewayService(store), AccountService(store, SECRET)
            for opened in (gateways, accounts):
                await opened.open()
                closing.push_async_callback(opened.close)
            batches = Finished(queue, service)
            options: Any = {"accounts": accounts, "gateways": gateways, "hosts": ("testserver",)}
            yield app_of(service, KEY, webhooks, batches, **options)


class Finished(BatchService):
    """A submitted background response is cancelled at once, so that its streams end."""

    def __init__(self, queue: Queue, service: FakeService) -> None:
        super().__init__(queue, service)
        submit = queue.submit

        async def submit_and_cancel(new: NewBatch, lines: Any) -> Batch:
            made = await submit(new, lines)
            return await queue.cancel(made.account, made.id)

        queue.submit = submit_and_cancel  # type: ignore[method-assign]


bounded = settings(
    max_examples=8 if EVERY_EXAMPLE else 3,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
app = Opened()

HEADERS = {"Authorization": f"Bearer {KEY}"}

# Every boundary of every field, once per family of bodies; random requests everywhere. Only `make test-all` tries the
# families with the most fields, and the search for models at its second address.
# Of each endpoint that generates, what a document cannot say: fields that belong together, and those left out for them.
SAID: dict[str, Any] = {"input": "Hi", "previous_response_id": None, "background": None, "tools": None}
GENERATION: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {},
    "/v1/completions": {},
    "/v1/responses": SAID,
    "/v1/messages": {},
    "/api/chat": {},
    "/api/generate": {},
    "/client/v4/accounts/{account}/ai/run/{model}": {
        "prompt": "Hi",
        "messages": None,
        "requests": None,
        "request_id": None,
    },
}
DAILY = ("^/v1/messages$", "^/ai-api/models/search$")
FAMILIES = (*DAILY, "/ai/models/search$", "^/v1/chat/completions$", "/ai/run/{model}$")


def load() -> schemathesis.schemas.BaseSchema:
    """Read the document. Only `make test-all` also tries literals of our source as values: it takes long to set up."""
    schema = schemathesis.openapi.from_asgi("/openapi.json", app, headers=HEADERS)
    schema.config.analysis.constants.enabled = EVERY_EXAMPLE
    return schema


anything = load().exclude(path_regex=r"/ai/v1/|^/v1/\{account\}")  # as at /v1/
anything.config.phases.coverage.enabled = False


def check(case: schemathesis.Case, *excluded: CheckFunction) -> None:
    # A schema cannot say everything we refuse (both prompt and messages, say), so a valid body may still get a 400.
    case.call_and_validate(headers=HEADERS, excluded_checks=[positive_data_acceptance, *excluded], timeout=60)
    assert service.open == 0


@pytest.fixture(scope="module", autouse=True)
def closed_app() -> Iterator[None]:
    yield
    app.close()


@bounded
def check_boundary(case: schemathesis.Case) -> None:
    check(case, ignored_auth)  # two more requests per case; `test_anything` makes them for every operation


@pytest.mark.parametrize("family", FAMILIES if EVERY_EXAMPLE else DAILY)
def test_boundaries(family: str) -> None:
    """`parametrize` of schemathesis would build these cases, which takes seconds, in every process at collection."""
    schema = load().include(path_regex=family)
    schema.config.headers = HEADERS  # or a case would count as invalid for the lack of the header that `check` adds
    operations = list(schema.get_all_operations())
    assert operations, "the document has no such operation"
    for operation in operations:
        options: Any = {"given_kwargs": {}, "feedback": FeedbackSources()}
        build_operation_test(config=schema.config, operation=operation.ok(), test_func=check_boundary, **options)()


@anything.parametrize()
@bounded
def test_anything(case: schemathesis.Case) -> None:
    check(case, negative_data_rejection)  # an object in a query, say, is sent as nothing at all


@pytest.mark.slow
@pytest.mark.parametrize("path", GENERATION)
def test_requests_for_generation_reach_a_model(path: str) -> None:
    """Valid bodies name a model that is served, as the document lists them: most must get past its look-up. The model
    may be left out where one is served; here there are several."""
    statuses: list[int] = []

    @settings(max_examples=25, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(case=load()[path]["POST"].as_strategy())
    def ask(case: schemathesis.Case) -> None:
        case.body = {**case.body, **GENERATION[path]}
        if "{model}" not in path:
            case.body["model"] = case.body.get("model") or MODELS[0].id
        case.headers = HEADERS
        answer = case.call_and_validate(excluded_checks=[positive_data_acceptance, ignored_auth], timeout=60)
        statuses.append(answer.status_code)

    ask()
    assert 404 not in statuses, statuses
    assert statuses.count(200) >= 3, statuses
