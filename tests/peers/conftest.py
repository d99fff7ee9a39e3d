"""Tests with real vLLM servers, which `make peers` installs; without EMBERLINE_VLLM none is collected."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.peers.vllm import VllmServer

INSTALLED = os.environ.get("EMBERLINE_VLLM", "")  # the folder with vLLM's environment and the model's folder

if not INSTALLED:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, VllmServer]]:
    """A vLLM prefill server and a decode server, with KV transfer by NIXL over TCP."""
    folder, logs = Path(INSTALLED).absolute(), tmp_path_factory.mktemp("vllm")
    servers = {name: VllmServer(folder, name, logs) for name in ("prefill", "decode")}
    try:
        for server in servers.values():
            server.start()
        for server in servers.values():
            server.wait_ready()
        yield servers
    finally:
        for server in servers.values():
            server.kill()
