"""The engine workers of this machine: which processes to run, and running them.

Each worker listens on a Unix socket in a private folder and lets in who knows its token; both stay the same when it is
restarted, so its clients find it again by themselves.
"""

import asyncio
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from emberline.balancer.endpoint import Endpoint
from emberline.config import EndpointConfig, EngineConfig
from emberline.engine.memory import default_kv_bytes
from emberline.protocol.errors import BadInput
from emberline.protocol.frames import WorkerRole
from emberline.supervisor import machine
from emberline.supervisor.process import Child, ChildSpec

PREFILL_NICE = 5  # on the cores that it shares with doors: a token that is there goes out before more is computed
_MAX_SOCKET_PATH = 90  # bytes; the system's own limit is 104 or 108


MakeSpec = Callable[["WorkerPlan", EngineConfig, Path, str], ChildSpec]


class WorkerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One worker to run."""

    name: str  # unique, stable over restarts
    model: str  # the id it serves
    path: Path  # of the weights
    device: str
    gpu: str | None  # the one it may see
    kv_bytes: int  # 0: the worker decides, from its GPU's free memory
    threads: int  # 0: the worker decides
    role: WorkerRole = "both"
    cores: tuple[int, ...] = ()  # the only ones it may run on; empty: any


def plan_workers(config: EngineConfig, models: Mapping[str, Path]) -> list[WorkerPlan]:
    """Workers for the models' weights: one per GPU and model, or one per model on a CPU, which they share out."""
    gpus = machine.gpus() if config.device != "cpu" else []
    if config.device == "cuda" and not gpus:
        raise BadInput(
            "no CUDA device to run on: `emberline doctor` tells what is missing; use --device cpu", param="device"
        )
    roles = _roles(config, len(gpus))
    n_workers = len(roles) * len(models)
    share_bytes = default_kv_bytes("cpu", n_workers) if n_workers else 0
    shares = _shares(n_workers) if config.prefill and not gpus else []
    share_threads = max(1, machine.cores() // max(1, n_workers))
    return [
        WorkerPlan(
            name=f"{_short(model)}-{label}",
            model=model,
            path=path,
            device="cuda" if gpus else "cpu",
            gpu=gpus[place % len(gpus)] if gpus else None,
            kv_bytes=config.kv_bytes or (0 if gpus else share_bytes),
            threads=config.threads or (0 if gpus else share_threads),
            role=role,
            cores=shares[number * len(roles) + place] if shares else (),
        )
        for number, (model, path) in enumerate(models.items())
        for place, (role, label) in enumerate(_labelled(roles, number * len(roles)))
    ]


def _roles(config: EngineConfig, n_gpus: int) -> list[WorkerRole]:
    if bool(config.prefill) != bool(config.decode):
        raise BadInput("prompts and replies apart need workers for both: give --prefill N and --decode M")
    if not config.prefill:
        return ["both"] * (config.replicas or max(1, n_gpus))
    if config.replicas:
        raise BadInput("--replicas is for workers that do both; with --prefill and --decode leave it out")
    prefill: WorkerRole = "prefill"
    decode: WorkerRole = "decode"
    return [prefill] * config.prefill + [decode] * config.decode


def _labelled(roles: Sequence[WorkerRole], first: int) -> list[tuple[WorkerRole, str]]:
    """What tells a model's workers apart: their number, of those of a role."""
    labels = []
    for place, role in enumerate(roles):
        labels.append((role, f"{first + place}" if role == "both" else f"{role}{place - roles.index(role)}"))
    return labels


def _shares(n_workers: int) -> list[tuple[int, ...]]:
    """The cores of each worker, so that prompts cannot slow down replies; none where there are too few."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    each = len(cores) // n_workers
    return [tuple(cores[at * each : (at + 1) * each]) for at in range(n_workers)] if each else []


class EngineWorkers:
    """Runs the planned workers until `stop`."""

    def __init__(self, plans: Sequence[WorkerPlan], config: EngineConfig, make_spec: MakeSpec | None = None) -> None:
        make_spec = make_spec or worker_spec
        self.folder = runtime_folder()
        self.endpoints: dict[str, list[Endpoint]] = {}  # by model
        self.workers: list[Child] = []
        for index, plan in enumerate(plans):
            socket = self.folder / f"w{index}.sock"
            token = secrets.token_hex(32)
            endpoint = Endpoint(
                name=plan.name, address=f"unix:{socket}", token=token, role=plan.role, models=(plan.model,)
            )
            self.endpoints.setdefault(plan.model, []).append(endpoint)
            self.workers.append(Child(make_spec(plan, config, socket, token)))

    async def start(self) -> None:
        """Every process exists when this returns; `wait_ready` waits for them to serve."""
        await asyncio.gather(*(worker.start() for worker in self.workers))

    async def wait_ready(self) -> None:
        """Raises ChildFailed when a worker cannot start."""
        await asyncio.gather(*(worker.wait_ready() for worker in self.workers))

    async def stop(self, grace_s: float) -> None:
        await asyncio.gather(*(worker.stop(grace_s) for worker in self.workers))
        shutil.rmtree(self.folder, ignore_errors=True)


def runtime_folder() -> Path:
    """A new folder for sockets that only this user may enter, its path short enough for one."""
    folder = tempfile.mkdtemp(prefix="emberline-")
    if len(folder) > _MAX_SOCKET_PATH - len("/core.sock"):
        shutil.rmtree(folder)
        folder = tempfile.mkdtemp(prefix="emberline-", dir="/tmp")
    return Path(folder)


def worker_spec(plan: WorkerPlan, config: EngineConfig, socket: Path, token: str) -> ChildSpec:
    """How to start a worker; see emberline/engine/worker.py."""
    arguments = ["--model", str(plan.path), "--name", plan.model, "--socket", str(socket), "--device", plan.device]
    for flag, value in (
        ("--kv-bytes", plan.kv_bytes),
        ("--threads", plan.threads),
        ("--max-running", config.max_running),
        ("--token-budget", config.token_budget),
    ):
        if value:
            arguments += [flag, str(value)]
    if config.deterministic:
        arguments.append("--deterministic")
    arguments += ["--role", plan.role, "--id", plan.name]
    if plan.cores:
        arguments += ["--cores", ",".join(map(str, plan.cores))]
        if plan.role == "prefill":
            arguments += ["--nice", str(PREFILL_NICE)]
    env = {"EMBERLINE_WORKER_TOKEN": token}
    if plan.gpu is not None:
        env["CUDA_VISIBLE_DEVICES"] = plan.gpu
    return ChildSpec(name=plan.name, module="emberline.engine.worker", arguments=tuple(arguments), env=env)


def _short(model: str) -> str:
    """The last part of a model's id: what a person calls it."""
    return model.rstrip("/").rpartition("/")[2].lower() or "model"


def remote_workers(configured: Iterable[EndpointConfig]) -> list[Endpoint]:
    """Each serves one model, which must be named: we tokenise for it."""
    workers = []
    for config in configured:
        if config.kind != "emberline":
            continue
        if len(config.models) != 1:
            raise BadInput(f"endpoint {config.name}: name the one model that this worker serves in `models`")
        address = config.url.replace("://", ":", 1)
        endpoint = Endpoint(
            name=config.name, address=address, token=config.key or "", role=config.role, models=config.models
        )
        try:
            endpoint.split()
        except ValueError:
            raise BadInput(
                f"endpoint {config.name}: the url of a worker is tcp://host:port or unix:/path, not {config.url!r}"
            ) from None
        workers.append(endpoint)
    return workers
