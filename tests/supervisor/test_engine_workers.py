"""Planning the engine workers of a machine and running them, with the stand-in engine."""

import asyncio
import os
import signal
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from emberline.cluster.engine_client import EngineClient
from emberline.config import EngineConfig
from emberline.protocol.errors import BadInput
from emberline.supervisor.engine_workers import EngineWorkers, WorkerPlan, plan_workers, runtime_folder, worker_spec
from emberline.supervisor.machine import Hardware
from emberline.supervisor.process import ProcessFailed
from tests.standin import standin_worker

MODELS = {"@cf/a/one": Path("/models/one.gguf"), "@cf/b/two": Path("/models/two.gguf")}


CPU = Hardware(gpus=(), cores=8, free_bytes=16 << 30)


def planned_on(config: EngineConfig, models: Mapping[str, Path], hardware: Hardware = CPU) -> list[WorkerPlan]:
    return plan_workers(config, models, hardware=hardware)


def with_gpus(n: int) -> Hardware:
    return Hardware(gpus=tuple(map(str, range(n))), cores=8, free_bytes=16 << 30)


def test_cpu_workers_share_cores_and_memory() -> None:
    (only,) = planned_on(EngineConfig(), {"@cf/a/one": Path("/m.gguf")})
    assert (only.name, only.device, only.gpu) == ("one-0", "cpu", None)
    assert (only.threads, only.kv_bytes) == (8, 2 << 30)  # a quarter would be 4 GiB
    plans = planned_on(EngineConfig(replicas=2), MODELS)
    assert [plan.name for plan in plans] == ["one-0", "one-1", "two-2", "two-3"]
    assert {(plan.threads, plan.shares_cpu, plan.kv_bytes) for plan in plans} == {(8, True, 1 << 30)}
    arguments = worker_spec(plans[3], EngineConfig(), Path("/run/w3.sock"), "t").arguments
    assert arguments[arguments.index("--cpu-share") + 1] == "/run/cpu-share:3"


def test_models_of_one_name_have_workers_of_different_names() -> None:
    models = {name: Path(f"/models/{name[4]}") for name in ("org-a/llama", "org-b/Llama", "org-c/other")}
    plans = planned_on(EngineConfig(prefill_workers=1, decode_workers=1), models)
    assert [plan.name for plan in plans] == [
        *("llama-prefill0", "llama-decode0", "org-b-llama-prefill0", "org-b-llama-decode0"),
        *("other-prefill0", "other-decode0"),
    ]
    (again, _) = plan_workers(
        EngineConfig(prefill_workers=1, decode_workers=1),
        {"org-b/llama": Path("/x")},
        first=6,
        hardware=CPU,
        taken=[plan.name for plan in plans],
    )
    assert again.name == "llama-prefill0-6"


def test_configured_threads_and_kv_bytes_are_used() -> None:
    (plan,) = planned_on(EngineConfig(threads=3, kv_bytes=123), {"m": Path("/m")})
    assert (plan.threads, plan.shares_cpu, plan.kv_bytes) == (3, False, 123)


