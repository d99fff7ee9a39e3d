"""Prefill/decode disaggregation on real engines: identical tokens, failover of either worker, nothing leaked.

The daily tests run a two-layer model, the slow ones SmolLM2. Cheaper tests of what is slow here: tests/soak kills
workers in test_streams.py, tests/engine/transfer counts cached tokens, tests/e2e/test_cluster.py lets workers join
later.
"""

import http.client
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.soak.server_process import free_port
from tests.soak.streams_audit import check_idle
from tests.soak.streams_client import StreamRecord, stream

CHAT = "/v1/chat/completions"
OTHER_ACCOUNT = "/client/v4/accounts/other/ai"  # has a prefix cache of its own
WORDS = ("river", "stone", "under", "a", "green", "sky", "and", "every", "old", "house", "had", "its", "own", "light")
PATIENCE_S = 120.0
SCHEMA = {
    "type": "object",
    "properties": {"numbers": {"type": "array", "items": {"type": "integer"}, "minItems": 16, "maxItems": 16}},
    "required": ["numbers"],
}


@dataclass
class DisaggregatedServer:
    """A server with one prefill worker and one decode worker."""

    url: str
    process: "subprocess.Popen[str]"

    def engine(self, role: str) -> dict[str, Any]:
        return next(engine for engine in engines(self.url) if engine.get("role") == role)

    def blocks(self) -> tuple[int, int]:
        """KV blocks that the prefill worker has sent and that the decode worker has received, by their reports."""
        return self.engine("prefill")["load"]["blocks_pushed"], self.engine("decode")["load"]["blocks_received"]

    def kill(self, role: str) -> None:
        os.kill(_pid(self.process.pid, role), signal.SIGKILL)


def engines(url: str) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"{url}/api/ps", timeout=PATIENCE_S) as answer:
        found: list[dict[str, Any]] = json.load(answer)["engines"]
    return found


def _pid(parent: int, role: str) -> int:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            status = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(status[1]) == parent and "--role" in words and words[words.index("--role") + 1] == role:
            return int(folder.name)
    raise AssertionError(f"no worker of the role {role}")


def post(url: str, path: str, body: dict[str, Any]) -> None:
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        assert answer.status == 200


def wait_until(true: Callable[[], object], what: str) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end_s, f"never: {what}"
        time.sleep(0.02)


def serve(home: Path, *flags: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "emberline.cli.main", "serve", "--port", "0", "--json", "--kv-bytes", "256M"]
    env = {**os.environ, "EMBERLINE_HOME": str(home)}
    command += ["--deterministic", "--threads", "1", *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)


def link_model(home: Path, model: Path) -> None:
    """Make a model of the model store the one that a server in `home` loads by default."""
    (home / "models").mkdir(parents=True)
    (home / "models" / model.parent.name).symlink_to(model.parent)


@contextmanager
def disaggregated_server(home: Path, *flags: str) -> Iterator[DisaggregatedServer]:
    process = serve(home, "--prefill-workers", "1", "--decode-workers", "1", *flags)
    yield DisaggregatedServer(url_of(process), process)
    process.terminate()
    assert process.wait(60) == 0


def url_of(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "the server did not start; its log is above"
    return str(json.loads(line)["url"])


@dataclass
class RemoteWorkerServer:
    """A server whose only worker is an endpoint on another machine that has not started yet."""

    process: "subprocess.Popen[str]"
    address: str
    token: str


@pytest.fixture(scope="module")
def remote(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RemoteWorkerServer]:
    """Does not wait for the server to be ready: it first has to find that its worker is not reachable."""
    home, port, token = tmp_path_factory.mktemp("elsewhere"), free_port(), "a-token-of-at-least-some-length"
    (home / "emberline.toml").write_text(
        f'[[endpoints]]\nname = "far"\nkind = "emberline"\nurl = "tcp://127.0.0.1:{port}"\n'
        f'key = "{token}"\nmodels = ["smollm2"]\n'
    )
    link_model(home, smollm2)
    process = serve(home)
    yield RemoteWorkerServer(process, f"tcp:127.0.0.1:{port}", token)
    process.terminate()
    assert process.wait(60) == 0


@pytest.fixture(scope="module")
def disaggregated(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DisaggregatedServer]:
    """A server with the two-layer model, under the name that all requests here use."""
    model = tmp_path_factory.mktemp("tiny") / "smollm2"
    model.symlink_to(tiny_model)
    with disaggregated_server(tmp_path_factory.mktemp("apart"), str(model)) as server:
        yield server


@pytest.fixture(scope="module")
def smollm2_disaggregated(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DisaggregatedServer]:
    """A server with SmolLM2."""
    home = tmp_path_factory.mktemp("apart")
    link_model(home, smollm2)
    with disaggregated_server(home) as server:
        yield server


def ask(url: str, account: str = "", **body: Any) -> StreamRecord:
    """Send a chat under an account's path, which is empty for the default account, and read it to its end."""
    told = stream(url, account + CHAT, {"model": "smollm2", "temperature": 0, "max_tokens": 24, **body})
    assert not told.problem, told.problem
    assert told.n_done == 1
    return told


def user(name: str, n_words: int) -> dict[str, str]:
    """At least a token a word. No more than 256 new ones are computed where the reply is written, in any case."""
    return {"role": "user", "content": f"{name}: " + " ".join(WORDS[i * 7 % len(WORDS)] for i in range(n_words))}


@contextmanager
def others_run(url: str) -> Iterator[None]:
    """Streams that a long prompt would hold up: while they run, it is worth another engine's while."""
    connections = [_begin(url, user(f"endless {n}", 10)) for n in range(2)]
    for connection in connections:
        connection.getresponse().readline()
    yield
    for connection in connections:
        connection.close()


def _begin(url: str, message: dict[str, str]) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=PATIENCE_S)
    body = {"model": "smollm2", "messages": [message], "stream": True, "ignore_eos": True}
    connection.request("POST", CHAT, json.dumps(body), {"Content-Type": "application/json"})
    return connection


