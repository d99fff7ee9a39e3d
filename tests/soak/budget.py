"""Soak test of budgets: clients spend one budget while the core and HTTP workers are killed, and check every bill.

python -m tests.soak.budget [--requests 10000] [--kills 60] [--clients 64] [--seed 1] [--database sqlite|postgres]
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from emberline.protocol import token_ids as tokens
from emberline.store import open_store
from emberline.text.text_model import TextModel
from tests.soak.server_process import ROOT, Killer, Server, command, free_port
from tests.soak.soak import Postgres, database, link_model
from tests.soak.streams import WORDS
from tests.soak.streams_client import StreamRecord, send

SCRIPT = "say=echo,ttft_ms=5,itl_ms=4"
STANDIN_FLAGS = "--max-running 64 --token-budget 4096 --kv-tokens 262144"
ACCOUNT = "acme"
CONTEXT = 2048
INPUT, OUTPUT = 1000, 5000  # pico-units per token
PRICES = """
[[prices]]
model = "@cf/huggingfacetb/smollm2-135m-instruct"
input = 0.001
cached_input = 0.001
output = 0.005
"""
SHARE = 0.5  # of what all requests would cost is in the budget
REST_S = 60.0  # within which every request is billed


@dataclass(frozen=True, slots=True)
class Ended:
    body: dict[str, Any]
    n_input: int
    record: StreamRecord

    @property
    def worst_pico(self) -> int:
        return self.n_input * INPUT + self.body["max_tokens"] * OUTPUT

    @property
    def is_refused(self) -> bool:
        return "insufficient_quota" in self.record.problem


class BudgetKiller(Killer):
    """Kills at the rate of the requests, so that requests always run."""

    def __init__(self, soak: "Soak", args: argparse.Namespace) -> None:
        kinds = ("core", "http_worker") if args.http_workers > 1 else ("core",)
        super().__init__(soak.server, args.kills, random.Random(args.seed), args.mean_s, kinds, args.minutes)
        self._soak = soak

    def _kill_one(self) -> None:
        while self.total > self._soak.n_begun * self._n / self._soak.args.requests and not self.out_of_time:
            time.sleep(0.02)
        super()._kill_one()


class Soak:
    def __init__(self, args: argparse.Namespace, folder: Path, postgres: Postgres | None) -> None:
        self.args = args
        self.home = folder / "home"
        link_model(self.home)
        (self.home / "emberline.toml").write_text(PRICES)
        self._where: str | Path = postgres.url if postgres is not None else self.home / "emberline.db"
        model = next((self.home / "models").glob("*/*.gguf"))
        self._text = TextModel.load(model)
        self._rng = random.Random(args.seed + 1)
        self._bodies = [self._body(number) for number in range(args.requests)]
        expected_pico = sum(n_input * INPUT + body["max_tokens"] * OUTPUT for body, n_input in self._bodies)
        self.cap_pico = int(expected_pico * SHARE)
        self._env = {**os.environ, "EMBERLINE_HOME": str(self.home)}
        self._env.pop("PYTHONDONTWRITEBYTECODE", None)  # many starts: compile once
        if postgres is not None:
            self._env["EMBERLINE_STORE_URL"] = postgres.url
        port = free_port()
        self._env["EMBERLINE_PORT"] = str(port)  # where the commands look for the server
        words = command(SCRIPT, STANDIN_FLAGS, port, args.http_workers)
        words += ["--replicas", "2", "--auth", "keys", "--log-level", "info", "smollm2"]
        self.server = Server(words, port, self._env, folder / "server.log")
        self.n_begun = 0
        self.ended: list[Ended] = []
        self.problems: list[str] = []
        self._lock = threading.Lock()

    def _body(self, number: int) -> tuple[dict[str, Any], int]:
        """A completion that the stand-in engine echoes, and the number of its prompt's tokens."""
        prompt = f"{number} {' '.join(self._rng.choices(WORDS, k=self._rng.choice((5, 30, 120))))}"
        n_input = len(tokens.unpack(self._text.encode_prompt(prompt)))
        n_output = self._rng.randrange(1, min(40, n_input))
        return {"model": "smollm2", "prompt": prompt, "max_tokens": n_output}, n_input

    def run(self) -> dict[str, Any]:
        began_s = time.monotonic()
        self.key = self._create_key()
        self.server.start()
        killer = BudgetKiller(self, self.args)
        killer.start()
        clients = [threading.Thread(target=self._client, args=(killer,)) for _ in range(self.args.clients)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        killer.join()
        if killer.problem is not None:
            raise killer.problem
        self.server.wait_ready()
        left_pico = self._spend_the_rest()
        status = self.server.stop()
        if status:
            self.problems.append(f"the last stop was not clean: {status}")
        spent_pico = self._check_bills()
        outcomes = Counter(
            "refused_for_the_budget" if ended.is_refused else "finished" if ended.record.n_done else "cut_off"
            for ended in self.ended
        )
        return {
            "database": self.args.database,
            "clients": self.args.clients,
            "requests": len(self.ended),
            **outcomes,
            "refused_and_asked_again": sum(ended.record.n_refused for ended in self.ended),
            "kills": killer.killed,
            "cap_pico": self.cap_pico,
            "spent_pico": spent_pico,
            "left_before_the_last_request_pico": left_pico,
            "anomalies": len(self.problems),
            "problems": self.problems[:50],
            "seconds": round(time.monotonic() - began_s, 1),
        }

    def _create_key(self) -> str:
        """As an operator does it, before the server runs."""
        amount = f"{self.cap_pico // 10**12}.{self.cap_pico % 10**12:012d}"
        words = [
            sys.executable,
            "-m",
            "emberline.cli.main",
            "key",
            "create",
            "--account",
            ACCOUNT,
            "--budget",
            amount,
            "--json",
        ]
        done = subprocess.run(words, cwd=ROOT, env=self._env, check=True, stdout=subprocess.PIPE)
        return str(json.loads(done.stdout)["key"])

    def _client(self, killer: Killer) -> None:
        while True:
            with self._lock:
                if self.n_begun >= self.args.requests or killer.out_of_time:
                    return
                ahead = self.n_begun > (killer.total + 1) * self.args.requests / max(1, self.args.kills)
                if not (ahead and killer.is_alive()):
                    number, self.n_begun = self.n_begun, self.n_begun + 1
                    streamed = self._rng.random() < 0.7
                    leave_after = self._rng.randrange(1, 20) if streamed and self._rng.random() < 0.05 else None
            if ahead and killer.is_alive():
                time.sleep(0.01)
                continue
            body, n_input = self._bodies[number]
            ended = self._ask(body, n_input, streamed, leave_after)
            with self._lock:
                self.ended.append(ended)
                if len(self.ended) % 500 == 0:
                    print(f"{len(self.ended)} requests, {killer.total} kills", file=sys.stderr, flush=True)
            if ended.record.broke:
                time.sleep(0.1)  # nobody listens while the core is restarted

    def _ask(self, body: dict[str, Any], n_input: int, streamed: bool, leave_after: int | None = None) -> Ended:
        sent = {**body, "stream": streamed}
        if streamed:
            sent["stream_options"] = {"include_usage": True}
        record = send(
            self.server.url, "/v1/completions", sent, leave_after, headers={"Authorization": f"Bearer {self.key}"}
        )
        return Ended(body, n_input, record)

    def _spend_the_rest(self) -> int:
        """When all has come to rest, a request that may cost all that is left is accepted, and one of more is not."""
        end_s = time.monotonic() + REST_S
        body, n_input = self._bodies[0]
        while True:
            left_pico = self.cap_pico - self._billed_pico()
            room, at_rest = (left_pico - n_input * INPUT) // OUTPUT, True
            for n_output, fits in ((room + 1, False), (room, True)):
                if not 1 <= n_output < CONTEXT - n_input:
                    continue
                ended = self._ask({**body, "max_tokens": n_output}, n_input, streamed=False)
                self.ended.append(ended)
                if fits and ended.is_refused and time.monotonic() < end_s:
                    at_rest = False  # a client that left is billed a moment later
                elif ended.is_refused == fits or (fits and not ended.record.n_done):
                    said = f"{ended.record.problem or 'accepted'}"
                    self.problems.append(f"{left_pico} is left, and a request of {ended.worst_pico} at most: {said}")
            if at_rest:
                return left_pico
            time.sleep(0.2)

    # --- audit -------------------------------------------------------------------------------------------------------

    def _rows(self) -> list[tuple[Any, ...]]:
        sql = "SELECT id, status, input_tokens, output_tokens, cost_pico, account FROM usage"

        async def read() -> list[tuple[Any, ...]]:
            store = await open_store(self._where)
            try:
                return list(await store.read(sql))
            finally:
                await store.close()

        return asyncio.run(read())

    def _billed_pico(self) -> int:
        return sum(row[4] or 0 for row in self._rows())

    def _check_bills(self) -> int:
        rows = self._rows()
        spent_pico = sum(row[4] or 0 for row in rows)
        if spent_pico > self.cap_pico:
            self.problems.append(f"{spent_pico} is billed, more than the budget of {self.cap_pico}")
        billed = {row[0]: row[1:] for row in rows}
        for name, (status, n_input, n_output, cost_pico, account) in billed.items():
            price_pico = 0 if status == "failed" else n_input * INPUT + n_output * OUTPUT
            if (cost_pico, account) != (price_pico, ACCOUNT):
                self.problems.append(f"{name} of {account} costs {cost_pico}, by its price {price_pico}")
        for ended in self.ended:
            record = ended.record
            bill = billed.get(record.request_id)
            if record.n_done and not record.problem:
                usage = record.usage[0]
                exact = ("finished", usage["prompt_tokens"], usage["completion_tokens"])
                if bill is None or bill[:3] != exact:
                    self.problems.append(f"{record.request_id} is billed {bill}, its client saw {exact}")
            elif ended.is_refused:
                if bill is not None:
                    self.problems.append(f"{record.request_id} was refused and is billed {bill}")
            elif bill is not None and (bill[2] > ended.body["max_tokens"] or bill[3] > ended.worst_pico):
                self.problems.append(f"{record.request_id} was cut off and is billed {bill}")
            elif not (record.broke or record.left or record.problem.startswith("it broke off")):
                self.problems.append(f"{record.request_id}: {record.problem}")
        return spent_pico


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="make soak", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--clients", type=int, default=64, help="at once")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--database", choices=("sqlite", "postgres"), default="sqlite")
    parser.add_argument("--http-workers", type=int, default=2, help="HTTP processes; 1: the core itself")
    parser.add_argument("--mean-s", type=float, default=0.7, help="between two kills")
    parser.add_argument("--minutes", type=float, default=1e6, help="end after so long, and audit")
    parser.add_argument("--keep-log", type=Path, metavar="FILE", help="copy the server's log there")
    args = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="emberline-budget-") as folder, database(args.database) as postgres:
        soak = Soak(args, Path(folder), postgres)
        try:
            return soak.run()
        finally:
            soak.server.abandon()
            for kind in ("engine", "http_worker", "core"):
                for pid in soak.server.pids(kind):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, 9)
            if args.keep_log:
                args.keep_log.write_bytes((Path(folder) / "server.log").read_bytes())


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # unwinds, and ends what we started
    report = main()
    print(json.dumps(report, indent=2))
    sys.exit(1 if report["anomalies"] else 0)
