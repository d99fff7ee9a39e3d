"""Soak test of the queue: processes are killed with SIGKILL while jobs run, and the client checks every result.

python -m tests.soak.soak [--kills 1000] [--lines 10000] [--seed 1] [--database sqlite|postgres] [--real N]
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.databases import StoppablePostgres
from tests.soak.audit import check_results, check_runs, check_store, count_under_load
from tests.soak.client import Client
from tests.soak.server_process import Killer, Server, command, free_port

BATCH = 50  # jobs; submitted at the pace of the kills
N_RUNNING = 16
STUCK_S = 300.0  # without a job that ends: the run is stuck
RESTARTS = 10  # of PostgreSQL, over a run


class Soak:
    def __init__(self, args: argparse.Namespace, folder: Path, postgres: "Postgres | None") -> None:
        self.args = args
        self.rng = random.Random(args.seed)
        self.postgres = postgres
        self.journal = folder / "journal"
        self.journal.touch()
        self.home = folder / "home"
        link_model(self.home)
        port = free_port()
        script = (
            "real" if args.real else "say=echo,itl_ms=25,ttft_ms=50"
        )  # about a second per job, so that some always run
        env = {**os.environ, "EMBERLINE_HOME": str(self.home)}
        env.pop("PYTHONDONTWRITEBYTECODE", None)  # a thousand starts: compile once
        if postgres is not None:
            env["EMBERLINE_STORE_URL"] = postgres.url
        words = command(script, f"--journal {self.journal} --max-running {N_RUNNING}", port, args.http_workers)
        words += ["--log-level", "warning"]
        self.server = Server(words, port, env, folder / "server.log")
        self.client = Client(self.server.url)
        self.asked: dict[str, dict[str, str]] = {}  # questions by custom id, by batch
        self.n_submitted = 0  # jobs

    def run(self) -> dict[str, Any]:
        began_s = time.monotonic()
        self.server.start()
        kinds = ("core", "engine") + (("http_worker",) if self.args.http_workers > 1 else ())
        killer = Killer(self.server, self.args.kills, self.rng, self.args.mean_s, kinds, self.args.minutes)
        killer.start()
        self._submit_and_wait(killer)
        n_replayed = self._finish()
        for batch_id, asked in self.asked.items():
            check_results(asked, self.client.results(batch_id), echoes=not self.args.real)
        self.server.wait_ready()
        status = self.server.stop()
        assert status == 0, f"the last stop was not clean: {status}"
        where = self.postgres.url if self.postgres is not None else self.home / "emberline.db"
        lines = check_store(where, self.n_submitted)
        runs = (0, 0) if self.args.real else check_runs(self.journal, lines)
        under_load = None if self.args.real else count_under_load(self.journal, lines, killer.moments_us)
        return {
            "database": self.args.database,
            "lines": len(lines),
            "kills": killer.killed,
            "kills_while_lines_ran": under_load,
            "postgres_restarts": self.postgres.n_restarts if self.postgres is not None else 0,
            "server_starts": self.server.n_starts,
            "engine_runs": runs[0],
            "runs_again": runs[1],
            "dead_letters_replayed": n_replayed,
            "lines_with_kills": sum(row[5] > 0 for row in lines),
            "seconds": round(time.monotonic() - began_s, 1),
        }

    def _submit_and_wait(self, killer: Killer) -> None:
        """Submit at the rate of the kills, so that jobs always run."""
        began_s = time.monotonic()
        while self.n_submitted < self.args.lines and not killer.out_of_time:
            n = min(BATCH, self.args.lines - self.n_submitted)
            questions = {f"c{self.n_submitted + i}": f"question number {self.n_submitted + i}" for i in range(n)}
            self.asked[self.client.submit([_line(name, text) for name, text in questions.items()])] = questions
            self.n_submitted += n
            said = f"{time.monotonic() - began_s:.0f} s: {killer.total} kills, {self.n_submitted} lines submitted"
            print(said, file=sys.stderr, flush=True)
            while killer.is_alive() and killer.total < self.args.kills * self.n_submitted / self.args.lines:
                self._maybe_restart_postgres(killer)
                time.sleep(0.2)
        killer.join()
        if killer.problem is not None:
            raise killer.problem

    def _maybe_restart_postgres(self, killer: Killer) -> None:
        n_wanted = min(RESTARTS, max(1, self.args.kills // 3))
        if self.postgres is not None and self.postgres.n_restarts < n_wanted * killer.total / max(1, self.args.kills):
            self.postgres.restart()

    def _finish(self) -> int:
        """Wait for every batch; jobs that were dead-lettered by our kills are replayed."""
        n_replayed, n_before, moved_s = 0, -1, time.monotonic()
        while True:
            batches = [self.client.batch(batch_id) for batch_id in self.asked]
            n_done = sum(batch["request_counts"]["completed"] for batch in batches)
            if n_done == self.n_submitted and all(batch["status"] == "completed" for batch in batches):
                return n_replayed
            if n_done != n_before:
                n_before, moved_s = n_done, time.monotonic()
            if all(batch["status"] == "completed" for batch in batches):
                n_replayed += self.client.replay_dead()
            assert time.monotonic() < moved_s + STUCK_S, f"stuck: {n_done} of {self.n_submitted} lines are done"
            time.sleep(0.2)


def _line(custom_id: str, text: str) -> dict[str, Any]:
    body = {"model": "smollm2", "messages": [{"role": "user", "content": text}], "max_tokens": 64}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def link_model(home: Path) -> None:
    """The default model, pulled once per machine: also the stand-in engine needs its tokenizer."""
    from emberline.catalog.model_store import ModelStore
    from emberline.catalog.pull import pull

    cache = os.environ.get("EMBERLINE_TEST_CACHE") or "~/.cache/emberline-tests"
    path = pull("smollm2", ModelStore(Path(cache).expanduser())).path
    (home / "models").mkdir(parents=True)
    (home / "models" / path.parent.name).symlink_to(path.parent)


class Postgres(StoppablePostgres):
    """A server from the wheel that is restarted abruptly."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.n_restarts = 0

    def restart(self) -> None:
        self.n_restarts += 1
        self.stop()
        self.start()


@contextmanager
def database(kind: str) -> Iterator[Postgres | None]:
    if kind == "sqlite":
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="emberline-pg-") as folder:
        postgres = Postgres(Path(folder))
        try:
            yield postgres
        finally:
            postgres.close()


def main(words: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="make soak", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--lines", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--database", choices=("sqlite", "postgres"), default="sqlite")
    parser.add_argument("--http-workers", type=int, default=2, help="HTTP processes; 1: the core itself")
    parser.add_argument("--mean-s", type=float, default=0.7, help="between two kills")
    parser.add_argument("--minutes", type=float, default=1e6, help="kill no more after so long, and audit")
    parser.add_argument("--real", type=int, metavar="N", help="so many lines on the real model instead")
    args = parser.parse_args(words)
    if args.real:
        args.lines = args.real
    with tempfile.TemporaryDirectory(prefix="emberline-soak-") as folder, database(args.database) as postgres:
        soak = Soak(args, Path(folder), postgres)
        try:
            return soak.run()
        except BaseException:
            log = (Path(folder) / "server.log").read_text(errors="replace")
            print(log[-4000:], file=sys.stderr)
            raise
        finally:
            soak.server.abandon()
            for kind in ("engine", "http_worker", "core"):
                for pid in soak.server.pids(kind):
                    os.kill(pid, 9)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # unwinds, and ends what we started
    print(json.dumps(main(), indent=2))