def cached(told: StreamRecord) -> int:
    return int(told.usage[0]["prompt_tokens_details"]["cached_tokens"])


def test_the_same_tokens_as_one_worker(disaggregated: DisaggregatedServer) -> None:
    url = disaggregated.url
    asked: list[dict[str, Any]] = [
        {"messages": [user("greedy", 300)]},
        {"messages": [user("seeded", 300)], "temperature": 0.9, "seed": 4, "n": 2},
        {"messages": [user("short", 5)]},
    ]
    with others_run(url):
        answers = [ask(url, **body) for body in asked]
    n_prompt = sum(told.usage[0]["prompt_tokens"] for told in answers[:2])
    wait_until(lambda: (found := disaggregated.blocks())[0] == found[1] >= n_prompt // 16 - 2, "all blocks arrived")
    sent, prefill = disaggregated.blocks(), {"name": disaggregated.engine("prefill")["name"]}
    post(url, "/api/workers/drain", prefill)
    wait_until(lambda: disaggregated.engine("prefill")["state"] == "draining", "the decode worker is alone")
    for body, told in zip(asked, answers):
        wanted = ask(url, OTHER_ACCOUNT, **body)
        assert cached(wanted) == 0
        assert (told.texts, told.finishes) == (wanted.texts, wanted.finishes)
        assert told.usage[0]["completion_tokens"] == wanted.usage[0]["completion_tokens"]
    assert disaggregated.blocks() == sent
    post(url, "/api/workers/undrain", prefill)


@pytest.mark.slow
def test_a_second_turn_reports_tokens_cached_by_the_prefill_worker(
    server: str, smollm2_disaggregated: DisaggregatedServer
) -> None:
    first = [user("turns", 280)]
    with others_run(smollm2_disaggregated.url):
        said = ask(smollm2_disaggregated.url, messages=first, ignore_eos=True)
        assert cached(said) < 32, "no more than what every chat begins with"
        second = [*first, {"role": "assistant", "content": said.texts[0]}, user("and then", 280)]
        told = ask(smollm2_disaggregated.url, messages=second)
    assert cached(told) == (said.usage[0]["prompt_tokens"] - 1) // 16 * 16, "the reply lies in decode's cache alone"
    assert told.texts == ask(server, messages=second).texts


@pytest.mark.slow
def test_a_decode_worker_that_is_killed_breaks_no_stream(
    server: str, smollm2_disaggregated: DisaggregatedServer
) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "numbers", "schema": SCHEMA, "strict": True}}
    asked: list[dict[str, Any]] = [
        {"messages": [user("to kill", 280)], "max_tokens": 64},
        {"messages": [user("to kill, with a seed", 20)], "temperature": 0.9, "seed": 11, "max_tokens": 64},
        {"messages": [user("to kill, twice", 20)], "temperature": 0.9, "seed": 12, "n": 2, "max_tokens": 48},
        {"messages": [user("sixteen numbers", 20)], "response_format": form, "max_tokens": 200},
    ]
    for body in asked[:3]:
        body["ignore_eos"] = True
    wanted = [ask(server, **body) for body in asked]
    going: list[Future[StreamRecord]] = []

    def all_run_or_have_ended() -> bool:
        load = smollm2_disaggregated.engine("decode")["load"]
        return (load["output_tokens"] - n_before > 20 and load["running"] >= 4) or all(each.done() for each in going)

    with ThreadPoolExecutor(len(asked)) as pool:
        while all(each.done() for each in going):  # again, where this process was too slow to see them run
            n_before = smollm2_disaggregated.engine("decode")["load"]["output_tokens"]
            going = [pool.submit(ask, smollm2_disaggregated.url, **body) for body in asked]
            wait_until(all_run_or_have_ended, "all of them run")
        smollm2_disaggregated.kill("decode")
        told = [each.result(PATIENCE_S) for each in going]
    for body, got, want in zip(asked, told, wanted):
        assert got.texts == want.texts, body
        assert got.finishes == want.finishes
        assert got.usage[0]["completion_tokens"] == want.usage[0]["completion_tokens"]
    assert len(json.loads(told[3].texts[0])["numbers"]) == 16
    assert check_idle(smollm2_disaggregated.url, PATIENCE_S) == []


