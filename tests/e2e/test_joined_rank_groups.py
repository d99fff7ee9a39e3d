"""Workers of two ranks each that join a cluster: KV goes from every rank to every rank over TLS."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster_processes import ClusterProcesses, cluster_processes, wait_until
from tests.databases import drop_schema, make_schema

ROLES = ("prefill", "decode")


@pytest.fixture
def cluster(postgres: str, tiny_model: Path, tmp_path: Path) -> Iterator[ClusterProcesses]:
    url = asyncio.run(make_schema(postgres))
    with cluster_processes(tmp_path, url, tiny_model) as cluster:
        yield cluster
    asyncio.run(drop_schema(postgres, url))


@pytest.mark.slow
def test_rank_groups_transfer_kv_over_tls(cluster: ClusterProcesses, tiny_model: Path) -> None:
    """Followers have the certificate of their worker from rank 0."""
    (core,) = cluster.start_cores("core")
    program = ("emberline.engine.worker", "--model", str(tiny_model), "--device", "cpu", "--threads", "2")
    flags = ("--tp", "2", "--kv-bytes", str(16 << 20), "--role")
    for role in ROLES:
        cluster.start_worker(role, core, flags=(*flags, role), program=program)
    wait_until(
        lambda: all(core.members().get(role, {}).get("connected") for role in ROLES),
        f"not all joined: {core.members()}",
    )

    def received() -> int:
        engines = {engine["name"]: engine for engine in core.call("GET", "/api/ps")["engines"]}
        return int(engines["decode"]["load"].get("blocks_received", 0))

    assert core.chat(cluster.model, "word " * 100)["usage"]["prompt_tokens"] > 100
    wait_until(lambda: received() > 4, "no KV was transferred")
