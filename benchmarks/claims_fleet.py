"""The whole system on the real small model: workers, roles, tiers, drafts, a full queue and a kill, under agents.

One run is one server. Agents hold conversations whose prompts grow turn by turn; the next turn is sent when the last
reply is complete. Halfway through, one worker is killed (`kill -9`), and every reply must still arrive.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles
from typing import Any

from benchmarks.client import Reply, stream
from benchmarks.emberline_contender import PromptsOf
from benchmarks.process import Process, free_port
from benchmarks.prompts import Message

START_S = 300.0
JOB_TOKENS = 24
CHAT = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Shape:
    """One run's traffic."""

    agents: int = 8
    turns: int = 5
    first_tokens: int = 700  # of a conversation's first prompt, which agents do not share
    turn_tokens: int = 120  # that each further turn adds
    output_tokens: int = 32
    jobs: int = 60


QUICK = Shape(agents=3, turns=3, first_tokens=300, turn_tokens=60, output_tokens=16, jobs=12)


@dataclass(frozen=True, slots=True)
class Run:
    """Measured in one run."""

    ready_s: float  # from the process's start to the first answered request
    ttft_p90_s: float
    token_p90_ms: float
    hit_ratio: float
    replies: int
    lost: int  # replies that did not arrive in full
    took_s: float
    jobs_done: int
    job_p90_s: float  # from submission to the end of the batch's jobs, at p90 of completions as they were seen


@dataclass(frozen=True, slots=True)
class Server:
    port: int
    folder: Path
    process: Process
    ready_s: float


def flags(roles: bool, workers: int) -> list[str]:
    """Flags of a server: as many workers with and without roles, the same tiers and drafts."""
    half = workers // 2
    split = ["--prefill-workers", str(half), "--decode-workers", str(workers - half)]
    words = split if roles else ["--replicas", str(workers)]
    words += ["--threads", "1", "--kv-bytes", "96M", "--kv-host-bytes", "128M", "--kv-disk-bytes", "256M"]
    if (os.cpu_count() or 1) >= 4 * workers:
        words += ["--tp", "2"]
    if _has_mooncake():
        words += ["--kv-store", "mooncake"]
    return words


def _has_mooncake() -> bool:
    import importlib.util

    return importlib.util.find_spec("mooncake") is not None


@contextlib.contextmanager
def serving(folder: Path, words: Sequence[str], log: str):  # type: ignore[no-untyped-def]
    """Start a server and wait until it has answered a first request."""
    port = free_port()
    command = [sys.executable, "-m", "emberline.cli.main", "serve", "--port", str(port), "--data-dir", str(folder)]
    began_s = time.monotonic()
    with Process([*command, "--log-level", "warning", *words], folder / log) as process:
        _first_answer(port)
        yield Server(port, folder, process, time.monotonic() - began_s)


def _first_answer(port: int) -> None:
    body = json.dumps({"model": "smollm2", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1})
    request = urllib.request.Request(f"http://127.0.0.1:{port}{CHAT}", body.encode())
    end_s = time.monotonic() + START_S
    while True:
        try:
            with urllib.request.urlopen(request, timeout=120):
                return
        except OSError:
            if time.monotonic() > end_s:
                raise
            time.sleep(0.1)


def get(port: int, path: str) -> Any:
    """Ask the server for JSON."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
        return json.load(answer)


def post(port: int, path: str, body: bytes, kind: str = "application/json") -> Any:
    """Send a body to the server, which answers with JSON."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", body, {"content-type": kind})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


