"""Predictors served by Cog's own server in the sandbox: the contract, and predictors that misbehave."""

import asyncio
import base64
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from emberline.catalog.model_store import ModelEntry, ModelStore
from emberline.catalog.predictor_cards import publish
from emberline.cluster.timings import Timings
from emberline.config import resolve
from emberline.predictor.versions import PredictorVersions, PushSettings
from emberline.protocol.prediction import Resources
from emberline.server.address import ServerAddress
from emberline.server.core_process import serve
from emberline.server.listener import bind
from emberline.supervisor.sandbox.protections import find_protections
from tests.predictor.conftest import FileServer, copy_project

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not find_protections().bubblewrap, reason="needs bubblewrap: it is not here"),
]

LIMIT_S = 300.0
RESOURCES = Resources(memory_bytes=512 << 20, scratch_bytes=64 << 20, cpus=2.0, setup_s=60.0, predict_s=20.0)
TIMINGS = Timings(model_scan_s=0.05)
PIXEL = "data:text/plain;base64,eA=="


class Serving:
    """A running server whose data folder has pushed predictors."""

    def __init__(self, address: ServerAddress, versions: PredictorVersions, store: ModelStore) -> None:
        self.versions, self.store = versions, store
        self.http = httpx.AsyncClient(base_url=f"{address.url}/client/v4/accounts/local/ai", timeout=LIMIT_S)
        self.root = httpx.AsyncClient(base_url=address.url, timeout=LIMIT_S)

    async def run(self, model: str, query: str = "", **inputs: Any) -> httpx.Response:
        return await self.http.post(f"/run/@me/{model}{query}", content=json.dumps(inputs))

    async def result(self, model: str, **inputs: Any) -> Any:
        answer = await self.run(model, **inputs)
        assert answer.status_code == 200, answer.text
        return answer.json()["result"]

    async def error(self, model: str, **inputs: Any) -> str:
        answer = await self.run(model, **inputs)
        assert answer.status_code != 200, answer.text
        return str(answer.json()["errors"][0]["message"])

    async def problem(self, model: str) -> str:
        """The error that the model's card shows; empty if it shows none."""
        found = (await self.root.get(f"/v1/models/@me/{model}")).json()
        return str(found.get("problem", ""))

    async def states(self) -> dict[str, str]:
        found = (await self.root.get("/api/ps")).json()["model_states"]
        return {model["id"]: model["state"] for model in found}


