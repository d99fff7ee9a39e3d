"""`emberline serve`: start the server.

This module assembles the processes, so it is also where to begin reading. Engine workers (processes of their own)
compute tokens; the service turns requests into token ids and back and keeps the ledgers; the app serves HTTP.
"""

import argparse
import asyncio
import contextlib
import errno
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from emberline import log as logs
from emberline.balancer.endpoint import Endpoint, engine_endpoint
from emberline.catalog.model_card import DEFAULT_MODEL, ModelCard
from emberline.catalog.model_store import ModelEntry, ModelStore
from emberline.cli import common, startup_panel
from emberline.cli.http_client import ServerAddress
from emberline.cli.log_file import LogFile, log_path
from emberline.cli.models import fetch
from emberline.cli.terminal import transient_line
from emberline.config import Config, ConfigError, ServerConfig, check_exposure, needs_keys
from emberline.protocol.errors import Unavailable
from emberline.server.gpu_layout import with_recommended_layout
from emberline.server.on_demand_models import OnDemandModels, loaded_at_start, memory_limit
from emberline.supervisor import machine
from emberline.supervisor.engine_workers import EngineWorkers, MakeSpec, TierSettings, plan_workers
from emberline.supervisor.http_workers import HttpWorkers, LargeRequestWorker
from emberline.supervisor.kv_pool import PoolPlan, PoolProcesses, plan_pool
from emberline.supervisor.process import wait_or_stop

if TYPE_CHECKING:
    from emberline.accounts.account_service import AccountService
    from emberline.accounts.prices import PriceTable
    from emberline.api.batch_loader import BatchService
    from emberline.cluster.timings import Timings
    from emberline.server.http_worker import HttpWorkerPlan
    from emberline.service import Service
    from emberline.store import Database

CONNECT_TIMEOUT_S = 10.0  # to workers that reported ready
WORKER_GRACE_S = 5.0  # for workers to exit once no request is left
LISTEN_BACKLOG = 2048
DRAIN_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
log = logging.getLogger("emberline.serve")

# Called once requests are served: the address, the models, the workers' ready lines.
OnReady = Callable[[ServerAddress, Sequence[ModelEntry], Sequence[dict[str, Any]]], None]


