"""Traces of a whole server: HTTP workers, prefill and decode workers, the log file."""

import json
import sys
import time
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from tests.cli.console import emberline_process as emberline
from tests.collector import Collector, collector
from tests.deploy.test_prometheus import running, until_answered
from tests.soak.server_process import free_port

__all__ = ["collector"]

SERVE = """
import sys
from emberline.cli.main import main
from emberline.supervisor import engine_workers
from tests.standin import standin_worker

engine_workers.worker_spec = standin_worker("--script", "say=count,itl_ms=5,ttft_ms=10,chunk_ms=5")
sys.exit(main(["serve", *sys.argv[1:]]))
"""
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.slow
def test_a_disaggregated_request_is_one_trace_over_all_processes(
    collector: Collector, smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMBERLINE_TRACING_ENDPOINT", collector.url)
    port, log = free_port(), tmp_path / "serve.log"
    flags = ["--port", str(port), "--data-dir", str(tmp_path / "home"), "--http-workers", "2"]
    command = [sys.executable, "-c", SERVE, str(smollm2), *flags, "--prefill-workers", "1", "--decode-workers", "1"]
    with running(command, log):
        until_answered(f"http://127.0.0.1:{port}/health", log)
        with urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=10) as answer:
            model = json.load(answer)["data"][0]["id"]
        body = {"model": model, "messages": [{"role": "user", "content": "hello " * 600}], "max_tokens": 8}
        headers = {"content-type": "application/json", "traceparent": f"00-{TRACE}-{SPAN}-01"}
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        with urlopen(Request(url, json.dumps(body).encode(), headers), timeout=60) as answer:
            request_id = answer.headers["x-request-id"]
        phases = ("prepare", "admit", "prefill", "kv_transfer", "decode")
        found = collector.wait_for("POST /v1/chat/completions", f"chat {model}", *phases, timeout_s=30)
        end_s = time.monotonic() + 30
        exported = b""
        while b'emberline_spans_total{outcome="exported"}' not in exported or b'"exported"} 0.0' in exported:
            assert time.monotonic() < end_s, "the core counts the spans of HTTP workers"
            with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                exported = answer.read()
    assert {found[name].trace_id for name in (*phases, f"chat {model}", "POST /v1/chat/completions")} == {TRACE}
    assert found["POST /v1/chat/completions"].parent_id == SPAN
    assert "prefill" in found["prefill"].attributes["emberline.worker"]
    assert "decode" in found["decode"].attributes["emberline.worker"]
    assert {resource["emberline.process"] for resource in collector.resources} <= {"http-0", "http-1"}
    lines = emberline("logs", "--request", TRACE[:12], "--json", home=tmp_path / "home").stdout.splitlines()
    entries = [json.loads(line) for line in lines]
    assert {entry["request_id"].removesuffix("-prefill") for entry in entries} == {request_id}
    processes = {entry["process"] for entry in entries}
    assert any(process.startswith("http-") for process in processes)
    assert any("decode" in process for process in processes), "the engine's lines, too"
