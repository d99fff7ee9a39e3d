"""The Grafana board and the alert rules: every metric that they name exists, and against a real Prometheus every query
returns data. `make observability` installs Prometheus from Debian's packages and runs the whole file."""

import asyncio
import json
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote
from urllib.request import urlopen

import httpx
import pytest

from emberline.jobs.queue.puller import QueueMetrics
from emberline.jobs.queue.reader import QueueDepth
from emberline.jobs.webhooks.deliverer import Deliverer, DeliveryMetrics
from emberline.service import Service
from emberline.service.core import LocalCore
from tests.service.conftest import engine, open_one, say, service, text_model
from tests.service.test_service import ask, events_of
from tests.soak.server_process import free_port

__all__ = ["engine", "open_one", "say", "service", "text_model"]

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "alerts.yml"
BOARD: dict[str, Any] = json.loads((DEPLOY / "grafana" / "emberline.json").read_text())
METRIC = re.compile(r"\b(?:emberline|gen_ai)_[a-z0-9_]+")
LABELS = {"gen_ai_operation_name", "gen_ai_request_model", "gen_ai_token_type", "gen_ai_provider_name"}
installed = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="Prometheus is not installed: `make observability` installs it from Debian's packages",
)
PATIENCE_S = 60.0


def board_queries() -> list[str]:
    return [target["expr"] for panel in BOARD["panels"] for target in panel.get("targets", ())]


def alert_expressions() -> list[str]:
    """Without their comparison with a threshold: what is left must have a value while all is well."""
    text = RULES.read_text()
    found = re.findall(r"expr: (?:>\n((?: {10}.*\n)+)|(.*)\n)", text)
    assert len(found) == text.count("- alert:")
    return [re.sub(r"\s*(==|>)\s*[\d.]+\s*$", "", (folded or plain).strip()) for folded, plain in found]


def test_the_board_is_well_formed() -> None:
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        assert panel["title"]
    assert {variable["name"] for variable in BOARD["templating"]["list"]} == {"datasource", "model"}


async def test_every_metric_that_is_named_exists(service: Service) -> None:
    await events_of(service, ask())
    core = service.core
    assert isinstance(core, LocalCore)
    queue = QueueMetrics()
    queue.count("completed", "m", 1)
    queue.update([QueueDepth("m", "a", 1, 1, 0, 1, 0)], 0, 2)
    core.register(queue)
    deliverer = Deliverer.__new__(Deliverer)
    deliverer.counts, deliverer.n_pending = Counter(), 0
    core.register(DeliveryMetrics(deliverer))
    exposed = (await service.operations.metrics()).decode()
    names = set(re.findall(r"^([a-z_:]+)(?:\{| )", exposed, re.MULTILINE))
    used = {name for query in board_queries() + alert_expressions() for name in METRIC.findall(query)} - LABELS
    assert used <= names, sorted(used - names)
    assert len(used) > 25


@installed
def test_the_alert_rules() -> None:
    for words in (
        ("check", "rules", "alerts.yml"),
        ("check", "config", "prometheus.yml"),
        ("test", "rules", "alerts_test.yml"),
    ):
        done = subprocess.run(
            ["promtool", *words],
            cwd=DEPLOY / "prometheus",
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr


# --- a live server and a real Prometheus -----------------------------------------------------------------------------


@contextmanager
def running(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()


def until_answered(url: str, log: Path) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            with urlopen(url, timeout=5):
                return
        except OSError:
            assert time.monotonic() < end_s, log.read_text()[-3000:]
            time.sleep(0.1)


def ask_prometheus(port: int, query: str) -> list[Any]:
    with urlopen(f"http://127.0.0.1:{port}/api/v1/query?query={quote(query)}", timeout=10) as answer:
        body = json.load(answer)
    assert body["status"] == "success", body
    return list(body["data"]["result"])


async def load(port: int, model: str, seconds: float) -> None:
    """Streams, a request that is refused, and a batch that stays queued long enough to be seen."""
    end_s = time.monotonic() + seconds
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:

        async def stream(n: int) -> None:
            while time.monotonic() < end_s:
                chat = {"model": model, "messages": [{"role": "user", "content": f"hello {n} " * 40}], "max_tokens": 12}
                (await client.post("/v1/chat/completions", json=chat)).raise_for_status()

        line = {"method": "POST", "url": "/v1/chat/completions"}
        body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 200}
        lines = "".join(json.dumps({**line, "custom_id": f"c{n}", "body": body}) + "\n" for n in range(2000))
        file = (await client.post("/v1/files", files={"file": ("b", lines)}, data={"purpose": "batch"})).json()
        batch = {"input_file_id": file["id"], "endpoint": line["url"], "completion_window": "24h"}
        (await client.post("/v1/batches", json=batch)).raise_for_status()
        assert (await client.post("/v1/chat/completions", json={"model": model, "messages": []})).status_code == 400
        await asyncio.gather(*(stream(n) for n in range(4)))


@installed
@pytest.mark.slow
def test_every_query_returns_data_from_a_live_server(tmp_path: Path, smollm2: Path) -> None:
    port, prometheus_port = free_port(), free_port()
    serve = [sys.executable, "-m", "benchmarks.standin_serve", "say=count,itl_ms=20,ttft_ms=30", str(smollm2)]
    serve += ["--port", str(port), "--data-dir", str(tmp_path / "home")]
    config = (DEPLOY / "prometheus" / "prometheus.yml").read_text()
    for ours, theirs in (("8686", str(port)), ("scrape_interval: 10s", "scrape_interval: 1s"), (": 30s", ": 1s")):
        assert ours in config
        config = config.replace(ours, theirs)
    (tmp_path / "prometheus.yml").write_text(config)
    shutil.copy(RULES, tmp_path / "alerts.yml")
    prometheus = ["prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
    prometheus += [f"--web.listen-address=127.0.0.1:{prometheus_port}", "--log.level=warn"]
    with running(serve, tmp_path / "serve.log"), running(prometheus, tmp_path / "prometheus.log"):
        until_answered(f"http://127.0.0.1:{port}/health", tmp_path / "serve.log")
        until_answered(f"http://127.0.0.1:{prometheus_port}/-/ready", tmp_path / "prometheus.log")
        with urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=10) as answer:
            model = json.load(answer)["data"][0]["id"]
        asyncio.run(load(port, model, 10.0))
        queries = [query.replace("$__rate_interval", "1m").replace("$model", ".*") for query in board_queries()]
        missing = set(queries + alert_expressions())
        end_s = time.monotonic() + PATIENCE_S
        while missing and time.monotonic() < end_s:
            answers = {query: ask_prometheus(prometheus_port, query) for query in missing}
            missing -= {query for query, found in answers.items() if any(item["value"][1] != "NaN" for item in found)}
            time.sleep(0.5)
        assert not missing, "no data: " + "\n".join(sorted(missing))
        with urlopen(f"http://127.0.0.1:{prometheus_port}/api/v1/rules", timeout=10) as answer:
            rules = json.load(answer)["data"]["groups"][0]["rules"]
        assert {rule["health"] for rule in rules} == {"ok"}
        assert not [rule["name"] for rule in rules if rule["state"] == "firing"]