@pytest.mark.slow
def test_a_prefill_worker_that_is_killed_costs_the_prompt_alone(
    server: str, smollm2_disaggregated: DisaggregatedServer
) -> None:
    body = {"messages": [user("while prefill dies", 900)]}
    with others_run(smollm2_disaggregated.url), ThreadPoolExecutor(1) as pool:
        going = pool.submit(ask, smollm2_disaggregated.url, **body)
        wait_until(lambda: smollm2_disaggregated.engine("decode")["load"]["awaiting"], "decode awaits it")
        smollm2_disaggregated.kill("prefill")
        assert not going.done()
        told = going.result(PATIENCE_S)
    assert told.texts == ask(server, **body).texts
    assert check_idle(smollm2_disaggregated.url, PATIENCE_S) == []


@pytest.mark.parametrize(
    ("n_events", "fixture"), [pytest.param(0, "smollm2_disaggregated", marks=pytest.mark.slow), (4, "disaggregated")]
)
def test_a_client_that_leaves_leaves_nothing(n_events: int, fixture: str, request: pytest.FixtureRequest) -> None:
    disaggregated: DisaggregatedServer = request.getfixturevalue(fixture)
    wait_until(lambda: all(engine["ok"] for engine in engines(disaggregated.url)), "both are back")
    with others_run(disaggregated.url):
        connection = _begin(disaggregated.url, user(f"left {n_events}", 500))
        if n_events:
            answer = connection.getresponse()
            for _ in range(2 * n_events):
                answer.readline()
        else:
            wait_until(lambda: disaggregated.engine("decode")["load"]["awaiting"], "decode awaits its prompt")
        connection.close()
    assert check_idle(disaggregated.url, PATIENCE_S) == []


def test_what_ps_and_metrics_tell(disaggregated: DisaggregatedServer) -> None:
    port = str(urlsplit(disaggregated.url).port)
    words = [sys.executable, "-m", "emberline.cli.main", "ps", "--port", port]
    rows = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()[1:]
    found = [[word for word in row.split() if word in ("prefill", "decode", "ok")] for row in rows]
    assert [words for words in found if words] == [  # drafts come behind the workers
        ["prefill", "ok"],
        ["decode", "ok"],
    ]
    with urllib.request.urlopen(f"{disaggregated.url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    for name in ("prefill0", "decode0"):
        state = f'emberline_endpoint_state{{endpoint="smollm2-{name}",state="ready"}} 1.0'
        assert state in lines
    assert "emberline_requests_in_flight 0.0" in lines


@pytest.mark.slow
def test_a_remote_worker_may_connect_later(server: str, remote: RemoteWorkerServer, smollm2: Path) -> None:
    url = url_of(remote.process)
    (far,) = engines(url)
    assert (far["ok"], far["state"]) == (False, "down")
    assert "refused" in far["problem"].lower()
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{url}/health")
    assert refused.value.code == 503
    command = [sys.executable, "-m", "emberline.cli.main", "worker", "--model", str(smollm2), "--name", "smollm2"]
    command += ["--socket", remote.address, "--kv-bytes", str(128 << 20), "--deterministic", "--id", "far"]
    env = {**os.environ, "EMBERLINE_WORKER_TOKEN": remote.token}
    worker = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=env)
    try:
        wait_until(lambda: engines(url)[0]["ok"], "the worker is found")
        body = {"messages": [user("far away", 30)]}
        assert ask(url, **body).texts == ask(server, **body).texts
        assert (engines(url)[0]["role"], engines(url)[0]["problem"]) == ("both", "")
    finally:
        worker.terminate()
        worker.wait(60)
    wait_until(lambda: not engines(url)[0]["ok"], "its end is seen")
