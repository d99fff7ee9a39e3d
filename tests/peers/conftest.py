"""Real servers of other people: `make peers` installs them and says where; else nothing here is run."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.peers.vllm import Vllm

INSTALLED = os.environ.get("EMBERLINE_VLLM", "")  # the folder with vLLM's environment and the model's folder

if not INSTALLED:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Vllm]]:
    """One vLLM that computes prompts and one that writes replies, KV over NIXL and TCP between them."""
    folder, logs = Path(INSTALLED).absolute(), tmp_path_factory.mktemp("vllm")
    servers = {name: Vllm(folder, name, logs) for name in ("prefill", "decode")}
    try:
        for server in servers.values():
            server.start()
        for server in servers.values():
            server.wait_ready()
        yield servers
    finally:
        for server in servers.values():
            server.kill()
