"""The engine workers of this machine: which processes to run, and running them.

Each worker listens on a Unix socket in a private folder and requires a join token; both stay the same over restarts,
so clients reconnect without being told.
"""

import asyncio
import json
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import msgspec

from emberline.balancer.endpoint import Endpoint
from emberline.config import EngineConfig
from emberline.engine import composition
from emberline.engine.memory import default_kv_bytes
from emberline.engine.worker import cpu_share
from emberline.protocol.credential import VARIABLE as CREDENTIAL_VARIABLE
from emberline.protocol.errors import BadInput
from emberline.protocol.frames import WorkerRole
from emberline.protocol.kv_store import StoreSettings
from emberline.protocol.parallel_layout import Layout
from emberline.supervisor import machine
from emberline.supervisor.machine import Hardware
from emberline.supervisor.process import ProcessGroup, ProcessSpec, SupervisedProcess

PREFILL_NICE = 5  # on cores shared with HTTP: sending a computed token takes precedence over prefill
RETIRE_GRACE_S = 10.0
CPU_SHARE = "cpu-share"  # the file by which workers share threads, beside their sockets
PREDICTOR_MANIFEST = "manifest.json"
PREDICTOR_SECRETS = "EMBERLINE_PREDICTOR_SECRETS"  # a JSON object, for a predictor's worker
GRANT_PREFIX = "EMBERLINE_GRANT_"  # EMBERLINE_GRANT_NAME is the variable NAME of predictors that were pushed with it
_MAX_SOCKET_PATH = 90  # bytes; the system's limit is 104 or 108

_log = logging.getLogger(__name__)

MakeSpec = Callable[["WorkerPlan", EngineConfig, Path, str], ProcessSpec]


class WorkerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One worker to run."""

    name: str  # unique, stable over restarts
    number: int = 0  # unique on this machine
    model: str  # the id it serves
    path: Path  # of the weights
    device: str
    gpu: str | None  # what is visible to it: one, or one for each rank, separated by commas
    kv_bytes: int  # 0: the worker decides, from its GPU's free memory
    memory_share: float = 1.0  # of its GPU, for weights, KV cache and everything else
    threads: int  # 0: the worker decides
    shares_cpu: bool = False  # `threads` only while no other worker computes
    role: WorkerRole = "both"
    cores: tuple[int, ...] = ()  # CPU affinity; empty: any


class TierSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The KV cache tiers of every worker, below its device pool."""

    host_bytes: int | None  # None: the worker decides
    disk_bytes: int
    disk_path: Path
    encrypt: bool = False  # the blocks on disk
    store: StoreSettings | None = None  # of the cluster's pool
    key: bytes  # of the tags of stored blocks

    def __repr__(self) -> str:
        return f"TierSettings(host_bytes={self.host_bytes}, disk_bytes={self.disk_bytes}, key=…)"


class JoinSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings with which a worker joins a cluster; see emberline/engine/worker/announcer.py."""

    cores: tuple[str, ...]  # URLs
    credential: str  # as text
    address: str = "tcp:127.0.0.1:0"  # to listen at; cores must reach it
    advertise: str = ""  # where cores reach it, if not there
    region: str = ""
    account: str = ""

    def __repr__(self) -> str:
        return f"JoinSettings(cores={self.cores}, address={self.address!r}, credential=…)"


def plan_workers(
    config: EngineConfig,
    models: Mapping[str, Path],
    first: int = 0,
    kv_bytes: int = 0,
    hardware: Hardware | None = None,
    taken: Collection[str] = (),
    is_scaled: bool = False,
) -> list[WorkerPlan]:
    """Plan workers for each model's weights: one per GPU (or per as many as it has ranks), or one on a CPU; these
    divide the memory, and share the cores by need. More workers than GPUs share them.

    first: the number of the first worker.
    kv_bytes: of each worker, where the configuration leaves it open.
    hardware: of the machine; None: of this one, as it is now.
    taken: names of other workers.
    is_scaled: the planner says how many workers run. Else predictors have one each, whatever engines have.
    """
    hardware = hardware or machine.hardware()
    layout = layout_of(config)
    gpus = _gpu_sets(config, layout, hardware.gpus)
    if config.device == "cuda" and not gpus:
        raise BadInput(
            "no CUDA device to run on: `emberline doctor` tells what is missing; use --device cpu", param="device"
        )
    composition.check(composition.asked(config, "cuda" if gpus else "cpu"))
    if not is_scaled and models and all(map(is_predictor, models.values())):
        config = msgspec.structs.replace(config, replicas=1, prefill_workers=0, decode_workers=0)
    roles = _roles(config, len(gpus))
    if config.prefill_workers and gpus:
        _warn_of_placement(len(roles), len(gpus), layout)
    n_workers = len(roles) * len(models)
    kv_bytes = kv_bytes or (default_kv_bytes("cpu", n_workers, hardware.free_bytes) if n_workers else 0)
    pins = n_workers and config.prefill_workers and not gpus and not first
    core_sets = _core_sets(n_workers) if pins else []
    threads = max(1, hardware.cores // n_workers) if core_sets else hardware.cores
    plans: list[WorkerPlan] = []
    names = set(taken)
    for (model, path), share in zip(models.items(), _memory_shares(config, len(models))):
        for index, role in enumerate(roles):
            number = first + len(plans)
            label = f"{number}" if role == "both" else f"{role}{index - roles.index(role)}"
            name = _free_name(model, label, number, names)
            names.add(name)
            plans.append(
                WorkerPlan(
                    name=name,
                    number=number,
                    model=model,
                    path=path,
                    device="cuda" if gpus else "cpu",
                    gpu=gpus[index % len(gpus)] if gpus else None,
                    kv_bytes=config.kv_bytes or (0 if gpus else kv_bytes),
                    memory_share=share / (len(roles[index % len(gpus) :: len(gpus)]) if gpus else len(roles)),
                    threads=config.threads or (0 if gpus else threads),
                    shares_cpu=not (config.threads or gpus or core_sets or layout.n_ranks > 1)
                    and number < cpu_share.MAX_WORKERS,
                    role=role,
                    cores=core_sets[len(plans)] if core_sets else (),
                )
            )
    return plans


def _memory_shares(config: EngineConfig, n_models: int) -> list[float]:
    """Each model's share of a GPU."""
    shares = list(config.gpu_memory_share)
    if not shares:
        return [1 / max(1, n_models)] * n_models
    if len(shares) == 1:
        shares *= n_models
    if len(shares) != n_models:
        raise BadInput(
            f"{len(shares)} shares of the GPU's memory for {n_models} models: give one for each, or one for all",
            param="gpu_memory_share",
        )
    if sum(shares) > 1 + 1e-9:
        raise BadInput(
            f"the shares of the GPU's memory add up to {sum(shares):g}, more than 1", param="gpu_memory_share"
        )
    return shares


def workers_per_model(config: EngineConfig) -> int:
    """Number of workers of each model on this machine."""
    return len(_roles(config, len(_gpu_sets(config, layout_of(config), machine.gpus()))))


def layout_of(config: EngineConfig) -> Layout:
    """Return the division of each worker among ranks. Raises BadInput if the numbers do not fit each other."""
    layout = Layout(tp=config.tp, pp=config.pp, ep=config.ep, dcp=config.dcp)
    layout.check()
    return layout


def _gpu_sets(config: EngineConfig, layout: Layout, found: Sequence[str]) -> list[str]:
    """The GPUs of each worker that fits on the machine, which has those `found`: one for each of its ranks."""
    gpus = found if config.device != "cpu" else ()
    n = layout.n_ranks
    if gpus and len(gpus) < n:
        there = f"this machine has {len(gpus)}" if len(gpus) > 1 else "this machine has one"
        raise BadInput(f"{layout.name} needs {n} GPUs, one for each rank, and {there}", param="tp")
    return [",".join(gpus[at : at + n]) for at in range(0, len(gpus) - n + 1, n)]


