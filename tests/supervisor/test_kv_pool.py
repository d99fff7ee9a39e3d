"""The pool's processes on one machine: what is missing is said at once; master and memory run, and come back."""

import asyncio
import importlib.util
import os
import signal
import time
from pathlib import Path

import pytest

from emberline.config import KVConfig, resolve
from emberline.protocol.errors import BadInput
from emberline.protocol.kv_store import StoreSettings
from emberline.supervisor.engine_workers import TierSettings, with_tiers
from emberline.supervisor.kv_pool import PoolPlan, PoolProcesses, check_installed, plan_pool
from emberline.supervisor.process import ProcessSpec


def test_no_pool_without_a_setting() -> None:
    assert plan_pool(KVConfig()) is None
    with pytest.raises(BadInput, match="--kv-store mooncake"):
        plan_pool(KVConfig(pool_master="10.0.0.1:50051"))


def test_says_which_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match=r"pip install 'emberline\[mooncake\]'"):
        plan_pool(KVConfig(store="mooncake"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(BadInput, match=r"apt install libabsent1$"):
        check_installed({"libc.so.6": "libc6", "libabsent.so.1": "libabsent1"})


def test_plans() -> None:
    def plan_installed(**settings: object) -> PoolPlan | None:
        return plan_pool(KVConfig(store="mooncake", **settings), check=lambda: None)  # type: ignore[arg-type]

    plan = plan_installed(pool_bytes=1 << 20)
    assert plan is not None
    assert plan.starts_master
    assert plan.lend_bytes == 1 << 20
    assert plan.store.master.startswith("127.0.0.1:")
    assert StoreSettings.parse(plan.store.url) == plan.store
    there = plan_installed(pool_master="10.0.0.1:50051", pool_host="10.0.0.2", pool_bytes=0)
    assert there is not None
    assert not there.starts_master
    assert there.store == StoreSettings("10.0.0.1:50051", "10.0.0.2")
    with pytest.raises(BadInput, match="not an address of this machine"):
        plan_installed(pool_host="192.0.2.1")


@pytest.mark.parametrize("url", ["", "mooncake://", "http://a:1", "mooncake://host", "mooncake://h:1?x=2"])
def test_store_urls_that_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"mooncake|strict|bad"):
        StoreSettings.parse(url)


def test_the_key_is_checked_and_never_shown(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="64 hexadecimal digits") as caught:
        resolve({}, {"EMBERLINE_KV_KEY": "hunter2"}, tmp_path)
    assert "hunter2" not in str(caught.value)
    config = resolve({}, {"EMBERLINE_KV_KEY": "ab" * 32, "EMBERLINE_KV_POOL_BYTES": "1G"}, tmp_path)
    assert config.kv.pool_bytes == 1 << 30
    assert "abab" not in repr(config)


async def test_master_and_memory_are_restarted() -> None:
    try:
        check_installed()
    except BadInput as missing:
        pytest.skip(str(missing))
    plan = plan_pool(KVConfig(store="mooncake", pool_bytes=16 << 20))
    assert plan is not None
    pool = PoolProcesses(plan, backoff_s=0.01)
    await pool.start()
    try:
        master, memory = pool.processes
        first = master.ready_line["master_pid"], memory.pid
        os.kill(first[0], signal.SIGKILL)
        assert memory.pid is not None
        os.kill(memory.pid, signal.SIGKILL)
        end_s = time.monotonic() + 60
        while master.ready_line["master_pid"] == first[0] or memory.pid in (first[1], None):
            assert time.monotonic() < end_s
            await asyncio.sleep(0.01)
    finally:
        await pool.stop(grace_s=5)
    assert not Path(f"/proc/{master.ready_line['master_pid']}").exists()


def test_workers_are_told_the_pool_and_its_key_but_not_on_the_command_line() -> None:
    store = StoreSettings("127.0.0.1:7001", metrics="127.0.0.1:7002")
    tiers = TierSettings(host_bytes=0, disk_bytes=0, disk_path=Path("/kv"), store=store, key=bytes(range(32)))
    spec = with_tiers(ProcessSpec(name="w", module="emberline.engine.worker"), tiers)
    assert spec.arguments[spec.arguments.index("--kv-store") + 1] == store.url
    assert spec.env["EMBERLINE_KV_KEY"] == bytes(range(32)).hex()
    assert bytes(range(32)).hex() not in " ".join(spec.arguments)
    assert bytes(range(32)).hex() not in repr(tiers)