_OPTIONS = (  # flag, configuration key, placeholder, help
    ("--http-workers", "server.http_workers", "N", "HTTP processes (default 1: the core itself)"),
    ("--auth", "server.auth", "MODE", "keys: every request needs an API key; none; auto (default): none on loopback"),
    ("--device", "engine.device", "DEVICE", "auto, cpu or cuda (default auto)"),
    ("--replicas", "engine.replicas", "N", "workers per model (default one per GPU, else 1)"),
    ("--prefill-workers", "engine.prefill_workers", "N", "per model; prefill/decode disaggregation"),
    ("--decode-workers", "engine.decode_workers", "N", "per model, with --prefill-workers"),
    ("--gpus", "engine.gpus", "N", "GPUs for the model, or auto for all: divided as `emberline plan` recommends"),
    ("--tp", "engine.tp", "N", "tensor parallelism: ranks of a worker, each on a GPU of its own (default 1)"),
    ("--pp", "engine.pp", "N", "pipeline parallelism: stages of a worker (default 1)"),
    ("--dcp", "engine.dcp", "N", "decode context parallelism: KV spread over N ranks of --tp; models with MLA"),
    (
        "--step-timeout",
        "engine.step_timeout_s",
        "SECONDS",
        "that a step of several ranks may take (default 60)",
    ),
    ("--threads", "engine.threads", "N", "CPU threads per worker (default: cores)"),
    ("--kv-bytes", "engine.kv_bytes", "SIZE", "KV cache per worker, e.g. 4G (default: a quarter of the memory, ≤ 2G)"),
    (
        "--kv-host-bytes",
        "kv.host_bytes",
        "SIZE",
        "of host memory per worker, to keep more KV (default: for GPUs)",
    ),
    ("--kv-disk-bytes", "kv.disk_bytes", "SIZE", "on disk per worker, to keep more KV, also over restarts"),
    (
        "--gpu-memory-share",
        "engine.gpu_memory_share",
        "F,F",
        "of a GPU's memory, for each MODEL (default: even shares)",
    ),
    ("--kv-store", "kv.store", "KIND", "mooncake: one KV pool that all workers of the cluster share"),
    ("--max-running", "engine.max_running", "N", "sequences in a batch"),
    ("--token-budget", "engine.token_budget", "N", "tokens computed per step"),
    (
        "--speculation",
        "engine.speculation",
        "NAME",
        "speculative decoding: auto (default), off, or one drafter",
    ),
    ("--draft-head", "engine.draft_head", "FOLDER", "an EAGLE-3 head of a MODEL, which drafts for it"),
    ("--draft-model", "engine.draft_model", "MODEL", "a smaller model with the same tokenizer, which drafts"),
    ("--region", "cluster.region", "NAME", "of this core: it prefers the workers of its region"),
    ("--log-level", "log.level", "LEVEL", "debug, info, warning or error"),
)
_REPEATABLE = (
    ("--allowed-host", "server.allowed_hosts", "NAME", "a Host header to accept; repeatable"),
    ("--cors-origin", "server.cors_origins", "URL", "a web origin that may call; repeatable"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("engine.models", nargs="*", metavar="MODEL", help=f"name, path or hf:org/repo (default {DEFAULT_MODEL})")
    common.add_address(parser)
    for flag, key, metavar, text in _OPTIONS:
        add(flag, dest=key, metavar=metavar, help=text)
    for flag, key, metavar, text in _REPEATABLE:
        add(flag, dest=key, metavar=metavar, help=text, action="append")
    same = "same seed, same tokens in any batch (always so on a CPU; slower on a GPU)"
    add("--deterministic", dest="engine.deterministic", action="store_const", const=True, help=same)
    core_only = "start no engine workers here: they join"
    add("--core-only", dest="cluster.core_only", action="store_const", const=True, help=core_only)
    spread = "expert parallelism: the ranks of --tp hold whole experts"
    add("--ep", dest="engine.ep", action="store_const", const=True, help=spread)
    common.add_data_dir(parser)
    add("--json", action="store_true", help="print one line of JSON when ready")


def run(args: argparse.Namespace) -> int:
    started_s = time.monotonic()
    config = common.config_of(args)
    check_exposure(config)
    plan_pool(config.kv)  # what is missing for it is said before anything is downloaded or loaded
    log_files = [LogFile(log_path(config.home), config.log.max_bytes)] if config.log.max_bytes else []
    logs.setup("core", config.log.level, config.log.format, more=log_files)
    os.environ["EMBERLINE_LOG_LEVEL"] = config.log.level  # child processes inherit it
    machine.raise_file_limit()
    shows_panel = sys.stdout.isatty() and not args.json

    waiting = contextlib.ExitStack()

    def on_ready(address: ServerAddress, entries: Sequence[ModelEntry], workers: Sequence[dict[str, Any]]) -> None:
        waiting.close()
        start_s = time.monotonic() - started_s
        if args.json:
            print(json.dumps(startup_panel.as_dict(address, entries, workers, start_s)), flush=True)
        if shows_panel:
            logging.getLogger().setLevel(config.log.level.upper())
            startup_panel.show(config, address, entries, workers, start_s)
        else:
            log.info("ready", extra={"url": address.url, "seconds": round(start_s, 2)})

    with waiting, bind(config.server) as listener:  # before any download: a port in use is reported at once
        entries = fetch_models(config)
        if shows_panel:  # the panel repeats what the startup log lines say
            names = ", ".join(entry.card.id for entry in entries)
            waiting.enter_context(transient_line(f"starting {names or 'without models'} …"))
            logging.getLogger().setLevel(logging.WARNING)
        return run_until_terminated(serve(config, entries, listener, on_ready))


def fetch_models(config: Config) -> list[ModelEntry]:
    """The configured models, downloaded if needed, without duplicates."""
    config.home.mkdir(mode=0o700, parents=True, exist_ok=True)
    store = ModelStore(config.home)
    elsewhere = config.endpoints or config.providers or config.cluster.scaled
    local = config.engine.models or (() if elsewhere else (DEFAULT_MODEL,))
    remote = [name for worker in _remote_workers(config) for name in worker.models]
    entries = [fetch(name, store) for name in (*local, *remote, *config.cluster.scaled)]
    if config.engine.draft_model:
        fetch(config.engine.draft_model, store)
    return list({entry.card.id: entry for entry in entries}.values())


def _remote_workers(config: Config) -> list[Endpoint]:
    """The configured Emberline workers on other machines."""
    return [engine_endpoint(endpoint) for endpoint in config.endpoints if endpoint.kind == "emberline"]


def _endpoints_by_model(config: Config) -> dict[str, list[Endpoint]]:
    """The configured workers on other machines, by model id. Their models have been fetched."""
    store = ModelStore(config.home)
    found: dict[str, list[Endpoint]] = {}
    for worker in _remote_workers(config):
        model = store.resolve(worker.models[0]).card.id
        found.setdefault(model, []).append(msgspec.structs.replace(worker, models=(model,)))
    return found


def local_models(config: Config, entries: Sequence[ModelEntry], remote: Mapping[str, object]) -> dict[str, Path]:
    """Id → weights of the models for which workers are started here: those requested, and those without a remote.
    All have been fetched."""
    store = ModelStore(config.home)
    core_only = config.cluster.core_only
    requested = set() if core_only else {store.resolve(name).card.id for name in config.engine.models}
    return {entry.card.id: entry.path for entry in entries if entry.card.id in requested or entry.card.id not in remote}


def _tier_settings(config: Config, pool: PoolPlan | None) -> TierSettings | None:
    """The KV cache tiers of each worker. Their key is derived: workers do not get the root secret."""
    kv = config.kv
    if kv.host_bytes is None and not (kv.disk_bytes or pool):
        return None
    from emberline.accounts.secret import Secret

    key = bytes.fromhex(kv.key) if kv.key else Secret.open(config.home).derive("kv-tag", size=32)
    return TierSettings(
        host_bytes=kv.host_bytes,
        disk_bytes=kv.disk_bytes,
        disk_path=kv.disk_folder(config.home),
        encrypt=kv.disk_encryption,
        store=None if pool is None else pool.store,
        key=key,
    )


async def serve(
    config: Config,
    entries: Sequence[ModelEntry],
    listener: socket.socket,
    on_ready: OnReady,
    stop: asyncio.Event | None = None,
    timings: "Timings | None" = None,
    make_spec: MakeSpec | None = None,
) -> None:
    """Serve the models until SIGTERM, SIGINT, SIGHUP or `stop`; then drain running requests.

    `make_spec` says how an engine worker's process is started; by default it is Emberline's own engine."""
    stop = stop or asyncio.Event()
    async with contextlib.AsyncExitStack() as stack:
        cancelling = _cancel_on_second_signal(asyncio.current_task(), stop, config.server.drain_timeout_s)
        stack.callback(cancelling.cancel)
        remote = _endpoints_by_model(config)
        if config.cluster.core_only:
            remote = {**{entry.card.id: [] for entry in entries}, **remote}
        scaled = {ModelStore(config.home).resolve(name).card.id for name in config.cluster.scaled}
        remote = {**{model: [] for model in scaled}, **remote}  # the planner starts their workers
        local = {model: path for model, path in local_models(config, entries, remote).items() if model not in scaled}
        pinned, memory_bytes = loaded_at_start(config, local), memory_limit(config)
        engine = await asyncio.to_thread(with_recommended_layout, config.engine, list(pinned.values()))
        if engine.draft_model:
            drafting = ModelStore(config.home).resolve(engine.draft_model)  # which has been fetched
            engine = msgspec.structs.replace(engine, draft_model=str(drafting.path))
        config = msgspec.structs.replace(config, engine=engine)
        pool = plan_pool(config.kv)
        if pool is not None:
            pool_processes = PoolProcesses(pool)
            stack.push_async_callback(pool_processes.stop, WORKER_GRACE_S)
            await pool_processes.start()
        tiers = _tier_settings(config, pool)
        workers = EngineWorkers(plan_workers(config.engine, pinned), config.engine, make_spec, tiers)
        stack.push_async_callback(workers.stop, WORKER_GRACE_S)
        await workers.start()

        # The workers load weights in their processes while this one imports and reads tokenizers.
        from emberline.accounts.account_service import AccountService
        from emberline.accounts.secret import Secret
        from emberline.cluster.timings import Timings
        from emberline.gateway.service import GatewayService
        from emberline.jobs.webhooks.deliverer import DeliveryMetrics
        from emberline.server.autoscaler import Planning, core_name, open_launcher
        from emberline.server.http_worker import (
            HttpWorkerPlan,
            core_tls,
            load_models,
            open_providers,
            open_webhooks,
            serve_http,
        )
        from emberline.service import open_service
        from emberline.service.core import LocalCore
        from emberline.service.service_factory import DATABASE, ClusterSettings
        from emberline.store import open_store
        from emberline.telemetry import tracing
        from emberline.upstream.models import discover
        from emberline.upstream.servers.client import upstream_configs

        timings = timings or Timings()
        traces = tracing.settings(config.tracing, os.environ)
        tracer = tracing.start(traces, "core")
        stack.push_async_callback(asyncio.to_thread, tracing.stop)
        at_start = [entry for entry in entries if entry.card.id in pinned or entry.card.id in remote]
        ids = [entry.card.id for entry in at_start]
        endpoints = {model: workers.endpoints.get(model, []) + remote.get(model, []) for model in ids}
        served = load_models(at_start, endpoints)
        await workers.wait_ready()
        store = await open_store(config.store.url or config.home / DATABASE)
        stack.push_async_callback(store.close)
        accounts = AccountService(store, Secret.open(config.home))
        stack.push_async_callback(accounts.close)
        await accounts.open()
        service = await open_service(
            served,
            data_dir=config.home,
            retention_days=config.responses.retention_days,
            queue_share=config.queue.capacity_share,
            budget_lease_s=config.accounts.budget_lease_s,
            store=store,
            upstreams=await discover(upstream_configs(config.endpoints)),
            providers=open_providers(config, accounts),
            on_stall=workers.kill,
            on_leave=workers.retire,
            directory=accounts.directory,
            aliases=config.aliases,
            prices=config.prices,
            cluster=ClusterSettings(
                Secret.open(config.home),
                config.cluster.region,
                core_tls(config.home),
                core_name(config.home),
                config.cluster.scaled,
            ),
            timings=timings,
        )
        stack.push_async_callback(service.close)
        if not await service.ready(CONNECT_TIMEOUT_S):
            if not config.endpoints:
                raise Unavailable("the engine workers are ready but refuse the connection; their log lines say why")
            log.warning("some workers cannot be reached; `emberline ps` shows which")
        assert isinstance(service.core, LocalCore), "this process is the core"
        named = [entry for entry in entries if entry.card.id in local]

        def elsewhere(card: ModelCard) -> bool:
            names = (card.id, *card.aliases)
            return card.id in remote or any(service.upstream.find(name) is not None for name in names)

        scan_s = timings.model_scan_s
        on_demand = OnDemandModels(config, memory_bytes, named, pinned, workers, service.core, elsewhere, scan_s)
        stack.push_async_callback(on_demand.close)
        await on_demand.open()
        gateways = GatewayService(store, config.gateways)
        stack.push_async_callback(gateways.close)
        await gateways.open()
        webhooks = open_webhooks(store, config)
        stack.push_async_callback(webhooks.close)
        webhooks.deliver()
        service.core.register(DeliveryMetrics(webhooks.deliverer))
        if needs_keys(config):
            _warn_of_missing_prices(service.core.prices, [card.id for card in service.models()])
        if tracer is not None:
            service.core.register(tracer.exporter)
        batches = await _open_queue(stack, config, store, service, stop, accounts)
        large_socket = workers.folder / "large.sock"
        plan = HttpWorkerPlan(
            config=config,
            core_socket=workers.folder / "core.sock",
            core_pid=os.getpid(),
            large_socket=large_socket,
            tracing=traces,
            models=[(entry.card, entry.path, endpoints[entry.card.id]) for entry in at_start],
        )
        # From the moment the first HTTP worker accepts connections, a signal drains instead of cancelling.
        _on_signals(stop.set)
        http_workers = await _open_http_workers(stack, plan, service, listener, stop)
        if stop.is_set():
            return
        listen(listener, config.server)
        address = msgspec.structs.replace(ServerAddress.of(config), port=listener.getsockname()[1])
        if config.cluster.planner != "off":
            paths = {entry.card.id: entry.path for entry in entries}
            launcher = open_launcher(config, workers, address.url)
            planning = Planning(config, service.core, store, paths, *launcher, timings.planner_round_s)
            stack.push_async_callback(planning.close)
            planning.start()
        on_ready(address, entries, [worker.ready_line for worker in workers.processes])
        if http_workers.processes:
            await stop.wait()
        else:
            await serve_http(service, config, listener, stop, webhooks, batches, large_socket, accounts, gateways)


def _warn_of_missing_prices(prices: "PriceTable", models: Sequence[str]) -> None:
    missing = [model for model in models if prices.find(model, time.time_ns() // 1000) is None]
    if missing:
        log.warning(
            "no price: requests of %s are recorded without a cost, and keys with a budget cannot use them; "
            "set one with `emberline price set MODEL --input … --output …`",
            ", ".join(missing),
        )


async def _open_queue(
    stack: contextlib.AsyncExitStack,
    config: Config,
    store: "Database",
    service: "Service",
    stop: asyncio.Event,
    accounts: "AccountService",
) -> "BatchService":
    """The durable queue, the service that submits to it, and the puller that runs its jobs when engines have room."""
    from emberline.accounts.auth import Authenticator
    from emberline.accounts.secret import Secret
    from emberline.api.batch_loader import BatchService
    from emberline.jobs.queue.puller import LeaseOwner, Puller
    from emberline.jobs.queue.queue import open_queue
    from emberline.service.core import LocalCore

    core = service.core
    assert isinstance(core, LocalCore), "this process is the core"
    queue = await open_queue(store, config.home)
    stack.push_async_callback(queue.close)
    batches = BatchService(queue, service)
    stack.push_async_callback(batches.close)
    batches.start_loading()
    auth = Authenticator(
        Secret.open(config.home), directory=accounts.directory, shares_kv=config.kv.share_between_accounts
    )

    def models() -> list[str]:
        """A provider's need not be listed to be asked for."""
        listed = [card.id for card in service.models()]
        queued = (model for model in puller.metrics.models if service.upstream.providers.find(model) is not None)
        return list(dict.fromkeys((*listed, *queued)))

    puller = Puller(queue, service, core.grants, models, auth.principal, LeaseOwner(config.home))
    stack.push_async_callback(puller.close)
    core.register(puller.metrics)
    core.history.n_queued = lambda: puller.metrics.n_queued
    puller.start(stop)
    return batches


async def _open_http_workers(
    stack: contextlib.AsyncExitStack,
    plan: "HttpWorkerPlan",
    service: "Service",
    listener: socket.socket,
    stop: asyncio.Event,
) -> HttpWorkers:
    """Start the HTTP workers and the socket on which they ask the core, and wait until all are ready, or for `stop`.

    There is always a worker for large requests, which starts when the first comes. There are others only if this
    process does not serve HTTP itself.
    """
    from emberline.service import open_core_server

    assert plan.large_socket is not None
    server, module = plan.config.server, "emberline.server.http_worker"
    grace_s = server.drain_timeout_s + WORKER_GRACE_S
    http_workers = HttpWorkers(server.http_workers if server.http_workers > 1 else 0, listener, module, plan.encode())
    large = LargeRequestWorker(plan.large_socket, module, msgspec.structs.replace(plan, large_socket=None).encode())
    core_server = await open_core_server(service, plan.core_socket)
    stack.push_async_callback(core_server.close)
    stack.push_async_callback(large.stop, grace_s)
    large.start()
    stack.push_async_callback(http_workers.stop, grace_s)
    await http_workers.start()
    # Closed before they stop: new connections would queue for HTTP workers that accept no more.
    stack.callback(listener.close)
    await wait_or_stop(http_workers.wait_ready(), stop)
    return http_workers


# --- signals ---------------------------------------------------------------------------------------------------------


def run_until_terminated(main: Coroutine[Any, Any, None]) -> int:
    """Run until done. SIGTERM and SIGHUP cancel the start until HTTP is served; from then on they drain the server."""
    import uvloop

    async def cancellable() -> None:
        task = asyncio.current_task()
        assert task is not None
        _on_signals(task.cancel, (signal.SIGTERM, signal.SIGHUP))
        await main

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            runner.run(cancellable())
        except asyncio.CancelledError:
            return 128 + signal.SIGTERM
    return 0


def _cancel_on_second_signal(
    serving: asyncio.Task[Any] | None, stop: asyncio.Event, drain_timeout_s: float
) -> asyncio.Task[None]:
    """Once the drain has begun, another signal ends it."""
    assert serving is not None

    async def watch() -> None:
        await stop.wait()
        log.info("stopping: running requests may finish within %g s; Ctrl-C again aborts them", drain_timeout_s)
        _on_signals(serving.cancel)

    return asyncio.create_task(watch())


def _on_signals(act: Callable[[], object], numbers: Sequence[signal.Signals] = DRAIN_SIGNALS) -> None:
    """SIGHUP, with which a closed terminal ends a process, stays ignored under `nohup`."""
    for number in numbers:
        if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
            continue
        with contextlib.suppress(ValueError, RuntimeError):  # not the main thread, where only `stop` ends the server
            asyncio.get_running_loop().add_signal_handler(number, act)


# --- the listening socket --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def bind(server: ServerConfig) -> Iterator[socket.socket]:
    """A socket bound to the address that does not listen yet: until `listen`, clients are refused at once."""
    host = server.host.strip("[]")
    try:
        found = socket.getaddrinfo(host, server.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(f"there is no address {server.host!r} to listen on: {error.strerror}") from error
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and host == "::":
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        with _socket_errors_explained(server):
            sock.bind(address)
        yield sock


def listen(sock: socket.socket, server: ServerConfig) -> None:
    with _socket_errors_explained(server):
        sock.listen(LISTEN_BACKLOG)


@contextlib.contextmanager
def _socket_errors_explained(server: ServerConfig) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = f"{server.host}:{server.port}"
        if error.errno == errno.EADDRINUSE:
            hint = "If it is Emberline, `emberline ps` shows what it serves; otherwise choose another port"
            raise ConfigError(f"{where} is in use. {hint}: emberline serve --port {server.port + 1}") from error
        if error.errno == errno.EACCES:
            raise ConfigError(f"this user may not listen on {where}; choose a port from 1024 up") from error
        raise ConfigError(f"cannot listen on {where}: {os.strerror(error.errno or 0)}") from error