def _roles(config: EngineConfig, n_gpus: int) -> list[WorkerRole]:
    if bool(config.prefill_workers) != bool(config.decode_workers):
        raise BadInput("prefill/decode disaggregation needs both: give --prefill-workers N and --decode-workers M")
    if not config.prefill_workers:
        return ["both"] * (config.replicas or max(1, n_gpus))
    if config.replicas:
        raise BadInput("--replicas cannot be combined with --prefill-workers and --decode-workers")
    prefill: WorkerRole = "prefill"
    decode: WorkerRole = "decode"
    return [prefill] * config.prefill_workers + [decode] * config.decode_workers


def _warn_of_placement(n_workers: int, n_sets: int, layout: Layout) -> None:
    """Warn where prefill and decode workers share GPUs, or leave some unused. `n_sets` counts sets of GPUs, one GPU for
    each rank."""
    where = "GPUs" if layout.n_ranks == 1 else f"sets of {layout.n_ranks} GPUs"
    if n_workers > n_sets:
        _log.warning("%d prefill and decode workers of a model share %d %s, and their memory", n_workers, n_sets, where)
    elif n_workers < n_sets:
        unused = n_sets - n_workers
        _log.warning("%d prefill and decode workers of a model leave %d %s unused", n_workers, unused, where)


