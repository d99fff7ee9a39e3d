"""Do the simulator's baseline routers decide as the real ones do? `python -m benchmarks.balancer_peers`.

Each real router, from its own environment, gets one small trace, request by request, in front of fake servers
(sglang-router) or of its own mocker (Dynamo). After every request the baseline is given the real decision, so each
decision is compared by itself; where the baseline finds several workers equal, any of them agrees.
"""

import argparse
import json
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.process import Process, ended_by_sigterm, free_port
from emberline.simulator.baselines import DynamoRouter, SGLangRouter
from emberline.simulator.request import SimRequest

WORKERS = 4
REQUESTS = 120
BLOCK_TOKENS = 16
BLOCK_CHARS = 64
MODEL = "small"


class FakeServer(ThreadingHTTPServer):
    """An inference server that answers at once and counts requests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.n_requests = 0
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeServer

    def do_GET(self) -> None:
        paths = {"/v1/models": {"data": [{"id": MODEL}]}, "/get_model_info": {"model_path": MODEL}}
        self._send(paths.get(self.path, {"status": "ok", "model_id": MODEL}))

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.server.n_requests += 1
        choice = {"index": 0, "text": "x", "finish_reason": "length"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        self._send({"id": "x", "object": "text_completion", "model": MODEL, "choices": [choice], "usage": usage})

    def _send(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None: ...


def small_trace(seed: int) -> Iterator[SimRequest]:
    """Conversations that grow, over two system prompts, and some that are asked once."""
    rng = Random(seed)
    sessions: list[tuple[list[int], list[int]]] = []
    for number in range(REQUESTS):
        if sessions and rng.random() < 0.6:
            path, lengths = rng.choice(sessions)
        else:
            kind = rng.randrange(2)
            path, lengths = [kind], [20 + 10 * kind]
            sessions.append((path, lengths))
        path.append(10 + number)
        lengths.append(rng.randint(2, 60))
        n_prompt = sum(lengths) * BLOCK_TOKENS
        yield SimRequest(
            f"j{number}", number, 0, 0, tuple(path), tuple(lengths), n_prompt, 1, BLOCK_TOKENS, arrival_s=number / 10
        )


def text_of(request: SimRequest) -> str:
    """One block of text a block; the same segment is the same text everywhere."""
    blocks = []
    for segment, length in zip(request.path, request.lengths):
        rng = Random(segment)
        blocks += ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=BLOCK_CHARS)) for _ in range(length)]
    return "".join(blocks)


def ask(url: str, body: dict[str, Any], timeout_s: float = 60.0) -> dict[str, Any]:
    data, headers = json.dumps(body).encode(), {"content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=timeout_s) as reply:
        return dict(json.loads(reply.read()))


def wait_for(url: str, server: Process, limit_s: float) -> None:
    until_s = time.monotonic() + limit_s
    while True:
        server.check()
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except (urllib.error.URLError, OSError):
            if time.monotonic() > until_s:
                raise TimeoutError(f"{url} does not answer; see {server.log}") from None
            time.sleep(0.5)


def sglang(python: Path, seed: int, logs: Path) -> dict[str, Any]:
    """The fake servers count which of them was chosen."""
    servers = [FakeServer() for _ in range(WORKERS)]
    port = free_port()
    command = [str(python), "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    command += [
        "--prometheus-port",
        str(free_port()),
        "--policy",
        "cache_aware",
        "--worker-urls",
        *(s.url for s in servers),
    ]
    model = SGLangRouter(_Named.all(WORKERS), lambda *_: None)
    n_agreed = n_open = 0
    with Process(command, logs / "sglang-router.log") as router:
        wait_for(f"http://127.0.0.1:{port}/health", router, 60)
        time.sleep(5)  # it looks for its workers
        for request in small_trace(seed):
            before = [server.n_requests for server in servers]
            ask(
                f"http://127.0.0.1:{port}/v1/completions", {"model": MODEL, "prompt": text_of(request), "max_tokens": 1}
            )
            (chosen,) = [n for n, server in enumerate(servers) if server.n_requests > before[n]]
            candidates = model.candidates(request)
            n_agreed += f"w{chosen}" in candidates
            n_open += len(candidates) > 1
            model.insert(request, f"w{chosen}")
    return {"router": "sglang-router cache_aware", "requests": REQUESTS, "agreed": n_agreed, "of_them_ties": n_open}


def dynamo(python: Path, folder: Path, seed: int, logs: Path) -> dict[str, Any]:
    """Its answers name the worker. Every tenth request is a long one that stays in flight."""
    port = free_port()
    model = DynamoRouter(_Named.all(WORKERS), lambda *_: None)
    names: dict[int, str] = {}  # Dynamo's numbers of workers -> ours, as they appear
    n_agreed = n_open = 0
    with ExitStack() as stack:
        settings = _dynamo_settings(stack.enter_context(tempfile.TemporaryDirectory()))
        mocker = [str(python), "-m", "dynamo.mocker", "--model-path", str(folder), "--model-name", MODEL]
        mocker += ["--num-workers", str(WORKERS), "--block-size", str(BLOCK_TOKENS)]
        stack.enter_context(Process(mocker, logs / "mocker.log", settings))
        frontend = [str(python), "-m", "dynamo.frontend", "--http-port", str(port), "--router-mode", "kv"]
        server = stack.enter_context(Process(frontend, logs / "frontend.log", settings))
        url = f"http://127.0.0.1:{port}/v1/completions"
        _wait_for_model(port, server)
        for request in small_trace(seed):
            stays = request.number % 10 == 9
            body = {
                "model": MODEL,
                "prompt": ids_of(request),
                "nvext": {"extra_fields": ["worker_id"]},
                "ignore_eos": True,
            }
            number = _worker_of(url, {**body, "max_tokens": 4000 if stays else 2, "min_tokens": 2}, stays, stack)
            candidates = model.candidates(request)
            if number not in names:
                unseen = [name for name in model.names if name not in names.values()]
                names[number] = next((name for name in candidates if name in unseen), unseen[0])
            n_agreed += names[number] in candidates
            n_open += len(candidates) > 1
            if stays:
                model.activate(request, names[number])
            for segment, length in zip(request.path, request.lengths):
                model.apply_kv_event(names[number], True, segment, 0, length)
            time.sleep(0.1)  # events are on their way
    return {"router": "dynamo kv", "requests": REQUESTS, "agreed": n_agreed, "of_them_ties": n_open}


def ids_of(request: SimRequest) -> list[int]:
    ids: list[int] = []
    for segment, length in zip(request.path, request.lengths):
        ids += Random(segment).choices(range(100, 20_000), k=length * BLOCK_TOKENS)
    return ids


def _dynamo_settings(folder: str) -> dict[str, str]:
    planes = {"DYN_DISCOVERY_BACKEND": "file", "DYN_REQUEST_PLANE": "tcp", "DYN_EVENT_PLANE": "zmq"}
    return {**planes, "DYN_FILE_KV": folder, "HF_HUB_OFFLINE": "1"}


def _wait_for_model(port: int, server: Process) -> None:
    until_s = time.monotonic() + 180
    while time.monotonic() < until_s:
        server.check()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5) as reply:
                if json.loads(reply.read())["data"]:
                    time.sleep(5)  # the others of its workers
                    return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(1)
    raise TimeoutError(f"no model; see {server.log}")


def _worker_of(url: str, body: dict[str, Any], stays: bool, stack: ExitStack) -> int:
    """Which worker a request went to; one that stays is left open until the end."""
    if not stays:
        return int(ask(url, body)["nvext"]["worker_id"]["decode_worker_id"])
    data, headers = json.dumps({**body, "stream": True}).encode(), {"content-type": "application/json"}
    reply = stack.enter_context(urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=60))
    for line in reply:
        if line.startswith(b"data: {"):
            extra = json.loads(line[6:]).get("nvext") or {}
            if "worker_id" in extra:
                return int(extra["worker_id"]["decode_worker_id"])
    raise RuntimeError("the stream does not name its worker")


class _Named:
    """What a baseline router needs of a worker."""

    def __init__(self, name: str) -> None:
        self.name = name

    @classmethod
    def all(cls, n: int) -> Any:
        return [cls(f"w{number}") for number in range(n)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.balancer_peers", description=__doc__)
    parser.add_argument("--sglang", type=Path, help="python of an environment with sglang-router 0.3.2")
    parser.add_argument("--dynamo", type=Path, help="python of an environment with ai-dynamo 1.6.1")
    parser.add_argument("--model", type=Path, help="a Hugging Face folder, for Dynamo's tokenizer")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    logs = Path(tempfile.mkdtemp(prefix="balancer-peers-"))
    if options.sglang:
        print(json.dumps(sglang(options.sglang, options.seed, logs)), flush=True)
    if options.dynamo:
        print(json.dumps(dynamo(options.dynamo, options.model, options.seed, logs)), flush=True)
    return 0


if __name__ == "__main__":
    ended_by_sigterm()
    sys.exit(main())
