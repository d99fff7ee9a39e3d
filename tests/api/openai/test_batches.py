"""OpenAI's files and batches: formats, invalid lines, idempotency keys, restarts; on both databases."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from emberline.api.batch_loader import BatchService, job_reader
from emberline.api.batches.job_format import FileLine, file_lines
from emberline.api.openai.batch_jobs import OpenAIJobReader
from emberline.catalog.aliases import Aliases, configured_table
from emberline.catalog.model_files import ModelFiles
from emberline.cluster.served_models import ServedModels
from emberline.jobs.batches.batch import Batch, NewBatch
from emberline.jobs.queue.job import NewJob
from emberline.protocol.complete_response import Answer, AnswerChoice, TextPart
from emberline.protocol.errors import BadInput, Unavailable
from emberline.protocol.events import ChoiceDone, ReasoningDelta, TextDelta, TextLogprob, Usage
from emberline.protocol.request import GenerateRequest, Priority
from emberline.service.models import Models
from emberline.store import Database
from emberline.upstream.models import UpstreamModels
from tests.api.batch_fixtures import jsonl, lines_in, open_batch_service, run_all, run_one, until
from tests.api.fake_service import CARDS, MODEL, FakeService, client_of, hello, says
from tests.databases import DatabaseLocation, mostly_sqlite, on_both_databases
from tests.faulty_queue import FaultyQueue
from tests.faulty_store import FaultyStore

database = mostly_sqlite

CF = "/client/v4/accounts/acme/ai/v1"
CHAT = "/v1/chat/completions"


@pytest.fixture
async def store(database: DatabaseLocation) -> AsyncIterator[FaultyStore]:
    store = FaultyStore(await database.open())
    yield store
    await store.close()


@pytest.fixture
async def batches(store: Database, service: FakeService, tmp_path: Path) -> AsyncIterator[BatchService]:
    async with open_batch_service(store, service, tmp_path) as batches:
        yield batches


@pytest.fixture
async def client(service: FakeService, batches: BatchService) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(service, batches=batches) as client:
        yield client


def chat(custom_id: str, text: str = "Hi", **body: Any) -> dict[str, Any]:
    message = {"role": "user", "content": text}
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": CHAT,
        "body": {"model": MODEL, "messages": [message]} | body,
    }


async def upload(client: httpx.AsyncClient, content: bytes, base: str = "/v1", **headers: str) -> dict[str, Any]:
    fields, files = {"purpose": "batch"}, {"file": ("in.jsonl", content)}
    answer = await client.post(f"{base}/files", data=fields, files=files, headers=headers)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def submit(
    client: httpx.AsyncClient, content: bytes, endpoint: str = CHAT, base: str = "/v1", **more: Any
) -> dict[str, Any]:
    file = await upload(client, content, base)
    body = {"input_file_id": file["id"], "endpoint": endpoint, "completion_window": "24h"} | more
    answer = await client.post(f"{base}/batches", json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def finish(
    client: httpx.AsyncClient, batches: BatchService, service: FakeService, batch_id: str, base: str = "/v1"
) -> dict[str, Any]:
    """Run queued jobs until the batch has ended."""

    async def ended() -> dict[str, Any] | None:
        await run_all(batches.queue, service)
        batch = (await client.get(f"{base}/batches/{batch_id}")).json()
        return batch if batch["status"] in ("completed", "failed", "expired", "cancelled") else None

    return dict(await until(ended))


@pytest.mark.parametrize("base", ["/v1", CF])
async def test_files(client: httpx.AsyncClient, base: str) -> None:
    content = b"some bytes\n" * 100_000
    file = await upload(client, content, base)
    assert file["id"].startswith("file-")
    assert {key: file[key] for key in ("object", "bytes", "filename", "purpose", "status", "expires_at")} == {
        "object": "file",
        "bytes": len(content),
        "filename": "in.jsonl",
        "purpose": "batch",
        "status": "processed",
        "expires_at": None,
    }
    assert (await client.get(f"{base}/files/{file['id']}")).json() == file
    answer = await client.get(f"{base}/files/{file['id']}/content")
    assert answer.content == content
    assert answer.headers["content-length"] == str(len(content))
    other = await upload(client, b"x", base)
    listed = (await client.get(f"{base}/files", params={"limit": 1})).json()
    assert ([row["id"] for row in listed["data"]], listed["has_more"]) == ([other["id"]], True)
    rest = (await client.get(f"{base}/files", params={"after": other["id"], "order": "desc"})).json()
    assert ([row["id"] for row in rest["data"]], rest["has_more"]) == ([file["id"]], False)
    elsewhere = await client.get(f"/client/v4/accounts/other/ai/v1/files/{file['id']}")
    assert elsewhere.status_code == 404
    gone = await client.delete(f"{base}/files/{file['id']}")
    assert gone.json() == {"id": file["id"], "object": "file", "deleted": True}
    for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
        missing = await client.request(method, f"{base}/files/{file['id']}{path}")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "file_not_found")


async def test_fields_after_the_file(client: httpx.AsyncClient) -> None:
    parts = [
        b'name="file"; filename="C:\\\\dir\\\\in.jsonl"\r\nContent-Type: text/plain\r\n\r\n{}',
        b'name="purpose"\r\n\r\nbatch',
        b'name="expires_after[seconds]"\r\n\r\n3600',
    ]
    body = b"".join(b"--b\r\nContent-Disposition: form-data; " + part + b"\r\n" for part in parts) + b"--b--\r\n"
    headers = {"content-type": "multipart/form-data; boundary=b"}
    file = (await client.post("/v1/files", content=body, headers=headers)).json()
    assert (file["filename"], file["bytes"]) == ("in.jsonl", 2)
    assert file["expires_at"] - file["created_at"] == 3600
    assert (await client.get(f"/v1/files/{file['id']}/content")).content == b"{}"


async def test_unknown_and_repeated_parts_of_an_upload_are_told(client: httpx.AsyncClient) -> None:
    data = {"purpose": "batch", "expires_in": "5"}
    answer = await client.post("/v1/files", data=data, files={"file": ("in.jsonl", b"{}")})
    assert answer.headers["x-emberline-warning"] == "ignored unknown fields: `expires_in`"
    twice = b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n{}\r\n' * 2 + b"--b--\r\n"
    headers = {"content-type": "multipart/form-data; boundary=b"}
    refused = await client.post("/v1/files", content=twice, headers=headers)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "file")


@pytest.mark.parametrize(
    ("data", "files", "param"),
    [
        ({"purpose": "batch"}, {}, "file"),
        ({}, {"file": ("f", b"x")}, "purpose"),
        ({"purpose": "world domination"}, {"file": ("f", b"x")}, "purpose"),
        ({"purpose": "batch", "expires_after[seconds]": "5"}, {"file": ("f", b"x")}, "seconds"),
    ],
)
async def test_bad_uploads(client: httpx.AsyncClient, data: Any, files: Any, param: str) -> None:
    files = files or {"other": ("f", b"x")}
    answer = await client.post("/v1/files", data=data, files=files)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert (await client.get("/v1/files")).json()["data"] == []


async def test_uploads_are_bounded(store: Database, service: FakeService, tmp_path: Path) -> None:
    async with (
        open_batch_service(store, service, tmp_path, max_file_bytes=1000) as batches,
        client_of(service, batches=batches) as client,
    ):
        answer = await client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("f", b"x" * 1001)})
        assert (answer.status_code, answer.json()["error"]["param"]) == (413, "file")
        assert (await client.post("/v1/files", json={})).status_code == 400
        assert (await client.get("/v1/files")).json()["data"] == []


@pytest.mark.parametrize("base", ["/v1", CF])
@on_both_databases
async def test_a_batch(client: httpx.AsyncClient, batches: BatchService, service: FakeService, base: str) -> None:
    made = await submit(client, jsonl([chat("a"), chat("b", n=2)]), base=base, metadata={"k": "v"})
    assert made["id"].startswith("batch_")
    assert (made["object"], made["status"], made["metadata"]) == ("batch", "validating", {"k": "v"})
    assert (made["output_file_id"], made["error_file_id"], made["errors"]) == (None, None, None)
    assert made["expires_at"] - made["created_at"] == 86_400
    batch = await finish(client, batches, service, made["id"], base)
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": 2, "completed": 2, "failed": 0, "cancelled": 0, "expired": 0}
    assert batch["created_at"] <= batch["in_progress_at"] <= batch["finalizing_at"] <= batch["completed_at"]
    assert (batch["usage"]["input_tokens"], batch["usage"]["output_tokens"]) == (24, 9)
    assert batch["error_file_id"] is None
    assert batch["queue"] == {"position": 0, "estimated_wait_s": 0.0}
    output = await client.get(f"{base}/files/{batch['output_file_id']}/content")
    one, two = lines_in(output)
    assert (one["custom_id"], one["error"], one["response"]["status_code"]) == ("a", None, 200)
    assert one["response"]["body"]["choices"][0]["message"]["content"] == "Hello!"
    assert one["response"]["body"]["usage"]["total_tokens"] == 15
    assert len(two["response"]["body"]["choices"]) == 2
    described = (await client.get(f"{base}/files/{batch['output_file_id']}")).json()
    assert (described["bytes"], described["purpose"]) == (len(output.content), "batch_output")
    assert {request.priority for request in service.requests} == {Priority.BATCH}
    assert {request.id for request in service.requests} == {f"{made['id']}-0", f"{made['id']}-1"}
    refused = await client.delete(f"{base}/files/{batch['output_file_id']}")
    assert refused.status_code == 400
    assert (await client.delete(f"{base}/batches/{made['id']}")).json()["deleted"] is True
    assert (await client.get(f"{base}/files/{batch['output_file_id']}/content")).status_code == 404
    assert (await client.get(f"{base}/batches/{made['id']}")).json()["error"]["code"] == "batch_not_found"


async def test_invalid_lines_do_not_fail_the_batch(
    client: httpx.AsyncClient, batches: BatchService, service: FakeService
) -> None:
    """The rest of the batch completes, and each invalid line has its error."""
    bad: list[tuple[Any, str | None, int, str]] = [
        (b"{not json", None, 400, "line 2: the body is not valid JSON"),
        (chat("a"), "a", 400, "line 3: `custom_id` 'a' is that of line 1 too"),
        (chat("nobody", model="gpt-17"), "nobody", 404, "line 4: No such model gpt-17"),
        ({key: value for key, value in chat("x").items() if key != "custom_id"}, None, 400, "`custom_id` is missing"),
        (chat("url") | {"url": "/v1/embeddings"}, "url", 400, "the batch is for /v1/chat/completions"),
        (chat("method") | {"method": "GET"}, "method", 400, "`method` must be POST"),
        (chat("stream", stream=True), "stream", 400, "`stream` has no meaning in a batch"),
        (chat("type", temperature="hot"), "type", 400, "`temperature` must be a number, not a string"),
        ({"custom_id": "body", "url": CHAT}, "body", 400, "`body` is missing"),
        (chat("long", "x" * (9 << 20)), None, 413, "the request is larger than"),
        (b"[1, 2]", None, 400, "must be an object"),
        (b'{"custom_id": "\xff"}', None, 400, "not valid UTF-8"),
    ]
    made = await submit(client, jsonl([chat("a"), *(line for line, *_ in bad), b"", chat("z")]))
    batch = await finish(client, batches, service, made["id"])
    assert batch["status"] == "completed"
    counts = batch["request_counts"]
    assert (counts["total"], counts["completed"], counts["failed"]) == (len(bad) + 2, 2, len(bad))
    output = lines_in(await client.get(f"/v1/files/{batch['output_file_id']}/content"))
    assert [line["custom_id"] for line in output] == ["a", "z"]
    errors = lines_in(await client.get(f"/v1/files/{batch['error_file_id']}/content"))
    for told, (_, custom_id, status, said) in zip(errors, bad, strict=True):
        assert (told["custom_id"], told["error"]) == (custom_id, None)
        assert told["response"]["status_code"] == status
        assert said in told["response"]["body"]["error"]["message"]
    assert errors[2]["response"]["body"]["error"]["code"] == "model_not_found"
    assert errors[7]["response"]["body"]["error"]["param"] == "body.temperature"
    assert len(service.requests) == 2


async def test_jobs_that_fail(client: httpx.AsyncClient, batches: BatchService, service: FakeService) -> None:
    """Errors use the client's field names."""

    async def refuses(request: GenerateRequest) -> Any:
        if request.output is not None:
            raise BadInput("`output` cannot be met", param="output")
        async for event in hello(request):
            yield event

    service.script = refuses
    wants = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    made = await submit(client, jsonl([chat("a", response_format=wants), chat("b")]))
    batch = await finish(client, batches, service, made["id"])
    (error,) = lines_in(await client.get(f"/v1/files/{batch['error_file_id']}/content"))
    assert error["response"]["status_code"] == 400
    assert error["response"]["body"]["error"]["param"].startswith("response_format")