def _core_sets(n_workers: int) -> list[tuple[int, ...]]:
    """Disjoint CPU cores for each worker, so that prefill cannot slow down decode; none where there are too few."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    each = len(cores) // n_workers
    return [tuple(cores[at * each : (at + 1) * each]) for at in range(n_workers)] if each else []


class EngineWorkers(ProcessGroup):
    """The planned workers, and the endpoints at which the balancer reaches them."""

    def __init__(
        self,
        plans: Sequence[WorkerPlan],
        config: EngineConfig,
        make_spec: MakeSpec | None = None,
        tiers: TierSettings | None = None,
        hardware: Hardware | None = None,
    ) -> None:
        """`hardware` for workers that are planned later; None: of this machine, as it is then."""
        self._hardware = hardware
        self.folder = runtime_folder()
        self.endpoints: dict[str, list[Endpoint]] = {}  # by model, of all workers of its current weights
        self._config = config
        self._make_spec = make_spec or worker_spec
        self._tiers = tiers
        self._specs: dict[str, ProcessSpec] = {}  # by name, of the same workers
        self._n_planned = 0  # workers that were ever planned: no two have one number
        self._paths: dict[str, Path] = {}  # of the planned models' weights
        cpu_share.create(self.folder / CPU_SHARE)
        for plan in plans:
            self._add(plan)
        super().__init__(map(SupervisedProcess, self._specs.values()))

    @property
    def hardware(self) -> Hardware:
        """The hardware that workers are planned for."""
        return self._hardware or machine.hardware()

    def _add(self, plan: WorkerPlan) -> None:
        self._n_planned = max(self._n_planned, plan.number + 1)
        socket = self.folder / f"w{plan.number}.sock"
        token = secrets.token_hex(32)
        endpoint = Endpoint(name=plan.name, address=f"unix:{socket}", token=token, role=plan.role, models=(plan.model,))
        self.endpoints.setdefault(plan.model, []).append(endpoint)
        spec = self._make_spec(plan, self._config, socket, token)
        has_kv = self._tiers is not None and not is_predictor(plan.path)
        self._specs[plan.name] = with_tiers(spec, self._tiers) if has_kv and self._tiers is not None else spec
        self._paths[plan.model] = plan.path

    def join(self, plan: WorkerPlan, config: EngineConfig, settings: JoinSettings) -> SupervisedProcess:
        """One more worker, not started yet, which joins the cluster instead of being dialed at an endpoint."""
        spec = self._make_spec(plan, config, self.folder / f"{plan.name}.sock", "")
        process = SupervisedProcess(joining(spec if self._tiers is None else with_tiers(spec, self._tiers), settings))
        self.processes.append(process)
        return process

    async def load(self, model: str, path: Path, kv_bytes: int) -> list[Endpoint]:
        """Start the workers of one more model; returns when all are ready. ProcessFailed: it cannot be loaded. A model
        that was loaded before gets the same endpoints."""
        if self._paths.get(model) != path:
            for endpoint in self.endpoints.pop(model, ()):
                del self._specs[endpoint.name]
            shares = (
                self._config.gpu_memory_share
            )  # several are of the models loaded at start: others take what is left
            config = self._config if len(shares) < 2 else msgspec.structs.replace(self._config, gpu_memory_share=())
            first, names = self._n_planned, self._specs.keys()
            for plan in plan_workers(config, {model: path}, first, kv_bytes, self._hardware, names):
                self._add(plan)
        started = [SupervisedProcess(self._specs[endpoint.name]) for endpoint in self.endpoints[model]]
        self.processes += started
        try:
            await asyncio.gather(*(worker.start() for worker in started))
            await asyncio.gather(*(worker.wait_ready() for worker in started))
        except BaseException:
            await self._end(started)
            raise
        return self.endpoints[model]

    async def unload(self, model: str) -> None:
        """End the workers of a model, which have no requests."""
        names = {endpoint.name for endpoint in self.endpoints.get(model, ())}
        await self._end([worker for worker in self.processes if worker.name in names])

    def problem(self, model: str) -> str:
        """Why a worker of the model ended the last time, although nobody had stopped it; empty if none did."""
        names = {endpoint.name for endpoint in self.endpoints.get(model, ())}
        return next((worker.problem for worker in self.processes if worker.problem and worker.name in names), "")

    async def _end(self, workers: Sequence[SupervisedProcess]) -> None:
        await asyncio.gather(*(worker.stop(RETIRE_GRACE_S) for worker in workers))
        self.processes = [worker for worker in self.processes if worker not in workers]

    def kill(self, name: str) -> None:
        """Kill a worker that hangs, so that it is started anew. One on another machine is not ours to kill."""
        for worker in self.processes:
            if worker.name == name:
                worker.kill("it hangs")

    async def retire(self, name: str) -> None:
        """End a worker that has left the server. One on another machine is not ours to end."""
        await self._end([worker for worker in self.processes if worker.name == name])

    async def stop(self, grace_s: float) -> None:
        await super().stop(grace_s)
        shutil.rmtree(self.folder, ignore_errors=True)


def runtime_folder() -> Path:
    """A new folder for sockets that only this user may enter, with a path short enough for a Unix socket."""
    folder = tempfile.mkdtemp(prefix="emberline-")
    if len(folder) > _MAX_SOCKET_PATH - len("/core.sock"):
        shutil.rmtree(folder)
        folder = tempfile.mkdtemp(prefix="emberline-", dir="/tmp")
    return Path(folder)


def worker_spec(plan: WorkerPlan, config: EngineConfig, socket: Path, token: str) -> ProcessSpec:
    """The command line of a worker; see emberline/engine/worker/main.py, and emberline/predictor/worker.py."""
    if is_predictor(plan.path):
        return predictor_spec(plan, socket, token)
    arguments = ["--model", str(plan.path), "--name", plan.model, "--socket", str(socket), "--device", plan.device]
    for flag, value in (
        ("--memory-share", plan.memory_share if plan.gpu is not None and plan.memory_share < 1 else 0),
        ("--threads", plan.threads),
    ):
        if value:
            arguments += [flag, str(value)]
    arguments += engine_arguments(config, plan.kv_bytes)
    if plan.shares_cpu:
        arguments += ["--cpu-share", f"{socket.with_name(CPU_SHARE)}:{plan.number}"]
    for key in ("tp", "pp", "dcp"):
        if getattr(config, key) > 1:
            arguments += [f"--{key}", str(getattr(config, key))]
    if config.ep:
        arguments.append("--ep")
    if config.tp * config.pp > 1:
        arguments += ["--step-timeout", f"{config.step_timeout_s:g}"]
    arguments += ["--role", plan.role, "--id", plan.name]
    if plan.cores:
        arguments += ["--cores", ",".join(map(str, plan.cores))]
        arguments += ["--prefill-nice", str(PREFILL_NICE)]
    env = {"EMBERLINE_WORKER_TOKEN": token}
    if plan.gpu is not None:
        env["CUDA_VISIBLE_DEVICES"] = plan.gpu
    return ProcessSpec(name=plan.name, module="emberline.engine.worker", arguments=tuple(arguments), env=env)


def is_predictor(path: Path) -> bool:
    """True if the path is of a predictor that a user pushed, not of weights."""
    return path.name == PREDICTOR_MANIFEST


def granted_secrets() -> dict[str, str]:
    """The variables that the operator grants to predictors, in this process's environment, by name."""
    return {
        name.removeprefix(GRANT_PREFIX): value for name, value in os.environ.items() if name.startswith(GRANT_PREFIX)
    }


