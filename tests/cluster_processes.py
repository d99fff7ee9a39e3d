"""Cores and stand-in workers as processes of their own, on one PostgreSQL database."""

import contextlib
import json
import os
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from emberline.accounts.secret import Secret
from emberline.cluster.cluster import cluster_id, join_key
from emberline.protocol.credential import client_context
from emberline.supervisor.cluster.certificate_authority import KEY_BYTES, CertificateAuthority

ROOT = "r" * 40
ADMIN = "an-admin-key-for-tests"
PATIENCE_S = 60.0


def wait_until(condition: Callable[[], object], what: str, patience_s: float = PATIENCE_S) -> None:
    end_s, pause_s = time.monotonic() + patience_s, 0.02
    while not condition():
        assert time.monotonic() < end_s, what
        time.sleep(pause_s)
        pause_s = min(0.25, 1.3 * pause_s)  # asking costs processor time that the others need


class ApiError(Exception):
    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"{status}: {body}")
        self.status = status
        self.body = body


class CoreProcess:
    def __init__(self, process: "subprocess.Popen[str]", url: str) -> None:
        self.process = process
        self.url = url

    def call(self, method: str, path: str, body: Any = None, key: str = ADMIN, **headers: str) -> Any:
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        all_headers = {"content-type": "application/json", "authorization": f"Bearer {key}", **headers}
        request = urllib.request.Request(self.url + path, data, all_headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                content = answer.read()
        except urllib.error.HTTPError as error:
            raise ApiError(error.code, error.read().decode()) from None
        return json.loads(content) if answer.headers["content-type"].startswith("application/json") else content

    def chat(self, model: str, text: str = "hello", key: str = ADMIN, **more: Any) -> Any:
        body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 8, **more}
        return self.call("POST", "/v1/chat/completions", body, key)

    def members(self) -> dict[str, Any]:
        return {member["name"]: member for member in self.call("GET", "/api/cluster")["members"]}

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class ClusterProcesses:
    """Ended with `close`."""

    def __init__(self, folder: Path, store_url: str, weights: Path) -> None:
        self.folder = folder
        self.model = ""  # its id, once a core runs
        self._weights = weights
        self._processes: list[subprocess.Popen[str]] = []
        self._env = {**os.environ, "EMBERLINE_SECRET": ROOT, "EMBERLINE_STORE_URL": store_url}
        secret = Secret(ROOT)
        self._authority = CertificateAuthority(secret.derive("cluster-ca", size=KEY_BYTES), cluster_id(secret))
        self._secret = secret

    def start_cores(self, *names: str, flags: tuple[str, ...] = ()) -> list[CoreProcess]:
        started = [
            self._start(
                name,
                ("emberline.cli.main", "serve", str(self._weights), "--core-only", "--port", "0", "--json", *flags),
                {"EMBERLINE_HOME": str(self.folder / name), "EMBERLINE_AUTH_KEY": ADMIN},
            )
            for name in names
        ]
        cores = []
        for process in started:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, "a core did not start; its log is in the folder"
            cores.append(CoreProcess(process, json.loads(line)["url"]))
        self.model = cores[0].call("GET", "/v1/models")["data"][0]["id"]
        return cores

    def start_worker(
        self,
        name: str,
        *cores: CoreProcess,
        flags: tuple[str, ...] = (),
        tls: bool = True,
        program: tuple[str, ...] = ("standins.standin_engine",),
    ) -> "subprocess.Popen[str]":
        key = self.key_of(name)
        credential = self._authority.worker_credential(name, key)
        if not tls:
            credential = type(credential)(name=name, cluster=credential.cluster, key=key)
        joins = [word for core in cores for word in ("--join", core.url)]
        command = (*program, "--socket", "tcp:127.0.0.1:0", "--name", self.model)
        env = {"EMBERLINE_WORKER_CREDENTIAL": credential.encode()}
        return self._start(f"{name}-{len(self._processes)}", (*command, *joins, *flags), env)

    def key_of(self, name: str) -> bytes:
        """The join key of a worker."""
        return join_key(self._secret, name)

    def core_context(self) -> ssl.SSLContext:
        """As a core has it."""
        return client_context(self._authority.core_pem())

    def _start(self, name: str, command: tuple[str, ...], env: dict[str, str]) -> "subprocess.Popen[str]":
        with (self.folder / f"{name}.log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", *command],
                env={**self._env, **env},
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._processes.append(process)
        return process

    def close(self) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        for process in self._processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()


@contextlib.contextmanager
def cluster_processes(folder: Path, store_url: str, weights: Path) -> Iterator[ClusterProcesses]:
    cluster = ClusterProcesses(folder, store_url, weights)
    try:
        yield cluster
    finally:
        cluster.close()
