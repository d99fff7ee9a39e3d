"""A real Mooncake pool on loopback for tests: master, lent memory, and tiers over it."""

import contextlib
import importlib
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from emberline.kv.tiers.pool.pool_tier import CALL_LIMIT_S, PoolTier, open_pool
from emberline.protocol.kv_store import StoreSettings

KEY = bytes(range(32))


def require_mooncake() -> None:
    """Skip the module where Mooncake is not installed, or cannot be loaded: Debian's libibverbs1 and librdmacm1."""
    try:
        importlib.import_module("mooncake.store")
    except (ImportError, OSError) as error:
        pytest.skip(f"Mooncake Store cannot be loaded: {error}", allow_module_level=True)


def until(condition: Callable[[], object], limit_s: float = 60.0) -> None:
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, "timed out"
        time.sleep(0.01)


class MooncakePool:
    """Processes of a pool. The master can be killed, stopped and started anew on its ports."""

    def __init__(self, lend_bytes: int = 64 << 20) -> None:
        self._ports = [_free_port(), _free_port()]
        port, metrics = self._ports
        self.settings = StoreSettings(f"127.0.0.1:{port}", metrics=f"127.0.0.1:{metrics}")
        self._processes: list[subprocess.Popen[str]] = []
        self.master_pid = 0
        self._stack = contextlib.ExitStack()
        self.start_master()
        self.memory = self.lend(lend_bytes)

    def start_master(self) -> None:
        port, metrics = map(str, self._ports)
        arguments = ("--host", "127.0.0.1", "--port", port, "--metrics-port", metrics)
        _, ready = self._start("emberline.kv.tiers.pool.mooncake_master", *arguments)
        self.master_pid = ready["master_pid"]

    def lend(self, n_bytes: int) -> "subprocess.Popen[str]":
        arguments = ("--kv-store", self.settings.url, "--bytes", str(n_bytes))
        return self._start("emberline.kv.tiers.pool.pool_memory", *arguments)[0]

    def tier(self, key: bytes = KEY, call_limit_s: float = CALL_LIMIT_S) -> PoolTier:
        """A connected tier, as a worker has one."""
        tier = open_pool(self.settings, key, call_limit_s)
        self._stack.callback(tier.close)
        until(lambda: tier.stats().state == "ok")
        return tier

    def _start(self, module: str, *arguments: str) -> "tuple[subprocess.Popen[str], dict[str, int]]":
        process = subprocess.Popen(
            (sys.executable, "-m", module, *arguments), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self._processes.append(process)
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        assert ready["ready"], ready
        return process, ready

    def close(self) -> None:
        self._stack.close()
        for process in reversed(self._processes):
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


@contextlib.contextmanager
def mooncake_pool(lend_bytes: int = 64 << 20) -> Iterator[MooncakePool]:
    pool = MooncakePool(lend_bytes)
    try:
        yield pool
    finally:
        pool.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