def predictor_spec(plan: WorkerPlan, socket: Path, token: str) -> ProcessSpec:
    """The command line of a predictor's worker. It gets the variables that the operator grants to predictors."""
    env = {"EMBERLINE_WORKER_TOKEN": token, PREDICTOR_SECRETS: json.dumps(granted_secrets())}
    if plan.gpu is not None:
        env["CUDA_VISIBLE_DEVICES"] = plan.gpu
    arguments = ("--manifest", str(plan.path), "--name", plan.model, "--socket", str(socket), "--id", plan.name)
    return ProcessSpec(name=plan.name, module="emberline.predictor.worker", arguments=arguments, env=env)


def engine_arguments(config: EngineConfig, kv_bytes: int) -> list[str]:
    """Flags of any worker, wherever it runs. `kv_bytes` 0: it decides itself."""
    arguments = []
    for flag, value in (
        ("--kv-bytes", kv_bytes),
        ("--context-len", config.context_len),
        ("--max-running", config.max_running),
        ("--token-budget", config.token_budget),
    ):
        if value:
            arguments += [flag, str(value)]
    if config.deterministic:
        arguments.append("--deterministic")
    if config.weights != "plain":
        arguments += ["--weights", config.weights]
    if config.verify_weights:
        arguments.append("--verify-weights")
    if config.speculation != "auto":
        arguments += ["--speculation", config.speculation]
    if config.draft_head:
        arguments += ["--draft-head", str(Path(config.draft_head).expanduser().absolute())]
    if config.draft_model:
        arguments += ["--draft-model", str(Path(config.draft_model).expanduser().absolute())]
    return arguments


def with_tiers(spec: ProcessSpec, tiers: TierSettings) -> ProcessSpec:
    """The same worker with KV cache tiers; see emberline/engine/tiers/opening.py."""
    arguments = list(spec.arguments)
    if tiers.host_bytes is not None:
        arguments += ["--kv-host-bytes", str(tiers.host_bytes)]
    if tiers.disk_bytes:
        arguments += ["--kv-disk-bytes", str(tiers.disk_bytes), "--kv-disk-path", str(tiers.disk_path)]
        arguments += ["--kv-disk-encrypt"] * tiers.encrypt
    if tiers.store is not None:
        arguments += ["--kv-store", tiers.store.url]
    env = {**spec.env, "EMBERLINE_KV_KEY": tiers.key.hex()}
    return msgspec.structs.replace(spec, arguments=tuple(arguments), env=env)


def joining(spec: ProcessSpec, settings: JoinSettings) -> ProcessSpec:
    """The same worker as a member of a cluster. One that has left it, and so ends, is not restarted."""
    arguments = list(spec.arguments)
    arguments[arguments.index("--socket") + 1] = settings.address
    for url in settings.cores:
        arguments += ["--join", url]
    for flag in ("advertise", "region", "account"):
        if value := getattr(settings, flag):
            arguments += [f"--{flag}", value]
    env = {name: value for name, value in spec.env.items() if name != "EMBERLINE_WORKER_TOKEN"}
    env[CREDENTIAL_VARIABLE] = settings.credential
    return msgspec.structs.replace(spec, arguments=tuple(arguments), env=env, may_end=True)


def _free_name(model: str, label: str, number: int, taken: Collection[str]) -> str:
    """The name of a worker: by the last part of its model's id, or by all of it if another organization's model of that
    name has workers."""
    short, whole = _short_name(model), model.strip("/").replace("/", "-").lower()
    names = (f"{short}-{label}", f"{whole}-{label}", f"{short}-{label}-{number}")
    return next(name for name in names if name not in taken)


def _short_name(model: str) -> str:
    """The last part of a model's id."""
    return model.rstrip("/").rpartition("/")[2].lower() or "model"
