"""Fuzzing of every route from its OpenAPI document: no input breaks the server or the documented responses."""

import contextlib
import re
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis import CheckFunction
from schemathesis.checks import negative_data_rejection, positive_data_acceptance

from emberline.accounts.account_service import AccountService
from emberline.api.batch_loader import BatchService
from emberline.api.http.call import Receive, Scope, Send
from emberline.catalog.model_card import ModelCard
from emberline.jobs.batches.batch import Batch, NewBatch
from emberline.jobs.batches.blobs import BlobStore
from emberline.jobs.limits import QueueLimits
from emberline.jobs.queue.queue import Queue
from emberline.protocol.answer import Encoded
from emberline.protocol.errors import BadInput
from emberline.protocol.events import TextEvent, Usage
from emberline.protocol.media import Media, MediaRequest
from emberline.protocol.request import EncodeRequest, GenerateRequest, Principal
from emberline.service.gateway.service import GatewayService
from emberline.store import open_store
from tests.api.admin.test_kv_cache import FakeCache
from tests.api.fake_service import CARDS, KEY, SECRET, FakeService, agent, app_of, hello
from tests.examples import EVERY_EXAMPLE, n_examples
from tests.jobs.webhooks.helpers import webhook_service


class Obliging(FakeService):
    """Resolves every model name, so that fuzzed requests get past model resolution."""

    def resolve(self, model_id: str, caller: str = "") -> ModelCard:
        return CARDS[0]

    async def make_media(self, request: MediaRequest, principal: Principal, **_: Any) -> Media:
        return Media(b'{"data":[]}')

    async def encode(self, request: EncodeRequest, principal: Principal, **_: Any) -> Encoded:
        """A score for each text, or one number as its vector."""
        if not request.n_texts:
            raise BadInput("there are no texts")
        values = np.linspace(0, 1, request.n_texts, dtype="<f4").tobytes()
        return Encoded(values=values, n_rows=request.n_texts, usage=Usage(prompt_tokens=request.n_texts))


def obliging(request: GenerateRequest) -> AsyncIterator[TextEvent]:
    """Calls the first tool of a request that declares any."""
    return agent(request) if request.tools else hello(request)


service = Obliging(obliging)
folder = tempfile.TemporaryDirectory()
service.kv_cache = FakeCache(Path(folder.name))  # type: ignore[attr-defined]


plain = app_of(service, KEY, hosts=("testserver",))
GATEWAY_PATH = re.compile(r"/v1/[^/]+/[^/]+$|/v1/[^/]+/[^/]+/")
NEED_STORE = ("/events", "/webhook_endpoints", "/event_subscriptions", "/files", "/batches", "/responses", "/ai/run")
NEED_STORE += ("/api/", "/ai-gateway/")


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Every call runs on its own event loop, so those that need the store open it anew."""
    path = scope["path"]
    if any(part in path for part in NEED_STORE) or GATEWAY_PATH.match(path):
        await with_store(scope, receive, send)
    else:
        await plain(scope, receive, send)


async def with_store(scope: Scope, receive: Receive, send: Send) -> None:
    async with contextlib.AsyncExitStack() as closing:
        store = await open_store(Path(folder.name) / "store.db")
        closing.push_async_callback(store.close)
        queue = Queue(store, BlobStore(Path(folder.name) / "blobs"), QueueLimits())
        closing.push_async_callback(queue.close)
        webhooks = await closing.enter_async_context(webhook_service(store, deliver=False))
        webhooks.feed.end()  # no events occur in this test: do not wait for any
        gateways, accounts = GatewayService(store), AccountService(store, SECRET)
        for opened in (gateways, accounts):
            await opened.open()
            closing.push_async_callback(opened.close)
        parts = app_of(
            service,
            KEY,
            webhooks,
            Finished(queue, service),
            accounts=accounts,
            gateways=gateways,
            hosts=("testserver",),
        )
        await parts(scope, receive, send)


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
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)

# Every boundary of every field, once per family of bodies; random requests everywhere. The two families with the most
# fields have to wait for `make test-all`: building their cases takes seconds, at collection already.
FAMILIES = ("^/v1/messages$", "/models/search$", "^/v1/chat/completions$", "/ai/run/{model}$")
boundaries = schemathesis.openapi.from_asgi("/openapi.json", app).include(
    path_regex="|".join(FAMILIES if EVERY_EXAMPLE else FAMILIES[:2])
)
anything = schemathesis.openapi.from_asgi("/openapi.json", app).exclude(
    path_regex=r"/ai/v1/|^/v1/\{account\}"
)  # as at /v1/
anything.config.phases.coverage.enabled = False


def check(case: schemathesis.Case, *excluded: CheckFunction) -> None:
    # A schema cannot say everything we refuse (both prompt and messages, say), so a valid body may still get a 400.
    headers = {"Authorization": f"Bearer {KEY}"}
    case.call_and_validate(headers=headers, excluded_checks=[positive_data_acceptance, *excluded], timeout=60)
    assert service.open == 0


@boundaries.parametrize()
@bounded
def test_boundaries(case: schemathesis.Case) -> None:
    check(case)


@anything.parametrize()
@bounded
def test_anything(case: schemathesis.Case) -> None:
    check(case, negative_data_rejection)  # an object in a query, say, is sent as nothing at all
