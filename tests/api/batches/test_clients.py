"""The official packages on the queue: openai, anthropic and cloudflare, over a real port, a store and a puller."""

import json
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest

from tests.api.batch_fixtures import SelfMade, jsonl
from tests.api.fake_service import KEY, MODEL, FakeService, agent, hello
from tests.api.loopback import Loopback, on_loopback
from tests.api.openai.test_batches import CHAT, chat
from tests.lazy_modules import anthropic, cloudflare, openai

T = TypeVar("T")
_service = FakeService()
CF = "/client/v4/accounts/acme/ai"


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> SelfMade:
    return SelfMade(_service, tmp_path_factory.mktemp("queue"), KEY)


@pytest.fixture(scope="module")
def server(app: SelfMade) -> Iterator[Loopback]:
    with on_loopback(app) as server:
        yield server


@pytest.fixture
def service(app: SelfMade) -> Iterator[FakeService]:
    _service.requests.clear()
    _service.script = hello
    app.runs = True
    yield _service
    app.runs = True


@pytest.fixture(params=["/v1", f"{CF}/v1"])
def client(server: Loopback, request: pytest.FixtureRequest) -> Iterator["openai.OpenAI"]:
    with openai.OpenAI(base_url=server.url + request.param, api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture(params=["", CF])
def claude(server: Loopback, request: pytest.FixtureRequest) -> Iterator["anthropic.Anthropic"]:
    with anthropic.Anthropic(base_url=server.url + request.param, api_key=KEY, max_retries=0) as client:
        yield client


def wait(look: Callable[[], T], ready: Callable[[T], bool]) -> T:
    end_s = time.monotonic() + 60
    while not ready(found := look()):
        assert time.monotonic() < end_s, found
        time.sleep(0.02)
    return found


def strict(kind: Any, found: Any) -> None:
    kind.model_validate(found.model_dump(by_alias=True, warnings=False), strict=True)


def test_openai_batches(client: "openai.OpenAI", service: FakeService) -> None:
    lines = [chat("a"), chat("b", model="nobody"), chat("c")]
    file = client.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
    strict(openai.types.FileObject, file)
    assert client.files.retrieve(file.id) == file
    assert file.id in [found.id for found in client.files.list(purpose="batch")]
    made = client.batches.create(
        input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"for": "tests"}
    )
    strict(openai.types.Batch, made)
    batch = wait(lambda: client.batches.retrieve(made.id), lambda batch: batch.completed_at is not None)
    strict(openai.types.Batch, batch)
    assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", 2, 1)
    strict(openai.types.FileObject, client.files.retrieve(batch.output_file_id))
    output = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    assert [line["custom_id"] for line in output] == ["a", "c"]
    completion = openai.types.chat.ChatCompletion.model_validate(output[0]["response"]["body"])
    assert completion.choices[0].message.content == "Hello!"
    (error,) = [json.loads(line) for line in client.files.content(batch.error_file_id).text.splitlines()]
    assert error["response"]["body"]["error"]["code"] == "model_not_found"
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)


