"""Soak test of streams: engines are killed with SIGKILL under them, and clients check every word.

python -m tests.soak.streams [--kills 1000] [--requests 10000] [--roles both|disaggregated] [--seed 1] [--real N]
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from emberline.protocol import token_ids as tokens
from emberline.text.text_model import TextModel
from tests.soak.server_process import Killer, Server, command, free_port
from tests.soak.soak import link_model
from tests.soak.streams_audit import check_idle, check_stream, check_usage
from tests.soak.streams_client import StreamRecord, stream

CLIENTS = 12  # at once
SCRIPT = "say=echo,ttft_ms=20,itl_ms=12,chunk_ms=15"
STANDIN_FLAGS = "--max-running 16 --token-budget 256 --kv-tokens 65536 --head-dim 16"
WORKERS = {"both": ["--replicas", "3"], "disaggregated": ["--prefill-workers", "2", "--decode-workers", "3"]}
REAL_WORKERS = {"both": ["--replicas", "2"], "disaggregated": ["--prefill-workers", "1", "--decode-workers", "2"]}
WORDS = ("river", "stone", "under", "a", "green", "sky", "and", "every", "old", "house", "had", "its", "own", "light")


class ExpectedReply:
    """A request and its known reply."""

    def __init__(self, path: str, body: dict[str, Any], said: list[str], n_tokens: int | None) -> None:
        self.path = path
        self.body = body
        self.said = said  # by choice
        self.n_tokens = n_tokens  # of all choices


class EchoRequests:
    """Completions that the stand-in engine echoes: leading tokens of the prompt; many prompts share a prefix."""

    def __init__(self, model: Path, rng: random.Random) -> None:
        self._text = TextModel.load(model)
        self._rng = rng
        self._openings = [self._words(rng.randrange(20, 200)) for _ in range(20)]

    def make(self, number: int) -> ExpectedReply:
        rng = self._rng
        n_words = rng.choice((5, 30, 320, 700))  # long ones go to prefill workers where there are any
        prompt = f"{number} {rng.choice(self._openings)} {self._words(n_words)}"
        ids = tokens.unpack(self._text.encode_prompt(prompt))
        n_tokens = min(len(ids), rng.randrange(1, 60))
        n = 2 if rng.random() < 0.1 else 1
        body = {"model": "smollm2", "prompt": prompt, "max_tokens": n_tokens, "n": n}
        return ExpectedReply("/v1/completions", body, [self._text.decode(ids[:n_tokens])] * n, n * n_tokens)

    def _words(self, n: int) -> str:
        return " ".join(self._rng.choices(WORDS, k=n))


class RealRequests:
    """Chats with the real model, whose replies were recorded while nothing was killed."""

    def __init__(self, url: str, rng: random.Random) -> None:
        self._rng = rng
        self._questions = [self._ask(url, number) for number in range(8)]

    def make(self, number: int) -> ExpectedReply:
        return self._rng.choice(self._questions)

    def _ask(self, url: str, number: int) -> ExpectedReply:
        words = " ".join(self._rng.choices(WORDS, k=(10, 500)[number % 2]))
        body: dict[str, Any] = {
            "model": "smollm2",
            "messages": [{"role": "user", "content": f"Go on with story {number}: {words}"}],
            "max_tokens": 24 + 8 * (number % 3),
            "n": 2 if number == 7 else 1,
            "temperature": 0,
        }
        if number % 4 >= 2:
            body |= {"temperature": 0.9, "seed": number}
        record = stream(url, "/v1/chat/completions", body)
        assert not record.problem, record.problem
        said = [record.texts[index] for index in range(body["n"])]
        return ExpectedReply("/v1/chat/completions", body, said, record.usage[0]["completion_tokens"])


class StreamKiller(Killer):
    """Kills engines at the rate of the requests, so that streams always run."""

    def __init__(self, soak: "Soak", args: argparse.Namespace) -> None:
        super().__init__(soak.server, args.kills, random.Random(args.seed), args.mean_s, ("engine",), args.minutes)
        self._soak = soak
        self.n_under_streams = 0

    def _kill_one(self) -> None:
        while self.total > self._soak.n_begun * self._n / self._soak.args.requests and not self.out_of_time:
            time.sleep(0.02)
        n_open, before = self._soak.n_open, self.total
        super()._kill_one()
        self.n_under_streams += bool(n_open and self.total > before)


class Soak:
    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args = args
        self.home = folder / "home"
        link_model(self.home)
        port = free_port()
        env = {**os.environ, "EMBERLINE_HOME": str(self.home)}
        env.pop("PYTHONDONTWRITEBYTECODE", None)  # a thousand starts: compile once
        words = command("real" if args.real else SCRIPT, STANDIN_FLAGS, port, args.http_workers)
        words += ["--log-level", "info", "--kv-bytes", "128M", "--deterministic"]
        words += (REAL_WORKERS if args.real else WORKERS)[args.roles]
        self.server = Server(words, port, env, folder / "server.log")
        self.n_begun = self.n_open = 0
        self._lock = threading.Lock()
        self._rng = random.Random(args.seed + 1)
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.n_tokens = 0  # of requests that were read to the end

    def run(self) -> dict[str, Any]:
        began_s = time.monotonic()
        self.server.start()
        source = self._source()
        n_asked_before = 8 if self.args.real else 0
        killer = StreamKiller(self, self.args)
        killer.start()
        clients = [threading.Thread(target=self._client, args=(source.make, killer)) for _ in range(CLIENTS)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        killer.join()
        if killer.problem is not None:
            raise killer.problem
        self.problems += check_idle(self.server.url, self.args.rest_s)
        status = self.server.stop()
        if status:
            self.problems.append(f"the last stop was not clean: {status}")
        n_heard = self.counts["heard"] + n_asked_before
        self.problems += check_usage(self.home / "emberline.db", n_heard, self.n_begun + n_asked_before)
        return {
            "roles": self.args.roles,
            "http_workers": self.args.http_workers,
            "real": bool(self.args.real),
            "requests": self.n_begun,
            **self.counts,
            "kills": killer.total,
            "kills_under_streams": killer.n_under_streams,
            "moves": (self.home.parent / "server.log").read_text(errors="replace").count("failover: "),
            "anomalies": len(self.problems),
            "problems": self.problems[:20],
            "seconds": round(time.monotonic() - began_s, 1),
        }

    def _source(self) -> EchoRequests | RealRequests:
        if self.args.real:
            return RealRequests(self.server.url, self._rng)
        return EchoRequests(next((self.home / "models").glob("*/*.gguf")), self._rng)

    def _client(self, make: Callable[[int], ExpectedReply], killer: StreamKiller) -> None:
        while True:
            with self._lock:
                if self.n_begun >= self.args.requests or killer.out_of_time:
                    return
                ahead = self.n_begun > (killer.total + 1) * self.args.requests / max(1, self.args.kills)
                if not (ahead and killer.is_alive()):
                    number, self.n_begun, self.n_open = self.n_begun, self.n_begun + 1, self.n_open + 1
                    question = make(number)
                    leave_after = self._rng.randrange(1, 20) if self._rng.random() < 0.05 else None
            if ahead and killer.is_alive():
                time.sleep(0.01)
                continue
            try:
                record = stream(self.server.url, question.path, question.body, leave_after)
                self._count(number, question, record)
            except Exception as error:
                self.problems.append(f"request {number}: {error!r}")
            finally:
                with self._lock:
                    self.n_open -= 1

    def _count(self, number: int, question: ExpectedReply, record: StreamRecord) -> None:
        wrong = check_stream(question.said, question.n_tokens, record)
        with self._lock:
            self.counts["left" if record.left else "heard"] += 1
            self.counts["refused_and_asked_again"] += record.n_refused
            if wrong:
                self.problems.append(f"request {number}: {wrong}")
                print(self.problems[-1], file=sys.stderr, flush=True)
            if sum(self.counts[key] for key in ("left", "heard")) % 500 == 0:
                print(f"{dict(self.counts)}, {len(self.problems)} problems", file=sys.stderr, flush=True)


def main(words: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="make soak", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--roles", choices=tuple(WORKERS), default="disaggregated")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--http-workers", type=int, default=1, help="HTTP processes; 1: the core itself")
    parser.add_argument("--mean-s", type=float, default=0.5, help="between two kills")
    parser.add_argument("--minutes", type=float, default=1e6, help="kill no more after so long, and audit")
    parser.add_argument("--rest-s", type=float, default=60.0, help="within which nothing may be left over")
    parser.add_argument("--real", type=int, metavar="N", help="so many requests on the real model instead")
    parser.add_argument("--keep-log", type=Path, metavar="FILE", help="copy the server's log there")
    args = parser.parse_args(words)
    if args.real:
        args.requests = args.real
    with tempfile.TemporaryDirectory(prefix="emberline-streams-") as folder:
        soak = Soak(args, Path(folder))
        try:
            return soak.run()
        finally:
            soak.server.abandon()
            for kind in ("engine", "core"):
                for pid in soak.server.pids(kind):
                    os.kill(pid, 9)
            if args.keep_log:
                args.keep_log.write_bytes((Path(folder) / "server.log").read_bytes())


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # unwinds, and ends what we started
    report = main()
    print(json.dumps(report, indent=2))
    sys.exit(1 if report["anomalies"] else 0)