async def measure(server: Server, shape: Shape, prompts: PromptsOf, name: str, header: bool, kills: bool) -> Run:
    """Run all agents beside a full queue, and kill a worker halfway."""
    batch = await asyncio.to_thread(_submit, server.port, shape, prompts, name) if shape.jobs else ""
    began_s = time.monotonic()
    seen = asyncio.create_task(_watch_jobs(server.port, batch, began_s)) if batch else None
    found: list[Reply | None] = []
    halfway = shape.agents * shape.turns // 2

    async def agent(number: int) -> None:
        texts = prompts(f"agent {name} {number}")
        messages: list[Message] = [texts.user(shape.first_tokens)]
        session = {"x-session-affinity": f"{name}-{number}"} if header else {}
        for turn in range(shape.turns):
            if turn:
                messages.append(texts.user(shape.turn_tokens))
            body = {
                "model": "smollm2",
                "messages": messages,
                "max_tokens": shape.output_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            try:
                reply: Reply | None = await stream(server.port, CHAT, body, session)
            except Exception as error:
                print(f"a reply was lost: {error}", file=sys.stderr, flush=True)
                reply = None
            found.append(reply)
            if kills and len(found) == halfway:
                await asyncio.to_thread(_kill_one, server)
            messages.append({"role": "assistant", "content": reply.text if reply is not None else ""})

    await asyncio.gather(*(agent(number) for number in range(shape.agents)))
    took_s = time.monotonic() - began_s
    jobs = await seen if seen is not None else []
    return _summary(server, found, took_s, jobs)


def _summary(server: Server, found: Sequence[Reply | None], took_s: float, jobs: Sequence[float]) -> Run:
    replies = [reply for reply in found if reply is not None]
    per_token = [1e3 * each.decode_s / max(1, each.output_tokens - 1) for each in replies]
    n_prompt = sum(reply.prompt_tokens for reply in replies)
    return Run(
        ready_s=round(server.ready_s, 2),
        ttft_p90_s=round(_p90([reply.ttft_s for reply in replies]), 3),
        token_p90_ms=round(_p90(per_token), 1),
        hit_ratio=round(sum(reply.cached_tokens for reply in replies) / max(1, n_prompt), 3),
        replies=len(replies),
        lost=len(found) - len(replies),
        took_s=round(took_s, 1),
        jobs_done=len(jobs),
        job_p90_s=round(_p90(jobs), 1),
    )


def _p90(values: Sequence[float]) -> float:
    return quantiles(values, n=10, method="inclusive")[-1] if len(values) > 1 else sum(values)


def _kill_one(server: Server) -> None:
    """Kill a worker that decodes, as a crash would. The server starts it again."""
    names = {engine["name"] for engine in get(server.port, "/api/ps")["engines"] if engine.get("role") != "prefill"}
    for folder in sorted(Path("/proc").iterdir(), key=lambda each: each.name):
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().decode().split("\0")
            ours = str(server.process.pid) == (folder / "stat").read_text().rsplit(")", 1)[1].split()[1]
            if ours and any(word.endswith("engine.worker") for word in words) and names & {*words}:
                print(f"killing a worker: process {folder.name}", file=sys.stderr, flush=True)
                os.kill(int(folder.name), signal.SIGKILL)
                return
    raise RuntimeError("no worker was found to kill")


def _submit(port: int, shape: Shape, prompts: PromptsOf, name: str) -> str:
    texts = prompts(f"jobs {name}")
    lines = [
        {
            "custom_id": f"job-{number}",
            "method": "POST",
            "url": CHAT,
            "body": {"model": "smollm2", "messages": [texts.user(100)], "max_tokens": JOB_TOKENS},
        }
        for number in range(shape.jobs)
    ]
    content = "\n".join(map(json.dumps, lines))
    border = "emberline-claims"
    parts = (
        f'--{border}\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        f'--{border}\r\ncontent-disposition: form-data; name="file"; filename="jobs.jsonl"\r\n\r\n{content}\r\n'
        f"--{border}--\r\n"
    )
    file = post(port, "/v1/files", parts.encode(), f"multipart/form-data; boundary={border}")
    body = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
    return str(post(port, "/v1/batches", json.dumps(body).encode())["id"])


async def _watch_jobs(port: int, batch: str, began_s: float) -> list[float]:
    """Seconds after which each job was seen to have ended, until all have."""
    ended: list[float] = []
    while True:
        found = await asyncio.to_thread(get, port, f"/v1/batches/{batch}")
        counts = found["request_counts"]
        n_new = counts["completed"] + counts["failed"] - len(ended)
        ended += [time.monotonic() - began_s] * n_new
        if found["status"] in ("completed", "failed", "expired", "cancelled"):
            return ended
        await asyncio.sleep(0.5)
