"""End-to-end tests of batches and webhooks: a real server, official clients, a webhook receiver, the command line."""

import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import httpx
import pytest
from standardwebhooks.webhooks import Webhook

from tests.api.server_process import make_home, serving
from tests.cli import console
from tests.examples import EVERY_EXAMPLE
from tests.lazy_modules import anthropic, cloudflare, openai

T = TypeVar("T")
MODEL = "@cf/huggingfacetb/smollm2-135m-instruct"
CHAT = "/v1/chat/completions"
HTTP_WORKERS = "2" if EVERY_EXAMPLE else "1"  # several learn of each other's jobs and events by polling


class Got(NamedTuple):
    path: str
    headers: dict[str, str]
    body: bytes


class Receiver(ThreadingHTTPServer):
    """Responds according to the path: /ok, /redirect, /gone, /hang."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.daemon_threads = True
        self.got: list[Got] = []
        self.over = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def at(self, path: str) -> list[Got]:
        return [got for got in self.got if got.path == path]


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.got.append(Got(self.path, headers, body))
        if self.path == "/hang":
            self.server.over.wait(60)
            return
        self.send_response({"/redirect": 302, "/gone": 410}.get(self.path, 204))
        if self.path == "/redirect":
            self.send_header("location", f"{self.server.url}/ok")
        self.end_headers()


class Walk(NamedTuple):
    url: str
    home: Path
    receiver: Receiver
    http: httpx.Client
    openai: "openai.OpenAI"

    def endpoint(self, path: str, **more: Any) -> dict[str, Any]:
        made = self.http.post("/v1/webhook_endpoints", json={"url": self.receiver.url + path} | more)
        assert made.status_code == 200, made.text
        return dict(made.json())

    def deliveries(self, endpoint: dict[str, Any]) -> list[dict[str, Any]]:
        found = self.http.get(f"/v1/webhook_endpoints/{endpoint['id']}/deliveries").json()
        return list(found["data"])

    def submit(self, lines: list[Any], **more: Any) -> Any:
        text = b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines)
        file = self.openai.files.create(file=("in.jsonl", text), purpose="batch")
        asked: dict[str, Any] = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
        return self.openai.batches.create(**asked | more)

    def ended(self, batch: Any) -> Any:
        over = ("completed", "failed", "expired", "cancelled")
        return until(lambda: self.openai.batches.retrieve(batch.id), lambda found: found.status in over)


def until(look: Callable[[], T], ready: Callable[[T], Any] = bool, limit_s: float = 90) -> T:
    end_s = time.monotonic() + limit_s
    while not ready(found := look()):
        assert time.monotonic() < end_s, found
        time.sleep(0.05)
    return found


@pytest.fixture(scope="module")
def walk(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Walk]:
    home = make_home(smollm2, tmp_path_factory.mktemp("walk"))
    (home / "emberline.toml").write_text('[webhooks]\nallowed_networks = ["127.0.0.0/8"]\ntimeout_s = 3\n')
    receiver = Receiver()
    thread = threading.Thread(target=receiver.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    with (
        serving(home, "say=echo,itl_ms=2", 8, "--http-workers", HTTP_WORKERS) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield Walk(server.url, home, receiver, http, client)
    receiver.over.set()
    receiver.shutdown()
    thread.join()
    receiver.server_close()


def line(name: str, text: str = "Say it.", **more: Any) -> dict[str, Any]:
    body = {"model": "smollm2", "messages": [{"role": "user", "content": text}], "max_tokens": 8} | more
    return {"custom_id": name, "method": "POST", "url": CHAT, "body": body}


def test_a_batch_with_every_kind_of_failure(walk: Walk) -> None:
    endpoint = walk.endpoint("/ok", events=["batch.completed"])
    big = b'{"custom_id": "big", "url": "%b", "body": {"x": "%b"}}' % (CHAT.encode(), b"x" * (8 << 20))
    lines: list[Any] = [line(f"c{n}") for n in range(6)]
    lines += [line("c6", model="no/such"), b"this is not JSON", line("c0", "again"), big, line("bad", max_tokens=-1)]
    lines += [line("last")]
    batch = walk.submit(lines, metadata={"for": "all"})
    assert walk.openai.files.delete(batch.input_file_id).deleted  # while it is read or runs
    done = walk.ended(batch)
    counts = done.request_counts
    assert (done.status, counts.total, counts.completed, counts.failed) == ("completed", 12, 7, 5)
    good = [json.loads(text) for text in walk.openai.files.content(done.output_file_id).text.splitlines()]
    assert [item["custom_id"] for item in good] == [f"c{n}" for n in range(6)] + ["last"]
    bad = [json.loads(text) for text in walk.openai.files.content(done.error_file_id).text.splitlines()]
    told = [(item["custom_id"], item["response"]["body"]["error"]["message"]) for item in bad]
    assert [name for name, _ in told] == ["c6", None, "c0", None, "bad"]
    for (_, message), (at, words) in zip(
        told,
        [(7, "no/such"), (8, "JSON"), (9, "that of line 1"), (10, "larger than"), (11, "max_tokens")],
        strict=True,
    ):
        assert message.startswith(f"line {at}: ")
        assert words in message
    sums = [item["response"]["body"]["usage"] for item in good]
    assert done.usage.input_tokens == sum(used["prompt_tokens"] for used in sums)
    cached = sum(used["prompt_tokens_details"]["cached_tokens"] for used in sums)
    assert done.usage.input_tokens_details.cached_tokens == cached > 0
    (got,) = until(lambda: walk.receiver.at("/ok"))
    told_event = Webhook(endpoint["secret"]).verify(got.body, got.headers)
    assert (told_event["type"], told_event["data"]["id"]) == ("batch.completed", batch.id)
    assert got.headers["webhook-id"] == told_event["id"]
    walk.http.delete(f"/v1/webhook_endpoints/{endpoint['id']}")


def test_webhooks_that_go_wrong(walk: Walk) -> None:
    ends = {path: walk.endpoint(path, events=["batch.completed"]) for path in ("/redirect", "/gone", "/hang")}
    n_ok = len(walk.receiver.at("/ok"))
    assert walk.ended(walk.submit([line("a")])).status == "completed"
    where = f"/v1/webhook_endpoints/{ends['/gone']['id']}"
    gone = until(lambda: walk.http.get(where).json(), lambda found: not found["enabled"])
    assert "410" in gone["disabled_reason"]
    for path, said in (("/redirect", {"status": 302}), ("/hang", {"problem": "no answer within 3 s"})):

        def failed_so(path: str = path, said: dict[str, Any] = said) -> list[dict[str, Any]]:
            """The deliveries with such an attempt. A busy machine may answer the first one too late."""
            made = walk.deliveries(ends[path])
            return [one for one in made if any(said.items() <= each.items() for each in one["attempts"])]

        (delivery,) = until(failed_so)
        assert delivery["finished_at"] is None
        assert delivery["next_attempt_at"] > delivery["attempts"][0]["started_at"]
    assert len(walk.receiver.at("/ok")) == n_ok, "a redirect is not followed"
    for end in ends.values():
        walk.http.delete(f"/v1/webhook_endpoints/{end['id']}")
    for url in ("https://10.0.0.1/x", "https://[::1]/x", "https://169.254.169.254/latest", "http://example.com/x"):
        refused = walk.http.post("/v1/webhook_endpoints", json={"url": url})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "url"), refused.text


def test_rotation_log_and_replay(walk: Walk) -> None:
    endpoint = walk.endpoint("/ok", events=["response.completed"])
    n_before = len(walk.receiver.at("/ok"))
    rotated = walk.http.post(f"/v1/webhook_endpoints/{endpoint['id']}/rotate", json={}).json()
    assert rotated["secret"] != endpoint["secret"]
    response = walk.openai.responses.create(model="smollm2", input="Hi", background=True)
    first = until(lambda: walk.receiver.at("/ok")[n_before:])[0]
    for secret in (endpoint["secret"], rotated["secret"]):
        told = Webhook(secret).verify(first.body, first.headers)
        assert told["data"]["id"] == response.id
    unwrapped = openai.OpenAI(api_key="none", webhook_secret=rotated["secret"]).webhooks.unwrap(
        first.body, first.headers
    )
    assert (unwrapped.type, unwrapped.data.id) == ("response.completed", response.id)
    (logged,) = until(lambda: [one for one in walk.deliveries(endpoint) if one["finished_at"]])
    walk.http.post(f"/v1/webhook_endpoints/{endpoint['id']}/replay", json={"delivery_id": logged["id"]})
    again = until(lambda: walk.receiver.at("/ok")[n_before + 1 :])[0]
    assert again.headers["webhook-id"] == first.headers["webhook-id"]
    logged_ids = {one["id"] for one in walk.deliveries(endpoint)}
    walk.http.post(f"/v1/webhook_endpoints/{endpoint['id']}", json={"enabled": False})
    other = walk.endpoint("/other", events=["response.completed"])
    walk.openai.responses.create(model="smollm2", input="Hi", background=True)
    until(lambda: walk.receiver.at("/other"))  # one transaction creates an event's deliveries to all endpoints
    assert {one["id"] for one in walk.deliveries(endpoint)} == logged_ids
    assert len(walk.receiver.at("/ok")) == n_before + 2
    for end in (endpoint, other):
        walk.http.delete(f"/v1/webhook_endpoints/{end['id']}")


def test_workers_ai_with_cloudflare_s_client_and_events(walk: Walk) -> None:
    client = cloudflare.Cloudflare(api_token="none", base_url=f"{walk.url}/client/v4", max_retries=0)
    base = f"{walk.url}/client/v4/accounts/acme"
    subscription = walk.http.post(
        f"{base}/event_subscriptions/subscriptions",
        json={
            "name": "mine",
            "enabled": True,
            "source": {"type": "workersAi.model", "model_name": MODEL},
            "destination": {"type": "webhook", "url": f"{walk.receiver.url}/cf"},
            "events": ["batch.queued", "batch.succeeded", "batch.failed"],
        },
    ).json()
    requests = [{"prompt": f"Say {n}.", "external_reference": f"ref-{n}"} for n in range(3)]
    requests.append({"prompt": 7, "external_reference": "bad"})
    queued: Any = client.ai.run(
        MODEL, account_id="acme", extra_query={"queueRequest": "true"}, extra_body={"requests": requests}
    )
    assert queued["status"] == "queued"
    asked = {"request_id": queued["request_id"]}

    def poll() -> Any:
        return client.ai.run(MODEL, account_id="acme", extra_body=asked)

    found = until(poll, lambda answer: "responses" in answer)
    assert [item["external_reference"] for item in found["responses"]] == ["ref-0", "ref-1", "ref-2", "bad"]
    assert [item["success"] for item in found["responses"]] == [True, True, True, False]
    assert [item["id"] for item in found["responses"]] == [0, 1, 2, 3]
    assert found["usage"]["total_tokens"] > 0
    got = until(lambda: walk.receiver.at("/cf"), lambda got: len(got) >= 2)
    told = sorted((json.loads(one.body) for one in got), key=lambda one: one["type"])
    assert [one["type"].rpartition(".")[2] for one in told] == ["queued", "succeeded"]
    assert told[1]["source"] == {"type": "workersAi.model", "modelName": MODEL}
    assert told[1]["payload"] == {"requestId": queued["request_id"]}
    assert told[1]["metadata"]["accountId"] == "acme"
    assert told[1]["metadata"]["eventSubscriptionId"] == subscription["result"]["id"]
    assert told[1]["metadata"]["eventSchemaVersion"] == 1
    by_option = walk.http.post(
        f"{base}/ai/run/{MODEL}", json={"prompt": "Hi", "options": {"queueRequest": True}}
    ).json()["result"]
    assert by_option["status"] == "queued"


def test_anthropic_s_client(walk: Walk) -> None:
    client = anthropic.Anthropic(base_url=walk.url, api_key="none", max_retries=0)
    params: Any = {"model": "smollm2", "max_tokens": 8, "messages": [{"role": "user", "content": "Hi"}]}
    made = client.messages.batches.create(
        requests=[{"custom_id": "a", "params": params}, {"custom_id": "b", "params": params | {"model": "no/such"}}]
    )
    assert made.queue["position"] >= 0  # type: ignore[attr-defined]
    ended = until(lambda: client.messages.batches.retrieve(made.id), lambda one: one.processing_status == "ended")
    assert (ended.request_counts.succeeded, ended.request_counts.errored) == (1, 1)
    kinds = {result.custom_id: result.result.type for result in client.messages.batches.results(made.id)}
    assert kinds == {"a": "succeeded", "b": "errored"}


def test_cancel_a_running_job_and_a_batch(walk: Walk) -> None:
    long = {"max_tokens": 8000, "ignore_eos": True, "min_tokens": 8000}
    batch = walk.submit([line("a"), line("b", **long), line("c", **long)])
    until(lambda: walk.openai.batches.retrieve(batch.id).request_counts.completed == 1)
    walk.http.post(f"/v1/batches/{batch.id}/cancel", params={"line": 1}, json={})
    found = until(lambda: walk.openai.batches.retrieve(batch.id), lambda one: one.request_counts.failed == 1)
    assert found.status == "in_progress"
    walk.openai.batches.cancel(batch.id)
    done = walk.ended(batch)
    assert (done.status, done.request_counts.completed, done.request_counts.failed) == ("cancelled", 1, 2)
    errors = [json.loads(text) for text in walk.openai.files.content(done.error_file_id).text.splitlines()]
    assert [item["error"]["code"] for item in errors] == ["batch_cancelled"] * 2


def test_the_same_submission_twice(walk: Walk) -> None:
    key = {"Idempotency-Key": f"k-{time.time_ns()}"}
    body = {"model": "smollm2", "input": "Hi", "background": True}
    first, again = (walk.http.post("/v1/responses", json=body, headers=key) for _ in range(2))
    assert first.json()["id"] == again.json()["id"]
    assert again.headers["idempotent-replayed"] == "true"
    other = walk.http.post("/v1/responses", json=body | {"input": "Ho"}, headers=key)
    assert other.status_code == 422


def test_events_by_long_poll_and_stream(walk: Walk) -> None:
    last = walk.http.get("/v1/events").json()["data"][-1]["id"]
    batch = walk.submit([line("a")])
    walk.ended(batch)

    def page() -> list[str]:
        found = walk.http.get("/v1/events", params={"after": last, "wait": 10}).json()["data"]
        return [event["data"]["id"] for event in found if event["type"] == "batch.completed"]

    assert batch.id in until(page)
    with walk.http.stream("GET", "/v1/events", params={"stream": "true", "after": last}) as stream:
        for text in stream.iter_lines():
            if text.startswith("data: ") and json.loads(text[6:])["data"]["id"] == batch.id:
                break


def emberline(walk: Walk, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return console.emberline(*arguments, "--port", walk.url.rpartition(":")[2], home=walk.home)


def test_the_command_line(walk: Walk, tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text("\n".join(json.dumps(line(f"c{n}")) for n in range(20)) + "\nnot JSON\n")
    watched = emberline(walk, "batch", "submit", str(file), "--watch")
    assert watched.returncode == 0, watched.stderr
    batch_id = watched.stdout.split()[0]
    assert "20 of 21 done, 1 failed" in watched.stdout
    shown = json.loads(emberline(walk, "batch", "status", batch_id, "--json").stdout)
    assert shown["queue"] == {"position": 0, "estimated_wait_s": 0.0}
    answers = emberline(walk, "batch", "results", batch_id).stdout.splitlines()
    assert len(answers) == 20
    assert "JSON" in emberline(walk, "batch", "results", batch_id, "--errors").stdout
    assert batch_id in emberline(walk, "batch", "ls").stdout
    slow = {"max_tokens": 8000, "ignore_eos": True, "min_tokens": 8000}
    file.write_text("\n".join(json.dumps(line(f"c{n}", **slow)) for n in range(30)))
    batch_id = emberline(walk, "batch", "submit", str(file)).stdout.strip()
    until(lambda: walk.http.get("/api/queue").json()["waiting"])
    status = emberline(walk, "batch", "status", batch_id).stdout
    assert "before it" in status
    assert "ready in" in status
    assert "smollm2-135m-instruct" in emberline(walk, "queue").stdout
    one = emberline(walk, "batch", "cancel", batch_id, "--line", "3")
    assert "in_progress" in one.stdout
    stopped = emberline(walk, "batch", "cancel", batch_id)
    assert "cancel" in stopped.stdout
    until(lambda: walk.openai.batches.retrieve(batch_id).status == "cancelled")