async def test_other_endpoints(client: httpx.AsyncClient, batches: BatchService, service: FakeService) -> None:
    logprob = TextLogprob("Hey", -0.5, [72, 101, 121])
    service.script = says(ReasoningDelta(0, "Hm."), TextDelta(0, "Hey", [logprob]), ChoiceDone(0, "stop"))
    many = [
        {"custom_id": "a", "url": "/v1/completions", "body": {"model": MODEL, "prompt": "Once", "logprobs": 1}},
        {"custom_id": "b", "url": "/v1/completions", "body": {"model": MODEL, "prompt": ["One", "Two"]}},
    ]
    batch = await finish(client, batches, service, (await submit(client, jsonl(many), "/v1/completions"))["id"])
    (line,) = lines_in(await client.get(f"/v1/files/{batch['output_file_id']}/content"))
    choice = line["response"]["body"]["choices"][0]
    assert (choice["text"], choice["logprobs"]["tokens"]) == ("Hey", ["Hey"])
    (line,) = lines_in(await client.get(f"/v1/files/{batch['error_file_id']}/content"))
    assert "write a line for each" in line["response"]["body"]["error"]["message"]
    bodies: list[dict[str, Any]] = [
        {"model": MODEL, "input": "Hi", "instructions": "Be brief."},
        {"model": MODEL, "input": "Hi", "previous_response_id": "resp_1"},
        {"model": MODEL, "input": [{"type": "item_reference", "id": "msg_1"}]},
        {"model": MODEL, "input": "Hi", "background": True},
    ]
    many = [{"custom_id": str(i), "url": "/v1/responses", "body": body} for i, body in enumerate(bodies)]
    batch = await finish(client, batches, service, (await submit(client, jsonl(many), "/v1/responses"))["id"])
    (line,) = lines_in(await client.get(f"/v1/files/{batch['output_file_id']}/content"))
    body = line["response"]["body"]
    assert (body["object"], body["status"], body["store"], body["instructions"]) == (
        "response",
        "completed",
        False,
        "Be brief.",
    )
    assert [item["type"] for item in body["output"]] == ["reasoning", "message"]
    assert body["output"][1]["content"][0]["text"] == "Hey"
    errors = lines_in(await client.get(f"/v1/files/{batch['error_file_id']}/content"))
    assert [line["response"]["body"]["error"]["param"] for line in errors] == [
        "previous_response_id",
        "input",
        "background",
    ]


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"endpoint": "/v1/moderations"}, 400, "endpoint"),
        ({"completion_window": "soon"}, 400, "completion_window"),
        ({"completion_window": "400h"}, 400, "completion_window"),
        ({"input_file_id": "file-0"}, 404, "input_file_id"),
        ({"metadata": {"k": 1}}, 400, "metadata[...]"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 9}}, 400, "output_expires_after"),
    ],
)
async def test_bad_batches(client: httpx.AsyncClient, body: Any, status: int, param: str) -> None:
    file = await upload(client, jsonl([chat("a")]))
    good = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
    answer = await client.post("/v1/batches", json=good | body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text
    assert (await client.get("/v1/batches")).json()["data"] == []


async def test_a_file_for_something_else(client: httpx.AsyncClient) -> None:
    file = (await client.post("/v1/files", data={"purpose": "vision"}, files={"file": ("f", b"x")})).json()
    answer = await client.post("/v1/batches", json={"input_file_id": file["id"], "endpoint": CHAT})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input_file_id")


async def test_a_file_without_lines(client: httpx.AsyncClient, batches: BatchService, service: FakeService) -> None:
    made = await submit(client, b"\n \n\r\n")
    batch = await finish(client, batches, service, made["id"])
    assert batch["status"] == "failed"
    (error,) = batch["errors"]["data"]
    assert "no lines" in error["message"]
    assert batch["failed_at"] >= batch["created_at"]


async def test_too_many_lines(store: Database, service: FakeService, tmp_path: Path) -> None:
    async with (
        open_batch_service(store, service, tmp_path, max_jobs=600) as batches,
        client_of(service, batches=batches) as client,
    ):
        made = await submit(client, jsonl(chat(str(i)) for i in range(601)))
        batch = await finish(client, batches, service, made["id"])
        assert (batch["status"], batch["errors"]["data"][0]["code"]) == ("failed", "request_too_large")
        assert "600" in batch["errors"]["data"][0]["message"]
        assert service.requests == []


async def test_a_file_deleted_while_its_batch_runs(
    client: httpx.AsyncClient, batches: BatchService, service: FakeService
) -> None:
    made = await submit(client, jsonl([chat("a")]))
    assert (await client.delete(f"/v1/files/{made['input_file_id']}")).status_code == 200
    await batches.queue.purge_expired()
    batch = await finish(client, batches, service, made["id"])
    assert len(lines_in(await client.get(f"/v1/files/{batch['output_file_id']}/content"))) == 1


@on_both_databases
async def test_cancel_with_partial_results(
    client: httpx.AsyncClient, batches: BatchService, service: FakeService
) -> None:
    made = await submit(client, jsonl([chat("a"), chat("b"), chat("c")]))

    async def one() -> Any:
        return await batches.queue.claim("w", MODEL, 1)

    (lease,) = await until(one)
    status = (await client.get(f"/v1/batches/{made['id']}")).json()
    assert (status["status"], status["request_counts"]["total"]) == ("in_progress", 3)
    assert status["queue"]["position"] == 0
    await batches.queue.complete(
        lease, Answer([AnswerChoice([TextPart("Done.")])], Usage(prompt_tokens=1, completion_tokens=1))
    )
    cancelled = (await client.post(f"/v1/batches/{made['id']}/cancel")).json()
    assert cancelled["status"] in ("cancelling", "cancelled")
    batch = await finish(client, batches, service, made["id"])
    assert batch["status"] == "cancelled"
    assert batch["cancelled_at"] >= batch["cancelling_at"]
    (done,) = lines_in(await client.get(f"/v1/files/{batch['output_file_id']}/content"))
    assert done["response"]["body"]["choices"][0]["message"]["content"] == "Done."
    errors = lines_in(await client.get(f"/v1/files/{batch['error_file_id']}/content"))
    assert {line["error"]["code"] for line in errors} == {"batch_cancelled"}
    assert len(errors) == 2


async def test_cancel_one_job(client: httpx.AsyncClient, batches: BatchService, service: FakeService) -> None:
    made = await submit(client, jsonl([chat("a"), chat("b"), chat("c")]))
    path = f"/v1/batches/{made['id']}/cancel"

    async def loaded() -> bool:
        return (await batches.queue.batch("local", made["id"])).status == "in_progress"

    await until(loaded)
    status = (await client.post(path, params={"line": 1})).json()
    assert (status["status"], status["request_counts"]["cancelled"]) == ("in_progress", 1)
    assert (await client.post(path, params={"line": 3})).status_code == 400
    batch = await finish(client, batches, service, made["id"])
    assert batch["status"] == "completed"
    output = lines_in(await client.get(f"/v1/files/{batch['output_file_id']}/content"))
    assert [line["custom_id"] for line in output] == ["a", "c"]
    (error,) = lines_in(await client.get(f"/v1/files/{batch['error_file_id']}/content"))
    assert (error["custom_id"], error["error"]["code"]) == ("b", "batch_cancelled")


async def test_an_alias_stands_for_one_model_in_all_lines_of_a_batch(
    client: httpx.AsyncClient, batches: BatchService
) -> None:
    """Batches are divided between the models of an alias by weight, also after a restart in the same way."""
    await batches.close()
    await submit(client, jsonl([chat("a")]))
    batch = await batches.queue.claim_validating("me")
    assert batch is not None
    service, (old, new) = FakeService(), CARDS
    served = ServedModels()
    served.offer([ModelFiles(old, "/old"), ModelFiles(new, "/new")])
    aliases = Aliases(configured_table({"best": {old.id: 1, new.id: 1}}))
    service.models = Models(served, UpstreamModels(()), aliases)  # type: ignore[assignment]
    message = {"model": "best", "max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}]}
    lines = {"openai": chat("a", model="best"), "anthropic": {"custom_id": "a", "params": message}}

    def chosen(kind: str, name: str) -> str:
        read = job_reader(msgspec.structs.replace(batch, kind=kind, id=name), service)
        jobs = [read(FileLine(1, jsonl([lines[kind]]))) for _ in range(4)]
        (model,) = {job.request.model for job in jobs if job.request is not None}
        return model

    for kind in lines:
        found = {name: chosen(kind, name) for name in map("batch-{}".format, range(40))}
        assert found == {name: chosen(kind, name) for name in found}
        assert set(found.values()) == {old.id, new.id}


async def test_cancel_while_the_last_line_is_loaded(client: httpx.AsyncClient, batches: BatchService) -> None:
    """The batch starts between the read and the write of the cancellation, and is cancelled all the same."""
    await batches.close()
    made = await submit(client, jsonl([chat("a")]))
    batch = await batches.queue.claim_validating("me")
    assert batch is not None
    await batches.queue.append(batch, [job_reader(batch, FakeService())(FileLine(1, jsonl([chat("a")])))])
    stale = [await batches.queue.batch("local", made["id"])]
    await batches.queue.start(batch)

    async def late(look: Any) -> Batch:
        return stale.pop() if stale else await look()

    assert isinstance(batches.queue, FaultyQueue)
    batches.queue.around["batch"] = late
    assert (await batches.queue.cancel("local", made["id"])).status == "cancelled"
    assert not stale


async def test_expiry_with_partial_results(
    client: httpx.AsyncClient, batches: BatchService, service: FakeService, store: FaultyStore
) -> None:
    made = await submit(client, jsonl([chat("a"), chat("b")]), completion_window="1m")
    assert made["expires_at"] - made["created_at"] == 60

    async def one() -> Any:
        return await batches.queue.claim("test-puller", MODEL, 1)

    await run_one(batches.queue, service, (await until(one))[0])
    store.later_us = 61_000_000
    await batches.queue.sweep()
    batch = (await client.get(f"/v1/batches/{made['id']}")).json()
    assert (batch["status"], batch["request_counts"]["expired"]) == ("expired", 1)
    assert batch["expired_at"] >= batch["expires_at"]
    assert len(lines_in(await client.get(f"/v1/files/{batch['output_file_id']}/content"))) == 1
    (error,) = lines_in(await client.get(f"/v1/files/{batch['error_file_id']}/content"))
    assert (error["response"], error["error"]["code"]) == (None, "batch_expired")


@on_both_databases
async def test_every_process_finds_the_batch(database: DatabaseLocation, service: FakeService, tmp_path: Path) -> None:
    """HTTP processes share nothing but the store."""
    stores = [await database.open(), await database.open()]
    async with (
        open_batch_service(stores[0], service, tmp_path) as one,
        open_batch_service(stores[1], service, tmp_path) as two,
        client_of(service, batches=one) as here,
        client_of(service, batches=two) as there,
    ):
        await one.close()  # so the other's loader has it to do
        made = await submit(here, jsonl([chat("a")]))
        two.wake()
        batch = await finish(there, two, service, made["id"])
        for client in (here, there):
            (line,) = lines_in(await client.get(f"/v1/files/{batch['output_file_id']}/content"))
            assert line["custom_id"] == "a"
        response = (await here.post("/v1/responses", json={"model": MODEL, "input": "Hi", "background": True})).json()
        await run_all(two.queue, service)
        assert (await there.get(f"/v1/responses/{response['id']}")).json()["status"] == "completed"
    for store in stores:
        await store.close()


async def test_queue_position(client: httpx.AsyncClient, batches: BatchService) -> None:
    made = await submit(client, jsonl(chat(str(i)) for i in range(2000)))

    async def loaded() -> bool:
        return (await batches.queue.batch("local", made["id"])).status == "in_progress"

    await until(loaded)
    status = (await client.get(f"/v1/batches/{made['id']}")).json()
    assert status["request_counts"]["total"] == 2000
    assert status["queue"]["position"] == 0
    behind = await submit(client, jsonl([chat("last")]))

    async def placed() -> Any:
        found = (await client.get(f"/v1/batches/{behind['id']}")).json()
        return found["queue"] if found["status"] == "in_progress" else None

    assert (await until(placed))["position"] == 2000


async def test_lists(client: httpx.AsyncClient) -> None:
    made = [(await submit(client, jsonl([chat("a")])))["id"] for _ in range(5)]
    first = (await client.get("/v1/batches", params={"limit": 2})).json()
    assert ([row["id"] for row in first["data"]], first["has_more"]) == (made[:2:-1], True)
    rest = (await client.get("/v1/batches", params={"limit": 3, "after": first["last_id"]})).json()
    assert ([row["id"] for row in rest["data"]], rest["has_more"]) == (made[2::-1], False)
    other = await client.get("/client/v4/accounts/other/ai/v1/batches")
    assert other.json()["data"] == []
    assert (await client.get("/v1/batches", params={"after": "batch_0"})).status_code == 404
    assert (await client.get("/v1/batches", params={"limit": 0})).status_code == 400


async def test_idempotency(client: httpx.AsyncClient, batches: BatchService) -> None:
    files = [await upload(client, content, **{"idempotency-key": "f"}) for content in (b"x", b"x")]
    assert files[0] == files[1]
    assert len((await client.get("/v1/files")).json()["data"]) == 1
    form: Any = {"data": {"purpose": "batch"}, "files": {"file": ("in.jsonl", b"y")}}
    assert (await client.post("/v1/files", **form, headers={"idempotency-key": "f"})).status_code == 422
    assert len((await client.get("/v1/files")).json()["data"]) == 1
    body = {"input_file_id": files[0]["id"], "endpoint": CHAT}
    key = {"idempotency-key": "b"}
    first = await client.post("/v1/batches", json=body, headers=key)
    again = await client.post("/v1/batches", json=body, headers=key)
    assert first.content == again.content
    assert again.headers["idempotent-replayed"] == "true"
    other = await client.post("/v1/batches", json=body | {"metadata": {"a": "b"}}, headers=key)
    assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_key_reused")
    assert len((await client.get("/v1/batches")).json()["data"]) == 1


async def test_concurrent_and_failed_submissions(client: httpx.AsyncClient, batches: BatchService) -> None:
    """A concurrent submission is a conflict; after a failure the retry has the same id, and there is one batch."""
    file = await upload(client, jsonl([chat("a")]))
    slow = asyncio.Event()
    ids: list[str] = []

    async def waits(create: Any, new: NewBatch) -> Batch:
        ids.append(new.id)
        if len(ids) > 1:
            return await create()
        await slow.wait()
        await create()
        raise Unavailable("the store went away after the commit")

    assert isinstance(batches.queue, FaultyQueue)
    batches.queue.around["create"] = waits
    body = {"input_file_id": file["id"], "endpoint": CHAT}

    async def post() -> httpx.Response:
        return await client.post("/v1/batches", json=body, headers={"idempotency-key": "k"})

    first = asyncio.create_task(post())
    while not ids:
        await asyncio.sleep(0.01)
    busy = await post()
    assert (busy.status_code, busy.json()["error"]["code"]) == (409, "conflict")
    slow.set()
    assert (await first).status_code == 503
    again = await post()
    assert (again.status_code, again.json()["id"]) == (200, ids[0])
    assert ids == [ids[0]] * 2
    assert len((await client.get("/v1/batches")).json()["data"]) == 1


async def test_loading_resumes_after_a_crash(store: FaultyStore, service: FakeService, tmp_path: Path) -> None:
    """Another process resumes, and knows the custom ids that it has not read itself."""
    content = jsonl([*(chat(str(i)) for i in range(700)), chat("7")])
    async with open_batch_service(store, service, tmp_path) as batches:
        await batches.close()
        async with client_of(service, batches=batches) as client:
            made = await submit(client, content)
        batch = await batches.queue.claim_validating("dead")
        assert batch is not None
        reader = job_reader(batch, service)
        given = [line async for line in file_lines(batches.queue.blobs.stream(str(batch.input_blob)), 1 << 20)]
        await batches.queue.append(batch, [reader(line) for line in given[:500]])
        store.later_us = 100_000_000
        async with (
            open_batch_service(store, service, tmp_path) as next_service,
            client_of(service, batches=next_service) as client,
        ):
            ended = await finish(client, next_service, service, made["id"])
            assert (ended["request_counts"]["completed"], ended["request_counts"]["failed"]) == (700, 1)
            (error,) = lines_in(await client.get(f"/v1/files/{ended['error_file_id']}/content"))
            assert "is that of line 8 too" in error["response"]["body"]["error"]["message"]


async def test_loading_a_large_batch_does_not_block_the_event_loop(
    client: httpx.AsyncClient, batches: BatchService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two runs of another task only a few dozen lines are read."""
    n_turns, read_at = 0, Counter[int]()
    read = OpenAIJobReader.__call__

    def counted(self: OpenAIJobReader, line: FileLine) -> NewJob:
        read_at[n_turns] += 1
        return read(self, line)

    monkeypatch.setattr(OpenAIJobReader, "__call__", counted)
    made = await submit(client, jsonl(chat(str(i), "x" * 2000) for i in range(2000)))
    while read_at.total() < 2000:
        n_turns += 1
        await asyncio.sleep(0)
    assert max(read_at.values()) < 2 * (48 << 10) / 2000  # two loaders may have a turn each

    async def loaded() -> bool:
        return (await batches.queue.batch("local", made["id"])).status == "in_progress"

    await until(loaded)


async def test_without_a_queue(service: FakeService) -> None:
    async with client_of(service) as client:
        for path in ("/v1/files", "/v1/batches", "/v1/messages/batches"):
            assert (await client.get(path)).status_code == 503
        answer = await client.post("/v1/responses", json={"model": MODEL, "input": "Hi", "background": True})
        assert (answer.status_code, json.loads(answer.content)["error"]["code"]) == (503, "unavailable")
