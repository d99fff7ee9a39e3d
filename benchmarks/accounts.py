"""What keys, limits, prices and budgets add to a request: `python -m benchmarks.accounts`. Prints a table and JSON.

One server without keys and one with `--auth keys`, where the key and its account have every limit and a budget, and the
model has a price; both over stand-in engines, both record usage. Requests alternate between them, so that whatever else
the machine does affects both. On a busy machine the CPU time, of all processes of a server, tells more than the time.
"""

import argparse
import http.client
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median, quantiles

from benchmarks import emberline_contender
from benchmarks.process import Process, cpu_s, ended_by_sigterm, free_port
from benchmarks.report import markdown
from emberline.catalog.model_store import ModelStore
from emberline.catalog.pull import pull

LIMIT_MS = 0.3
WARM_UP = 100  # requests
SCRIPT = "say=count"
LIMITS = ["--rpm", "100000000", "--tpm", "100000000000", "--concurrency", "100000", "--budget", "1000000/month"]
START_S = 120.0


class Server:
    """With or without keys, in a data folder of its own."""

    def __init__(self, folder: Path, gguf: Path, has_keys: bool, http_workers: int, stack: ExitStack) -> None:
        model = pull(str(gguf), ModelStore(folder)).card.id
        self._port = free_port()
        env = {"EMBERLINE_HOME": str(folder), "EMBERLINE_PORT": str(self._port), "STANDIN_KV": "1000000"}
        price = f'[[prices]]\nmodel = "{model}"\ninput = 0.6\ncached_input = 0.1\noutput = 3\n'
        (folder / "emberline.toml").write_text(price if has_keys else "")
        self._headers = {"Content-Type": "application/json"}
        flags = ["--port", str(self._port), "--http-workers", str(http_workers), "--log-level", "warning"]
        flags += ["--auth", "keys" if has_keys else "none", model]
        if has_keys:
            self._headers["Authorization"] = f"Bearer {_create_key({**os.environ, **env})}"
        command = [sys.executable, "-m", "benchmarks.standin_serve", SCRIPT, *flags]
        self.process = stack.enter_context(Process(command, folder / "server.log", env))
        message = {"role": "user", "content": "What is the capital of France?"}
        self._body = json.dumps({"model": model, "messages": [message], "max_tokens": 8}).encode()
        self._connection = http.client.HTTPConnection("127.0.0.1", self._port)

    def wait_ready(self) -> None:
        end_s = time.monotonic() + START_S
        while time.monotonic() < end_s:
            self.process.check()
            try:
                self.ask_ms()
            except OSError:
                self._connection.close()
                time.sleep(0.1)
            else:
                return
        raise TimeoutError(f"the server is not ready; its log is {self.process.log}")

    def cpu_ms(self) -> float:
        """Of all its processes."""
        return 1e3 * sum(map(cpu_s, self.process.tree()))

    def ask_ms(self) -> float:
        """How long one request takes, on a connection that is kept open."""
        began_s = time.perf_counter()
        self._connection.request("POST", "/v1/chat/completions", self._body, self._headers)
        answer = self._connection.getresponse()
        body = answer.read()
        took_ms = 1e3 * (time.perf_counter() - began_s)
        if answer.status == 503:
            raise ConnectionError(body)
        assert answer.status == 200, body
        if "Authorization" in self._headers:
            assert answer.getheader("x-ratelimit-remaining-tokens"), "limits do not apply"
        return took_ms


def _create_key(env: dict[str, str]) -> str:
    """The account has the same limits as its key."""
    key = [sys.executable, "-m", "emberline.cli.main", "key", "create", "--account", "acme", *LIMITS, "--json"]
    made = subprocess.run(key, env=env, check=True, stdout=subprocess.PIPE)
    account = [sys.executable, "-m", "emberline.cli.main", "account", "limit", "acme", *LIMITS]
    subprocess.run(account, env=env, check=True, stdout=subprocess.DEVNULL)
    return str(json.loads(made.stdout)["key"])


def measure(http_workers: int, rounds: int, requests: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory(prefix="emberline-accounts-") as name, ExitStack() as stack:
        gguf = emberline_contender.default_gguf()
        servers: dict[str, Server] = {}
        for kind in ("none", "keys"):
            folder = Path(name) / kind
            folder.mkdir()
            servers[kind] = Server(folder, gguf, kind == "keys", http_workers, stack)
        for server in servers.values():
            server.wait_ready()
            for _ in range(WARM_UP):
                server.ask_ms()
        added: list[float] = []
        cpu_ms = {kind: -server.cpu_ms() for kind, server in servers.items()}
        all_ms: dict[str, list[float]] = {kind: [] for kind in servers}
        for number in range(rounds):
            order = list(servers.items())[:: 1 if number % 2 else -1]
            round_ms: dict[str, list[float]] = {kind: [] for kind in servers}
            for _ in range(requests):
                for kind, server in order:
                    round_ms[kind].append(server.ask_ms())
            added.append(median(round_ms["keys"]) - median(round_ms["none"]))
            for kind, values in round_ms.items():
                all_ms[kind] += values
        for kind, server in servers.items():
            cpu_ms[kind] = (cpu_ms[kind] + server.cpu_ms()) / len(all_ms[kind])
    return {
        "http_workers": http_workers,
        "p50_ms": {kind: round(median(values), 3) for kind, values in all_ms.items()},
        "p90_ms": {kind: round(quantiles(values, n=10)[-1], 3) for kind, values in all_ms.items()},
        "cpu_ms": {kind: round(value, 3) for kind, value in cpu_ms.items()},
        "added_cpu_ms": round(cpu_ms["keys"] - cpu_ms["none"], 3),
        "added_p50_ms": round(median(added), 3),
        "added_p50_ms_by_round": [round(value, 3) for value in added],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accounts", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--requests", type=int, default=300, help="to each server, in a round")
    parser.add_argument("--quick", action="store_true", help="two rounds of 100 requests")
    parser.add_argument("--json", type=Path, help="write it there instead of printing it")
    args = parser.parse_args()
    ended_by_sigterm()
    rounds, requests = (2, 100) if args.quick else (args.rounds, args.requests)
    runs = [measure(http_workers, rounds, requests) for http_workers in (1, 2)]
    rows = []
    for run in runs:
        p50, p90 = run["p50_ms"], run["p90_ms"]
        assert isinstance(p50, dict)
        assert isinstance(p90, dict)
        cells = [f"{p50[kind]} / {p90[kind]}" for kind in ("none", "keys")]
        rows.append(
            [str(run["http_workers"]), *cells, f"{run['added_p50_ms']} (limit {LIMIT_MS})", str(run["added_cpu_ms"])]
        )
    head = ["HTTP workers", "no keys, p50 / p90 ms", "keys, limits, budget, prices", "added p50 ms", "added CPU ms"]
    print(markdown(head, rows))
    found = json.dumps({"machine": platform.machine(), "runs": runs})
    if args.json is None:
        print(found)
    else:
        args.json.write_text(found + "\n")


if __name__ == "__main__":
    main()