@asynccontextmanager
async def serving(
    versions: PredictorVersions, tmp_path: Path, names: Sequence[str], settings: Mapping[str, Any] | None = None
) -> AsyncIterator[Serving]:
    home = tmp_path / "home"
    store = ModelStore(home)
    entries = [store.resolve(f"@me/{name}") for name in names]
    models = [entry.card.id for entry in entries]
    fixed = {"server.port": 0, "server.drain_timeout_s": 2, "engine.models": models}
    config = resolve(fixed | dict(settings or {}), {}, home)
    stop = asyncio.Event()
    ready: asyncio.Future[ServerAddress] = asyncio.get_running_loop().create_future()

    def announce(address: ServerAddress, entries: Sequence[ModelEntry], workers: Sequence[dict[str, Any]]) -> None:
        ready.set_result(address)

    with bind(config.server) as listener:
        running = asyncio.create_task(serve(config, entries, listener, announce, stop, TIMINGS))
        await asyncio.wait([running, ready], timeout=LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
        assert ready.done(), running
        server = Serving(ready.result(), versions, store)
        try:
            yield server
        finally:
            await server.http.aclose()
            await server.root.aclose()
            stop.set()
            await asyncio.wait_for(running, 60)


def push(versions: PredictorVersions, tmp_path: Path, name: str, project: str, config: str = "", **more: Any) -> None:
    push_folder(versions, tmp_path, copy_project(tmp_path / "projects" / name, project, config), name=name, **more)


def push_folder(versions: PredictorVersions, tmp_path: Path, folder: Path, **more: Any) -> None:
    settings = PushSettings(**{"resources": RESOURCES} | more)
    manifest = versions.push(folder, settings, lambda line: None)
    publish(ModelStore(tmp_path / "home"), manifest, versions.path(manifest))


async def until(holds: Callable[[], Any]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not await holds():
            await asyncio.sleep(0.02)


async def test_the_contract(versions: PredictorVersions, tmp_path: Path) -> None:
    push(versions, tmp_path, "features", "features")
    push(versions, tmp_path, "picture", "picture")
    async with serving(versions, tmp_path, ["features", "picture"]) as server:
        assert await server.result("features", text="hi", n=2) == ["hi", "hi"]
        assert await server.result("features", input={"text": "as Cog has it"}) == ["as Cog has it"]
        assert await server.result("features", act="context", context={"who": "me"}) == ["{'who': 'me'}"]
        counted = (await server.run("features", act="metric", text="three short words")).json()
        assert counted["metrics"]["words"] == 3
        stream = await server.run("features", text="a", n=3, stream=True)
        events = [json.loads(line[6:]) for line in stream.text.splitlines() if line.startswith('data: {"response":"a"')]
        assert len(events) == 3
        assert stream.text.endswith("data: [DONE]\n\n")
        data = "data:text/plain;base64," + base64.b64encode(b"in a file").decode()
        assert await server.result("features", act="file", file=data) == ["in a file"]
        image = await server.http.post("/run/@me/picture", content=b"\x01\x02", headers={"content-type": "image/png"})
        assert (image.content, image.headers["content-type"]) == (b"\x89PNG\x02\x01", "image/png")
        began = asyncio.get_running_loop().time()
        await asyncio.gather(*(server.run("picture", image=data, wait_s=1.0) for _ in range(3)))
        assert asyncio.get_running_loop().time() - began < 2.9, "three slots"
        schema = (await server.http.get("/models/schema", params={"model": "@me/features"})).json()["result"]
        assert schema["input"]["properties"]["n"]["maximum"] == 5
        wrong = {"unknown": 1}, {"text": 3}, {"n": 9}, {"act": "dance"}, {"file": "/etc/passwd"}
        for inputs in wrong:
            assert (await server.run("features", **inputs)).status_code == 400, inputs
        assert "cannot do it" in await server.error("features", act="fail", text="it")
        chat = await server.root.post("/v1/chat/completions", json={"model": "@me/features", "messages": []})
        assert chat.status_code == 400


async def test_files_behind_urls_are_fetched_by_the_core(
    versions: PredictorVersions, tmp_path: Path, files: FileServer
) -> None:
    push(versions, tmp_path, "features", "features")
    (files.folder / "note.txt").write_text("behind a URL")
    settings = {"images.allowed_networks": ["127.0.0.0/8"]}
    async with serving(versions, tmp_path, ["features"], settings) as server:
        assert await server.result("features", act="file", file=files.url("note.txt")) == ["behind a URL"]
        gone = await server.error("features", act="file", file=files.url("gone.txt"))
        assert "the file of `file` cannot be used" in gone
        assert "answers with status 404" in gone
    async with serving(versions, tmp_path, ["features"]) as server:
        inside = await server.error("features", act="file", file=files.url("note.txt"))
        assert "is inside the network" in inside


async def test_queued_predictions(versions: PredictorVersions, tmp_path: Path) -> None:
    push(versions, tmp_path, "features", "features")
    async with serving(versions, tmp_path, ["features"]) as server:
        requests = [{"text": str(n), "external_reference": f"r{n}"} for n in range(4)] + [{"act": "fail"}, {"n": 99}]
        queued = await server.run("features", "?queueRequest=true", requests=requests)
        request_id = queued.json()["result"]["request_id"]

        async def is_done() -> bool:
            answer = (await server.run("features", request_id=request_id)).json()["result"]
            return "responses" in answer

        await until(is_done)
        found = (await server.run("features", request_id=request_id)).json()["result"]["responses"]
        assert [each.get("result") for each in found] == [["0"], ["1"], ["2"], ["3"], None, None]
        assert [each["success"] for each in found] == [True] * 4 + [False] * 2


async def test_prices_by_second_and_prediction(versions: PredictorVersions, tmp_path: Path) -> None:
    push(versions, tmp_path, "features", "features")
    async with serving(versions, tmp_path, ["features"]) as server:
        price = {"model": "@me/features", "second": "0.5", "prediction": "0.25"}
        assert (await server.root.post("/api/prices", json=price)).status_code == 200
        await server.result("features", text="x")
        (row,) = (await server.root.get("/api/usage")).json()["data"]
        assert row["predictions"] == 1
        assert float(row["cost"]) == pytest.approx(0.25 + 0.5 * float(row["compute_seconds"]))


RULES = """[[gateways]]
name = "strict"
cache_ttl_s = 600
log_content = true
[[gateways.guardrails]]
name = "words"
pattern = "forbidden"
"""


async def test_rules_of_a_gateway(versions: PredictorVersions, tmp_path: Path) -> None:
    push(versions, tmp_path, "features", "features")
    push(versions, tmp_path, "picture", "picture")
    (tmp_path / "home" / "emberline.toml").write_text(RULES)
    async with serving(versions, tmp_path, ["features"]) as server:
        server.http.headers["cf-aig-gateway-id"] = "strict"
        first, second = [await server.run("features", act="metric", text="a b", secret="hush") for _ in range(2)]
        assert [each.headers["cf-aig-cache-status"] for each in (first, second)] == ["MISS", "HIT"]
        assert first.json() == second.json()
        usage = (await server.root.get("/api/usage")).json()["total"]
        assert usage["requests"] == 1, "a hit computes and costs nothing"
        assert "blocked by the guardrail 'words'" in await server.error("features", text="a forbidden word")
        del server.http.headers["cf-aig-gateway-id"]
        options = {"gateway": {"id": "strict"}}
        assert "blocked by the guardrail" in await server.error("features", text="forbidden", options=options)
        queued = {**options, "queueRequest": True}
        assert "a gateway answers at once" in await server.error("features", text="forbidden", options=queued)
        server.http.headers["cf-aig-gateway-id"] = "strict"
        assert "blocked by the guardrail 'words'" in await server.error(
            "features", act="context", context={"a": "forbidden"}
        )
        for_built = await server.error("features", act="join", text="for,bidden")
        assert "the reply was blocked" in for_built
        stream = await server.run("features", act="join", text="for,bidden", stream=True)
        assert "forbidden" not in stream.text
        data = "data:text/plain;base64,eA=="
        assert "takes texts" in await server.error("features", act="file", file=data)
        assert "return text, not files" in await server.error("picture", image=None)

        async def is_logged() -> bool:
            return len((await server.root.get("/api/gateways/strict/logs")).json()["data"]) == 9

        await until(is_logged)
        rows = (await server.root.get("/api/gateways/strict/logs")).json()["data"]
        computed = next(row for row in rows if row["cache_status"] == "MISS" and row["status"] == "success")
        (kept,) = (await server.root.get("/api/gateways/strict/logs", params={"log": computed["id"]})).json()["data"]
        assert "a b" in kept["request"]
        assert "a b" in kept["response"]
        assert "hush" not in str(kept)
        assert [row["status"] for row in rows].count("error") == 7


async def test_secrets_are_granted_by_name_and_hidden_in_logs(
    versions: PredictorVersions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMBERLINE_GRANT_TOKEN", "tell-nobody-123")
    monkeypatch.setenv("EMBERLINE_GRANT_OTHER", "not-granted-456")
    push(versions, tmp_path, "secrets", "features", secrets=("TOKEN",))
    async with serving(versions, tmp_path, ["secrets"]) as server:
        assert await server.result("secrets", act="print") == [""]
        assert await server.result("secrets", act="flood", text="ok") == ["ok"]
        log = b"".join(path.read_bytes() for path in (tmp_path / "home" / "predictors" / "secrets").rglob("logs/*"))
        assert b"tell-nobody-123" not in log
        assert len(log) < 9 << 20


async def test_a_setup_that_fails_says_why_in_the_reply(versions: PredictorVersions, tmp_path: Path) -> None:
    push(versions, tmp_path, "good", "picture")
    push(versions, tmp_path, "broken", "features", 'environment: ["SETUP_FAILS=1"]')
    resources = Resources(setup_s=2.0, memory_bytes=512 << 20)
    push(versions, tmp_path, "endless", "features", 'environment: ["SETUP_S=1000"]', resources=resources)
    async with serving(versions, tmp_path, ["good"]) as server:
        assert "no weights here" in await server.error("broken", text="x")
        assert "setup did not end within 2 s" in await server.error("endless", text="x")
        assert (await server.states())["@me/broken"] == "failed"
        assert "no weights here" in await server.problem("broken")
        for name, reason in (("broken", "no weights here"), ("endless", "did not end within 2 s")):
            assert reason in (tmp_path / "home" / "predictors" / name / "v1" / "logs" / "log").read_text()
        assert "setup did not end within 2 s" in await server.problem("endless")
        assert await server.problem("good") == ""


async def test_versions_are_replaced_rolled_back_and_unloaded(versions: PredictorVersions, tmp_path: Path) -> None:
    push(versions, tmp_path, "thing", "picture")
    push(versions, tmp_path, "thing", "features")
    first, _ = versions.list("@me/thing")
    async with serving(versions, tmp_path, ["thing"]) as server:
        assert await server.result("thing", text="second") == ["second"]
        publish(server.store, first, versions.path(first))
        data = "data:text/plain;base64," + base64.b64encode(b"x").decode()

        async def is_first() -> bool:
            return (await server.run("thing", image=data)).status_code == 200

        await until(is_first)
        await server.root.post("/api/models/unload", json={"model": "@me/thing"})
        assert (await server.states())["@me/thing"] == "on_disk"
        marker = str(versions.path(first).parent).encode()
        left = [path for path in Path("/proc").glob("[0-9]*/cmdline") if marker in _bytes(path)]
        assert not left, "a model that is scaled to zero keeps no process"
        assert await is_first(), "it comes back when it is asked for"


async def test_the_planner_scales_by_queue_and_slots(versions: PredictorVersions, tmp_path: Path) -> None:
    push(versions, tmp_path, "picture", "picture")
    bounds = "max_replicas = 2\ngrow_after_s = 0.5\ntolerated_s = 0.5\nsettle_s = 0.5\n"
    (tmp_path / "home" / "emberline.toml").write_text(f'[cluster.models."@me/picture"]\n{bounds}')
    data = "data:text/plain;base64," + base64.b64encode(b"x").decode()
    async with serving(versions, tmp_path, ["picture"]) as server:

        async def has_two_workers() -> bool:
            found = (await server.root.get("/api/ps")).json()["engines"]
            return len(found) == 2

        requests = [asyncio.create_task(server.run("picture", image=data, wait_s=4.0)) for _ in range(24)]
        await until(has_two_workers)
        assert {answer.status_code for answer in await asyncio.gather(*requests)} == {200}


@pytest.mark.parametrize("victim", ["predictor", "worker"])
async def test_kill_9_during_queued_predictions(victim: str, versions: PredictorVersions, tmp_path: Path) -> None:
    push(versions, tmp_path, "features", "features")
    async with serving(versions, tmp_path, ["features"]) as server:
        requests = [{"text": str(n), "n": 5} for n in range(60)]
        queued = await server.run("features", "?queueRequest=true", requests=requests)
        request_id = queued.json()["result"]["request_id"]
        marker = b"cog.server.http" if victim == "predictor" else b"emberline.predictor.worker"
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            if marker in _bytes(path) and str(tmp_path).encode() in _bytes(path):
                os.kill(int(path.parent.name), signal.SIGKILL)

        async def is_done() -> bool:
            answer = (await server.run("features", request_id=request_id)).json()["result"]
            return "responses" in answer

        await until(is_done)
        found = (await server.run("features", request_id=request_id)).json()["result"]["responses"]
        assert [each["id"] for each in found] == list(range(60)), "every job ends exactly once"
        usage = (await server.root.get("/api/usage")).json()["total"]
        assert usage["requests"] == 60


@contextmanager
def core(home: Path) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """`emberline serve` as a process group of its own."""
    command = [sys.executable, "-m", "emberline.cli.main", "serve", "@me/features", "--port", "0", "--json"]
    process = subprocess.Popen(
        [*command, "--log-level", "error", "--data-dir", str(home)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["url"], process
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(60)


def test_kill_9_of_the_core_during_queued_predictions(versions: PredictorVersions, tmp_path: Path) -> None:
    """Every job ends exactly once, and is paid once."""
    push(versions, tmp_path, "features", "features")
    path = "/client/v4/accounts/local/ai/run/@me/features"
    requests = [{"text": str(n), "n": 5} for n in range(40)]
    with core(tmp_path / "home") as (url, process), httpx.Client(base_url=url, timeout=LIMIT_S) as http:
        queued = http.post(f"{path}?queueRequest=true", json={"requests": requests}).json()
        request_id = queued["result"]["request_id"]
        while not http.get("/api/usage").json()["total"]["requests"]:
            time.sleep(0.01)
        process.kill()
    with core(tmp_path / "home") as (url, _), httpx.Client(base_url=url, timeout=LIMIT_S) as http:
        end_s = time.monotonic() + LIMIT_S
        while "responses" not in (found := http.post(path, json={"request_id": request_id}).json()["result"]):
            assert time.monotonic() < end_s, found
            time.sleep(0.05)
        assert [each["id"] for each in found["responses"]] == list(range(40))
        assert all(each["success"] for each in found["responses"]), found
        assert http.get("/api/usage").json()["total"]["requests"] == 40


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
