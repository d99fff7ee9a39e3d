"""Soak test of faults: every kind at random moments, under requests of every kind; clients check replies and bills.

python -m tests.soak.faults [--faults 1000] [--clients 10] [--seed 1] [--database sqlite|postgres]

Live requests, streamed or not, go to engines and to upstreams while a batch runs; some clients leave while queued or in
the middle of a stream. A request may break off only when its own HTTP worker or core was killed.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from emberline.store import open_store
from standins.openai_script import StandinPrompt
from tests.databases import StoppablePostgres
from tests.soak.audit import check_results
from tests.soak.client import Client
from tests.soak.fault_injector import FaultInjector, Upstream
from tests.soak.server_process import Server, command, free_port
from tests.soak.soak import database, link_model
from tests.soak.streams import WORDS, EchoRequests, ExpectedReply
from tests.soak.streams_audit import check_idle, check_stream
from tests.soak.streams_client import StreamRecord, send

ENGINE_SCRIPT = "say=echo,ttft_ms=20,itl_ms=12,chunk_ms=15"
STANDIN_FLAGS = "--max-running 6 --token-budget 256 --kv-tokens 16384 --head-dim 16"  # few: some requests must queue
N_ENGINES = 2
N_UPSTREAMS = 3
N_LINES = 12  # of a batch
MOVE_LIMIT_S = 60.0  # the longest silence of a request whose engine or upstream hangs


@dataclass(slots=True)
class Ended:
    """A request that ended for its client, with its span on the monotonic clock."""

    expected: ExpectedReply
    record: StreamRecord
    asked_s: float
    ended_s: float


class Requests:
    """Requests to the engines and to the upstreams, with their expected replies."""

    def __init__(self, model: Path, rng: random.Random) -> None:
        self._rng = rng
        self._echo = EchoRequests(model, rng)

    def make(self, number: int) -> ExpectedReply:
        if self._rng.random() < 0.6:
            return self._echo.make(number)
        text = f"{number} {' '.join(self._rng.choices(WORDS, k=self._rng.choice((5, 60, 600))))}"
        n_tokens = self._rng.randrange(1, 40)
        body = {"model": "standin", "messages": [{"role": "user", "content": text}], "max_tokens": n_tokens}
        return ExpectedReply("/v1/chat/completions", body, ["".join(StandinPrompt(body).words(n_tokens))], n_tokens)


class Soak:
    def __init__(self, args: argparse.Namespace, folder: Path, postgres: StoppablePostgres | None) -> None:
        self.args = args
        self._rng = random.Random(args.seed + 1)
        self._lock = threading.Lock()
        home = folder / "home"
        link_model(home)
        self._where: str | Path = postgres.url if postgres is not None else home / "emberline.db"
        self._model = next((home / "models").glob("*/*.gguf"))
        self.upstreams = [Upstream(free_port()) for _ in range(N_UPSTREAMS)]
        (home / "emberline.toml").write_text("".join(map(_endpoint, self.upstreams)))
        env = {**os.environ, "EMBERLINE_HOME": str(home)}
        env.pop("PYTHONDONTWRITEBYTECODE", None)  # many starts: compile once
        if postgres is not None:
            env["EMBERLINE_STORE_URL"] = postgres.url
        port = free_port()
        words = command(ENGINE_SCRIPT, STANDIN_FLAGS, port, args.http_workers)
        words += ["--replicas", str(N_ENGINES), "--log-level", "info", "smollm2"]
        self.server = Server(words, port, env, folder / "server.log")
        self.injector = FaultInjector(
            self.server, self.upstreams, postgres, random.Random(args.seed), args.faults, args.mean_s
        )
        self.ended: list[Ended] = []
        self._n_begun = 0
        self._batches: dict[str, dict[str, str]] = {}  # questions by custom id, by batch
        self.problems: list[str] = []

    def run(self) -> dict[str, Any]:
        began_s = time.monotonic()
        self.server.start()
        requests = Requests(self._model, self._rng)
        client = Client(self.server.url)
        threads = [threading.Thread(target=self._client, args=(requests,)) for _ in range(self.args.clients)]
        threads.append(threading.Thread(target=self._submit_batches, args=(client,)))
        self.injector.start()
        for thread in threads:
            thread.start()
        for thread in (self.injector, *threads):
            thread.join()
        self.problems += self.injector.problems
        n_replayed = self._finish_batches(client)
        self.problems += check_idle(self.server.url, self.args.rest_s)
        status = self.server.stop()
        if status:
            self.problems.append(f"the last stop was not clean: {status}")
        outcomes = Counter(self._check(ended) for ended in self.ended)
        self._check_bills()
        silences = sorted(ended.record.silence_s for ended in self.ended)
        return {
            "database": self.args.database,
            "faults": dict(sorted(self.injector.injected.items())),
            "faults_total": self.injector.total,
            "requests": len(self.ended),
            **outcomes,
            "refused_and_asked_again": sum(ended.record.n_refused for ended in self.ended),
            "batch_lines": sum(map(len, self._batches.values())),
            "dead_letters_replayed": n_replayed,
            "longest_silence_s": round(silences[-1], 1),
            "silence_p99_s": round(silences[len(silences) * 99 // 100], 1),
            "anomalies": len(self.problems),
            "problems": self.problems[:50],
            "seconds": round(time.monotonic() - began_s, 1),
        }

    # --- clients -----------------------------------------------------------------------------------------------------

    def _client(self, requests: Requests) -> None:
        while self.injector.is_alive():
            with self._lock:
                self._n_begun += 1
                expected = requests.make(self._n_begun)
                choice = self._rng.random()
                leave_after = self._rng.randrange(1, 20) if choice < 0.05 else None
                leave_after_s = self._rng.uniform(0.01, 0.3) if 0.05 < choice < 0.15 else None
                streamed = leave_after is not None or self._rng.random() < 0.7
            body = {**expected.body, "stream": streamed}
            if streamed:
                body["stream_options"] = {"include_usage": True}
            asked_s = time.monotonic()
            record = send(self.server.url, expected.path, body, leave_after, leave_after_s)
            with self._lock:
                self.ended.append(Ended(expected, record, asked_s, time.monotonic()))
                if len(self.ended) % 500 == 0:
                    print(f"{len(self.ended)} requests, {self.injector.total} faults", file=sys.stderr, flush=True)
            if record.broke:
                time.sleep(0.2)  # nobody listens while the core is restarted

    def _submit_batches(self, client: Client) -> None:
        n = 0
        while self.injector.is_alive():
            names = {f"b{n}-{i}": f"question {n} {i}" for i in range(N_LINES)}
            lines = [_line(name, text) for name, text in names.items()]
            self._batches[client.submit(lines)] = names
            n += 1
            done_at = self.injector.total + 10
            while self.injector.is_alive() and self.injector.total < done_at:
                time.sleep(0.2)

    def _finish_batches(self, client: Client) -> int:
        n_replayed, n_before, moved_s = 0, -1, time.monotonic()
        while True:
            batches = [client.batch(batch_id) for batch_id in self._batches]
            n_done = sum(batch["request_counts"]["completed"] for batch in batches)
            if n_done == sum(map(len, self._batches.values())):
                break
            if n_done != n_before:
                n_before, moved_s = n_done, time.monotonic()
            if all(batch["status"] == "completed" for batch in batches):
                n_replayed += client.replay_dead()
            if time.monotonic() > moved_s + 120:
                self.problems.append(f"batches are stuck: {n_done} lines are done")
                return n_replayed
            time.sleep(0.5)
        for batch_id, asked in self._batches.items():
            check_results(asked, client.results(batch_id), echoes=True)
        return n_replayed

    # --- audit -------------------------------------------------------------------------------------------------------

    def _check(self, ended: Ended) -> str:
        """How the request ended; what is wrong with it goes to the problems."""
        record = ended.record
        if record.problem and not record.n_done and self._disconnected(ended.asked_s, ended.ended_s):
            return "broken_off_by_a_kill"
        wrong = check_stream(ended.expected.said, ended.expected.n_tokens, record)
        if record.silence_s > MOVE_LIMIT_S:
            wrong = wrong or f"silent for {record.silence_s:.0f} s"
        if wrong:
            span = f"{ended.ended_s - ended.asked_s:.1f} s"
            self.problems.append(f"{record.request_id} to {ended.expected.body['model']}, {span}: {wrong}")
            return "wrong"
        return "left" if record.left else "finished"

    def _disconnected(self, asked_s: float, ended_s: float) -> bool:
        """Whether a core or an HTTP worker was killed meanwhile."""
        return any(asked_s - 2 < until_s and from_s < ended_s + 2 for from_s, until_s in self.injector.disconnects_s)

    def _check_bills(self) -> None:
        rows = asyncio.run(_usage_rows(self._where))
        for name, n in Counter(row[0] for row in rows).items():
            if n > 1:
                self.problems.append(f"{name} has {n} usage rows")
        billed = {row[0]: row[1:] for row in rows}
        for ended in self.ended:
            record, n_tokens = ended.record, ended.expected.n_tokens or 0
            bill = billed.get(record.request_id)
            if record.n_done and not record.problem:
                usage = record.usage[0] if record.usage else {}
                exact = ("finished", usage.get("prompt_tokens"), usage.get("completion_tokens"))
                if bill != exact:
                    self.problems.append(f"{record.request_id} is billed {bill}, its client saw {exact}")
            elif bill is not None and bill[2] > n_tokens:
                self.problems.append(f"{record.request_id} was cut off and is billed {bill}, at most {n_tokens} came")
            for failed, asked_s, failed_s in record.failed:
                # At most what was computed; all of it only where the core died between the bill and the answer.
                status, _, n_billed = billed.get(failed, ("", 0, 0))
                if n_billed > n_tokens or (status == "finished" and not self._disconnected(asked_s, failed_s)):
                    self.problems.append(f"{failed} failed and is billed {billed[failed]}")


async def _usage_rows(where: str | Path) -> list[tuple[Any, ...]]:
    store = await open_store(where)
    try:
        return list(await store.read("SELECT id, status, input_tokens, output_tokens FROM usage"))
    finally:
        await store.close()


def _endpoint(upstream: Upstream) -> str:
    url = f"http://127.0.0.1:{upstream.port}"
    return f'[[endpoints]]\nname = "u{upstream.port}"\nkind = "vllm"\nurl = "{url}"\nmodels = ["standin"]\n'


def _line(custom_id: str, text: str) -> dict[str, Any]:
    body = {"model": "smollm2", "messages": [{"role": "user", "content": text}], "max_tokens": 64}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="make soak", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=10, help="at once")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--database", choices=("sqlite", "postgres"), default="postgres")
    parser.add_argument("--http-workers", type=int, default=2, help="HTTP processes; 1: the core itself")
    parser.add_argument("--mean-s", type=float, default=0.7, help="between two faults")
    parser.add_argument("--rest-s", type=float, default=60.0, help="within which nothing may be left over")
    parser.add_argument("--keep-log", type=Path, metavar="FILE", help="copy the server's log there")
    args = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="emberline-faults-") as folder, database(args.database) as postgres:
        soak = Soak(args, Path(folder), postgres)
        try:
            return soak.run()
        finally:
            soak.injector.stopped.set()
            soak.server.abandon()
            for kind in ("engine", "http_worker", "core"):
                for pid in soak.server.pids(kind):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, 9)
            for upstream in soak.upstreams:
                upstream.kill()
            if args.keep_log:
                args.keep_log.write_bytes((Path(folder) / "server.log").read_bytes())


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # unwinds, and ends what we started
    report = main()
    print(json.dumps(report, indent=2))
    sys.exit(1 if report["anomalies"] else 0)
