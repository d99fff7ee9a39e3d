"""Fuzzing of every route from its OpenAPI document: no input breaks the server or the documented responses."""

import contextlib
import re
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis import CheckFunction
from schemathesis.checks import negative_data_rejection, positive_data_acceptance

from emberline.api.batch_loader import BatchService
from emberline.api.http.call import Receive, Scope, Send
from emberline.catalog.model_card import ModelCard
from emberline.jobs.batches.batch import Batch, NewBatch
from emberline.jobs.batches.blobs import BlobStore
from emberline.jobs.limits import QueueLimits
from emberline.jobs.queue.queue import Queue
from emberline.protocol.events import TextEvent
from emberline.protocol.request import GenerateRequest
from emberline.service.gateway.service import GatewayService
from emberline.store import Database, open_store
from tests.api.fake_service import CARDS, KEY, FakeService, agent, app_of, hello
from tests.examples import n_examples
from tests.jobs.webhooks.helpers import webhook_service


class Obliging(FakeService):
    """Resolves every model name, so that fuzzed requests get past model resolution."""

    def resolve(self, model_id: str) -> ModelCard:
        return CARDS[0]


def obliging(request: GenerateRequest) -> AsyncIterator[TextEvent]:
    """Calls the first tool of a request that declares any."""
    return agent(request) if request.tools else hello(request)


service = Obliging(obliging)
folder = tempfile.TemporaryDirectory()


@contextlib.asynccontextmanager
async def gateways_on(store: Database) -> AsyncIterator[GatewayService]:
    gateways = GatewayService(store)
    await gateways.open()
    try:
        yield gateways
    finally:
        await gateways.close()


plain = app_of(service, KEY, hosts=("testserver",))
GATEWAY_PATH = re.compile(r"/v1/[^/]+/[^/]+$|/v1/[^/]+/[^/]+/")
NEED_EVENTS = ("/events", "/webhook_endpoints", "/event_subscriptions")
NEED_QUEUE = ("/files", "/batches", "/responses", "/ai/run", "/api/queue")


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Every call runs on its own event loop, so those that need the store open it anew."""
    if any(part in scope["path"] for part in NEED_EVENTS):
        return await with_events(scope, receive, send)
    if any(part in scope["path"] for part in NEED_QUEUE):
        return await with_queue(scope, receive, send)
    if "/api/gateways" in scope["path"] or GATEWAY_PATH.match(scope["path"]):
        return await with_gateways(scope, receive, send)
    await plain(scope, receive, send)


async def with_gateways(scope: Scope, receive: Receive, send: Send) -> None:
    store = await open_store(Path(folder.name) / "gateways.db")
    try:
        async with gateways_on(store) as gateways:
            await app_of(service, KEY, gateways=gateways, hosts=("testserver",))(scope, receive, send)
    finally:
        await store.close()


async def with_events(scope: Scope, receive: Receive, send: Send) -> None:
    store = await open_store(Path(folder.name) / "events.db")
    try:
        async with webhook_service(store, deliver=False) as webhooks:
            webhooks.feed.end()  # no events occur in this test: do not wait for any
            await app_of(service, KEY, webhooks, hosts=("testserver",))(scope, receive, send)
    finally:
        await store.close()


async def with_queue(scope: Scope, receive: Receive, send: Send) -> None:
    store = await open_store(Path(folder.name) / "queue.db")
    queue = Queue(store, BlobStore(Path(folder.name) / "blobs"), QueueLimits())
    try:
        async with gateways_on(store) as gateways:
            app = app_of(service, KEY, None, Finished(queue, service), gateways=gateways, hosts=("testserver",))
            await app(scope, receive, send)
    finally:
        await queue.close()
        await store.close()


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
    max_examples=n_examples(8),
    derandomize=True,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)

# Every boundary of every field, once per family of bodies; random requests everywhere.
boundaries = schemathesis.openapi.from_asgi("/openapi.json", app).include(
    path_regex=r"^/v1/chat/completions$|^/v1/messages$|/ai/run/{model}$|/models/search$"
)
anything = schemathesis.openapi.from_asgi("/openapi.json", app).exclude(
    path_regex=r"/ai/v1/|^/v1/\{account\}"
)  # as at /v1/
anything.config.phases.coverage.enabled = False


def check(case: schemathesis.Case, *excluded: CheckFunction) -> None:
    # A schema cannot say everything we refuse (both prompt and messages, say), so a valid body may still get a 400.
    headers = {"Authorization": f"Bearer {KEY}"}
    case.call_and_validate(headers=headers, excluded_checks=[positive_data_acceptance, *excluded], timeout=5)
    assert service.open == 0


@boundaries.parametrize()
@bounded
def test_boundaries(case: schemathesis.Case) -> None:
    check(case)


@anything.parametrize()
@bounded
def test_anything(case: schemathesis.Case) -> None:
    check(case, negative_data_rejection)  # an object in a query, say, is sent as nothing at all
