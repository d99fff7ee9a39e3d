"""The core process of a server: it assembles the other processes and parts, so it is also where to begin reading.

Engine workers (processes of their own) compute tokens; the service turns requests into token ids and back and keeps the
ledgers; the app serves HTTP, here or in HTTP workers.
"""

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from emberline.balancer.endpoint import Endpoint, engine_endpoint
from emberline.catalog.model_card import ModelCard
from emberline.catalog.model_store import ModelEntry, ModelStore
from emberline.config import Config, needs_keys
from emberline.protocol.errors import Unavailable
from emberline.server.address import ServerAddress
from emberline.server.gpu_layout import with_recommended_layout
from emberline.server.listener import listen
from emberline.server.on_demand_models import OnDemandModels, loaded_at_start, memory_limit
from emberline.server.signals import cancel_on_second_signal, on_signals
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
log = logging.getLogger("emberline.serve")

# Called once requests are served: the address, the models, the workers' ready lines.
OnReady = Callable[[ServerAddress, Sequence[ModelEntry], Sequence[dict[str, Any]]], None]


def remote_workers(config: Config) -> list[Endpoint]:
    """The configured Emberline workers on other machines."""
    return [engine_endpoint(endpoint) for endpoint in config.endpoints if endpoint.kind == "emberline"]


def _endpoints_by_model(config: Config) -> dict[str, list[Endpoint]]:
    """The configured workers on other machines, by model id. Their models have been fetched."""
    store = ModelStore(config.home)
    found: dict[str, list[Endpoint]] = {}
    for worker in remote_workers(config):
        model = store.resolve(worker.models[0]).card.id
        found.setdefault(model, []).append(msgspec.structs.replace(worker, models=(model,)))
    return found


def local_models(config: Config, entries: Sequence[ModelEntry], remote: Mapping[str, object]) -> dict[str, Path]:
    """Paths of the weights, by model id, of the models for which workers are started here: those requested, and those
    without a remote worker. All have been fetched."""
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
        cancelling = cancel_on_second_signal(asyncio.current_task(), stop, config.server.drain_timeout_s)
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
        from emberline.accounts.stored_provider import EVERY_ACCOUNT
        from emberline.cluster.timings import Timings
        from emberline.gateway.gateways import GatewayService
        from emberline.jobs.webhooks.deliverer import DeliveryMetrics
        from emberline.server.autoscaler import Planning, core_name, open_launcher
        from emberline.server.http_worker import (
            HttpWorkerPlan,
            confined_templates,
            core_tls,
            load_models,
            open_images,
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
        templates = confined_templates()
        served = load_models(at_start, endpoints, templates)
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
            templates=templates,
            images=open_images(config),
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
            return card.id in remote or any(service.upstream.find(name, EVERY_ACCOUNT) is not None for name in names)

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
            _warn_of_missing_prices(service.core.prices, [card.id for card in service.models.cards()])
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
        on_signals(stop.set)
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
    service.use_files(queue.files)
    batches = BatchService(queue, service)
    stack.push_async_callback(batches.close)
    batches.start_loading()
    auth = Authenticator(
        Secret.open(config.home), directory=accounts.directory, shares_kv=config.kv.share_between_accounts
    )

    def models() -> list[str]:
        """A provider's need not be listed to be asked for."""
        listed = [card.id for card in service.models.cards()]
        queued = (model for model in puller.metrics.models if service.upstream.providers.find(model, None) is not None)
        return list(dict.fromkeys((*listed, *queued)))

    owner = LeaseOwner(config.home)
    puller = Puller(queue, service, core.grants, models, auth.principal, owner, settle=core.settle_job)
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