def test_openai_lists_and_cancels(client: "openai.OpenAI", app: SelfMade, service: FakeService) -> None:
    app.runs = False
    file = client.files.create(file=("in.jsonl", jsonl([chat("a")])), purpose="batch")
    made = [client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h").id for _ in range(3)]
    listed = [batch.id for batch in client.batches.list(limit=2)]
    assert listed[:3] == made[::-1]
    for batch_id in made:
        client.batches.cancel(batch_id)
        ended = wait(lambda batch_id=batch_id: client.batches.retrieve(batch_id), lambda batch: batch.cancelled_at)
        strict(openai.types.Batch, ended)
        assert ended.status == "cancelled"
    with pytest.raises(openai.NotFoundError):
        client.batches.retrieve("batch_0")
    with pytest.raises(openai.BadRequestError):
        client.batches.create(input_file_id=file.id, endpoint="/v1/moderations", completion_window="24h")


def test_openai_background(client: "openai.OpenAI", app: SelfMade, service: FakeService) -> None:
    app.runs = False
    service.script = agent
    made = client.responses.create(model=MODEL, input="Hi", background=True)
    strict(openai.types.responses.Response, made)
    assert (made.status, made.background) == ("queued", True)
    app.runs = True
    done = wait(lambda: client.responses.retrieve(made.id), lambda response: response.status == "completed")
    strict(openai.types.responses.Response, done)
    assert done.output_text == "Let me look."
    events = list(client.responses.retrieve(made.id, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].response == done
    rest = list(client.responses.retrieve(made.id, stream=True, starting_after=4))
    assert rest == events[5:]
    more = client.responses.create(model=MODEL, input="And?", previous_response_id=made.id)
    assert more.previous_response_id == made.id
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_openai_streams_and_cancels_in_background(client: "openai.OpenAI", app: SelfMade, service: FakeService) -> None:
    stream = client.responses.create(model=MODEL, input="Hi", background=True, stream=True)
    events = list(stream)
    assert [event.type for event in events][:3] == ["response.created", "response.queued", "response.in_progress"]
    assert events[-1].response.output_text == "Hello!"
    app.runs = False
    made = client.responses.create(model=MODEL, input="Hi", background=True)
    cancelled = client.responses.cancel(made.id)
    strict(openai.types.responses.Response, cancelled)
    assert cancelled.status == "cancelled"
    assert client.responses.retrieve(made.id).status == "cancelled"


def test_openai_flex(client: "openai.OpenAI", service: FakeService) -> None:
    messages: Any = [{"role": "user", "content": "Hi"}]
    answer = client.chat.completions.create(model=MODEL, messages=messages, service_tier="flex")
    assert answer.service_tier == "flex"
    assert service.requests[-1].reject_if_busy


def test_anthropic_batches(claude: "anthropic.Anthropic", app: SelfMade, service: FakeService) -> None:
    params: Any = {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
    requests: Any = [{"custom_id": "a", "params": params}, {"custom_id": "b", "params": params | {"model": "nobody"}}]
    made = claude.messages.batches.create(requests=requests)
    strict_python(made)
    ended = wait(lambda: claude.messages.batches.retrieve(made.id), lambda batch: batch.processing_status == "ended")
    strict_python(ended)
    assert (ended.request_counts.succeeded, ended.request_counts.errored) == (1, 1)
    results = {line.custom_id: line.result for line in claude.messages.batches.results(made.id)}
    assert results["a"].type == "succeeded"
    assert results["a"].message.content[0].text == "Hello!"
    assert results["b"].type == "errored"
    assert results["b"].error.error.type == "not_found_error"
    app.runs = False
    waiting = claude.messages.batches.create(requests=requests[:1])
    assert claude.messages.batches.cancel(waiting.id).id == waiting.id
    ended = wait(lambda: claude.messages.batches.retrieve(waiting.id), lambda batch: batch.processing_status == "ended")
    assert ended.request_counts.canceled == 1
    listed = [batch.id for batch in claude.messages.batches.list(limit=1)]
    assert listed[:2] == [waiting.id, made.id]
    assert claude.messages.batches.delete(made.id).type == "message_batch_deleted"
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.batches.retrieve(made.id)


def strict_python(batch: Any) -> None:
    type(batch).model_validate(batch.model_dump())


def test_cloudflare(server: Loopback, service: FakeService) -> None:
    with cloudflare.Cloudflare(api_token=KEY, base_url=f"{server.url}/client/v4", max_retries=0) as client:
        body = {"requests": [{"prompt": "Hi", "external_reference": "r"}, {"prompt": "Hi", "max_tokens": -5}]}
        options: Any = {"account_id": "acme", "extra_query": {"queueRequest": "true"}}
        made: Any = client.ai.run(MODEL, prompt="", extra_body=body | {"prompt": None}, **options)
        assert made["status"] == "queued"

        def look() -> Any:
            return client.ai.run(
                MODEL, account_id="acme", prompt="", extra_body={"prompt": None, "request_id": made["request_id"]}
            )

        result = wait(look, lambda found: "responses" in found)
        first, second = result["responses"]
        assert (first["success"], first["external_reference"], first["result"]["response"]) == (True, "r", "Hello!")
        assert (second["success"], second["error"]["code"]) == (False, 5006)
        assert result["usage"]["total_tokens"] == 15