def test_a_worker_of_several_ranks_has_a_gpu_for_each() -> None:
    config = EngineConfig(tp=2, ep=True)
    plans = planned_on(config, {"m": Path("/m")}, with_gpus(5))
    assert [plan.gpu for plan in plans] == ["0,1", "2,3"]
    spec = worker_spec(plans[1], config, Path("/run/w1.sock"), "t")
    assert spec.env["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert spec.arguments[spec.arguments.index("--tp") :][:3] == ("--tp", "2", "--ep")
    with pytest.raises(BadInput, match="tp4 pp2 needs 8 GPUs, one for each rank, and this machine has 5"):
        planned_on(EngineConfig(tp=4, pp=2), {"m": Path("/m")}, with_gpus(5))
    with pytest.raises(BadInput, match="--dcp 3 does not divide --tp 4"):
        planned_on(EngineConfig(tp=4, dcp=3), {"m": Path("/m")}, with_gpus(5))


def test_ranks_on_a_cpu_share_a_workers_threads() -> None:
    (plan,) = planned_on(EngineConfig(tp=2), {"m": Path("/m")})
    assert (plan.gpu, plan.threads, plan.shares_cpu) == (None, 8, False)
    spec = worker_spec(plan, EngineConfig(tp=2, step_timeout_s=9.5), Path("/run/w0.sock"), "t")
    assert spec.arguments[spec.arguments.index("--step-timeout") + 1] == "9.5"
    apart = planned_on(EngineConfig(tp=2, prefill_workers=1, decode_workers=1), {"m": Path("/m")})
    assert [plan.role for plan in apart] == ["prefill", "decode"]


def test_one_worker_per_gpu() -> None:
    plans = planned_on(EngineConfig(), {"m": Path("/m")}, with_gpus(2))
    assert [(plan.device, plan.gpu, plan.kv_bytes, plan.threads) for plan in plans] == [
        ("cuda", "0", 0, 0),
        ("cuda", "1", 0, 0),
    ]
    assert [plan.gpu for plan in planned_on(EngineConfig(device="cpu"), {"m": Path("/m")}, with_gpus(2))] == [None]


def test_cuda_without_a_gpu_is_refused() -> None:
    with pytest.raises(BadInput, match="no CUDA device"):
        planned_on(EngineConfig(device="cuda"), MODELS)


def test_the_workers_command_line() -> None:
    plan = WorkerPlan(name="m-0", model="m", path=Path("/m.gguf"), device="cuda", gpu="3", kv_bytes=0, threads=0)
    spec = worker_spec(plan, EngineConfig(max_running=8, deterministic=True), Path("/run/w.sock"), "token")
    assert spec.arguments == (
        *("--model", "/m.gguf", "--name", "m", "--socket", "/run/w.sock", "--device", "cuda"),
        *("--max-running", "8", "--deterministic", "--role", "both", "--id", "m-0"),
    )
    assert spec.env == {"EMBERLINE_WORKER_TOKEN": "token", "CUDA_VISIBLE_DEVICES": "3"}


def test_prefill_and_decode_workers_get_disjoint_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    plans = planned_on(EngineConfig(prefill_workers=1, decode_workers=2), {"m": Path("/m")})
    assert [(plan.name, plan.role) for plan in plans] == [
        ("m-prefill0", "prefill"),
        ("m-decode0", "decode"),
        ("m-decode1", "decode"),
    ]
    assert [plan.cores for plan in plans] == [(0, 1), (2, 3), (4, 5)]
    assert {(plan.threads, plan.shares_cpu) for plan in plans} == {(2, False)}
    assert worker_spec(plans[1], EngineConfig(), Path("/w"), "t").arguments[-8:] == (
        *("--role", "decode", "--id", "m-decode0", "--cores", "2,3"),
        *("--prefill-nice", "5"),  # whichever worker prefills: HTTP has priority
    )
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    assert [
        plan.cores for plan in planned_on(EngineConfig(prefill_workers=1, decode_workers=2), {"m": Path("/m")})
    ] == [()] * 3


@pytest.mark.parametrize(
    ("n_gpus", "n_decode", "gpus", "shares", "warning"),
    [
        (2, 1, ["0", "1"], [1, 1], ""),
        (1, 1, ["0", "0"], [0.5, 0.5], "2 prefill and decode workers of a model share 1 GPUs"),
        (2, 2, ["0", "1", "0"], [0.5, 1, 0.5], "3 prefill and decode workers of a model share 2 GPUs"),
        (4, 1, ["0", "1"], [1, 1], "2 prefill and decode workers of a model leave 2 GPUs unused"),
    ],
)
def test_prefill_and_decode_workers_have_gpus_in_turn(caplog, n_gpus, n_decode, gpus, shares, warning):
    """The memory of a GPU is divided by those that are on it, and not by those of another."""
    plans = planned_on(EngineConfig(prefill_workers=1, decode_workers=n_decode), {"m": Path("/m")}, with_gpus(n_gpus))
    assert [plan.gpu for plan in plans] == gpus
    assert [plan.memory_share for plan in plans] == shares
    assert [record.message.startswith(warning) for record in caplog.records] == [True] * bool(warning)


def test_models_on_one_gpu_have_explicit_or_even_shares_of_its_memory():
    def shares(*given):
        plans = planned_on(EngineConfig(gpu_memory_share=given), MODELS, with_gpus(1))
        return [plan.memory_share for plan in plans]

    assert shares() == [0.5, 0.5]
    assert shares(0.7, 0.3) == [0.7, 0.3]
    assert shares(0.4) == [0.4, 0.4]
    (first, _) = planned_on(EngineConfig(gpu_memory_share=(0.7, 0.3)), MODELS, with_gpus(1))
    arguments = worker_spec(first, EngineConfig(), Path("/run/w.sock"), "t").arguments
    assert arguments[arguments.index("--memory-share") + 1] == "0.7"
    with pytest.raises(BadInput, match="3 shares of the GPU's memory for 2 models"):
        shares(0.2, 0.2, 0.2)
    with pytest.raises(BadInput, match=r"add up to 1\.2, more than 1"):
        shares(0.6, 0.6)
    with pytest.raises(BadInput, match=r"add up to 1\.2, more than 1"):
        shares(0.6)


async def test_a_model_that_is_loaded_later_takes_what_the_shares_leave():
    planned = []

    def make_spec(plan, config, socket, token):
        planned.append(plan)
        return standin_worker()(plan, config, socket, token)

    workers = EngineWorkers([], EngineConfig(gpu_memory_share=(0.5, 0.3)), make_spec, hardware=with_gpus(1))
    try:
        await workers.load("@cf/c/three", Path("/models/three.gguf"), 64)
    finally:
        await workers.stop(5)
    assert [plan.memory_share for plan in planned] == [1.0]


@pytest.mark.parametrize("config", [EngineConfig(prefill_workers=1), EngineConfig(decode_workers=1)])
def test_one_role_alone_is_refused(config: EngineConfig) -> None:
    with pytest.raises(BadInput, match="--prefill-workers N and --decode-workers M"):
        planned_on(config, MODELS)
    with pytest.raises(BadInput, match="cannot be combined"):
        planned_on(EngineConfig(prefill_workers=1, decode_workers=1, replicas=2), MODELS)


def test_the_socket_folder_is_private_and_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    folder = runtime_folder()
    try:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert len(str(folder / "core.sock")) < 100
    finally:
        folder.rmdir()


async def test_workers_serve_restart_and_stop() -> None:
    def make_spec(*planned):
        return msgspec.structs.replace(standin_worker()(*planned), backoff_s=0.01)

    workers = EngineWorkers(planned_on(EngineConfig(), MODELS), EngineConfig(), make_spec, hardware=CPU)
    await workers.start()
    await asyncio.wait_for(workers.wait_ready(), 60)
    (endpoint,) = workers.endpoints["@cf/a/one"]
    client = EngineClient(endpoint)
    client.start()
    assert await client.wait_connected(60)
    assert client.info is not None
    assert client.info.model == "@cf/a/one"

    worker = workers.processes[0]
    first = worker.pid
    assert first is not None
    os.kill(first, signal.SIGSTOP)
    workers.kill("on another machine")
    workers.kill(worker.name)
    async with asyncio.timeout(60):
        while not client.connected or worker.pid in (None, first):
            await asyncio.sleep(0.01)
    assert worker.n_restarts == 1

    await client.close()
    retired = workers.processes[1]
    await workers.retire(retired.name)
    assert (worker.pid is None, retired.pid, workers.processes) == (False, None, [worker])

    loaded = await workers.load("@cf/c/three", Path("/models/three.gguf"), 64)
    assert [endpoint.name for endpoint in loaded] == ["three-2"]
    (third,) = workers.processes[1:]
    await workers.unload("@cf/c/three")
    assert (third.pid, workers.processes) == (None, [worker])
    assert await workers.load("@cf/c/three", Path("/models/three.gguf"), 64) == loaded, "clients find it again"
    assert await workers.load("@cf/b/two", MODELS["@cf/b/two"], 64) == workers.endpoints["@cf/b/two"]
    await workers.unload("@cf/c/three")
    (again,) = await workers.load("@cf/c/three", Path("/models/new-three.gguf"), 64)
    assert again.name == "three-3", "other weights, other workers"
    assert [each.name for each in workers.endpoints["@cf/c/three"]] == ["three-3"]
    running = list(workers.processes)
    assert len(running) == 3
    await workers.stop(grace_s=5)
    assert [worker.pid for worker in running] == [None, None, None]
    assert not workers.folder.exists()


async def test_missing_weights_are_reported(tmp_path: Path) -> None:
    plans = planned_on(EngineConfig(), {"m": tmp_path / "missing.gguf"})
    workers = EngineWorkers(plans, EngineConfig(), hardware=CPU)
    await workers.start()
    with pytest.raises(ProcessFailed, match=r"m-0 exited with status 1: .*missing\.gguf"):
        await asyncio.wait_for(workers.wait_ready(), 60)
    with pytest.raises(ProcessFailed, match=r"n-1 exited with status 1: .*missing\.gguf"):
        await asyncio.wait_for(workers.load("n", tmp_path / "missing.gguf", 64), 60)
    assert [worker.name for worker in workers.processes] == ["m-0"]
    await workers.stop(grace_s=5)


async def test_an_engine_process_has_no_credential_in_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = {
        "EMBERLINE_STORE_URL": "postgresql://me:sesame@db/x",
        "EMBERLINE_SECRET": "sesame" * 8,
        "EMBERLINE_AUTH_KEY": "sesame",
        "EMBERLINE_ENDPOINTS_OPENAI_KEY": "sesame",
        "OPENAI_API_KEY": "sesame",
        "HF_TOKEN": "sesame",
        "DATABASE_URL": "postgresql://me:sesame@db/x",
    }
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    os.mkfifo(tmp_path / "m.gguf")  # the process waits for its first byte
    workers = EngineWorkers(planned_on(EngineConfig(), {"m": tmp_path / "m.gguf"}), EngineConfig())
    await workers.start()
    environment = b""
    while not environment:  # it is empty until the process runs its program
        await asyncio.sleep(0.01)
        environment = Path(f"/proc/{workers.processes[0].pid}/environ").read_bytes()
    await workers.stop(grace_s=5)
    assert b"EMBERLINE_WORKER_TOKEN=" in environment
    assert b"sesame" not in environment
