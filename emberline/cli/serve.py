"""Start the server.

This is where the parts are put together, so it is also where to begin reading: engine workers (processes of their own)
compute tokens; the service turns requests into token ids and back and keeps the books; the app speaks HTTP.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from emberline import log as logs
from emberline.balancer.endpoint import Endpoint
from emberline.catalog.model_card import DEFAULT_MODEL
from emberline.catalog.model_store import ModelEntry, ModelStore
from emberline.cli import common
from emberline.cli import startup_panel as panel
from emberline.cli.fetch import fetch
from emberline.cli.http_client import Address
from emberline.cli.listen import bound, listen
from emberline.config import Config, check_exposure
from emberline.protocol.errors import Unavailable
from emberline.supervisor.engine_workers import EngineWorkers, plan_workers, remote_workers
from emberline.supervisor.http_workers import HttpWorkers

if TYPE_CHECKING:
    from emberline.api.batch_loader import BatchService
    from emberline.service import Service
    from emberline.store import Database

CONNECT_S = 10.0  # to reach workers that say they are ready
WORKER_GRACE_S = 5.0  # for workers to end once no request is left
log = logging.getLogger("emberline.serve")

# Told once requests are answered: the address, the models, the workers' ready lines.
OnReady = Callable[[Address, Sequence[ModelEntry], Sequence[dict[str, Any]]], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-m", "--model", dest="engine.models", action="append", metavar="NAME", help="name, path or hf:org/repo"
    )
    common.add_address(parser)
    parser.add_argument("--doors", dest="server.doors", metavar="N", help="HTTP processes (default 1: the core itself)")
    parser.add_argument(
        "--allow-host",
        dest="server.allowed_hosts",
        action="append",
        metavar="NAME",
        help="a Host name to answer to",
    )
    parser.add_argument(
        "--allow-origin",
        dest="server.cors_origins",
        action="append",
        metavar="URL",
        help="a web page that may call",
    )
    common.add_engine(parser)
    parser.add_argument("--log-level", dest="log.level", metavar="LEVEL", help="debug, info, warning or error")
    common.add_data(parser)
    parser.add_argument("--json", action="store_true", help="print one line of JSON when ready")


def run(args: argparse.Namespace) -> int:
    started_s = time.monotonic()
    config = common.config_of(args)
    check_exposure(config)
    logs.setup("core", config.log.level, config.log.format)
    os.environ["EMBERLINE_LOG_LEVEL"] = config.log.level  # the workers' too, wherever it was set
    shows_panel = sys.stdout.isatty() and not args.json

    def announce(address: Address, entries: Sequence[ModelEntry], workers: Sequence[dict[str, Any]]) -> None:
        took_s = time.monotonic() - started_s
        if args.json:
            print(json.dumps(panel.facts(address, entries, workers, took_s)), flush=True)
        if shows_panel:
            logging.getLogger().setLevel(config.log.level.upper())
            panel.show(config, address, entries, workers, took_s)
        else:
            log.info("ready", extra={"url": address.url, "seconds": round(took_s, 2)})

    with bound(config.server) as listener:  # first: a port in use is told before anything is fetched
        entries = fetch_models(config)
        if shows_panel:  # it says all that the log lines of a start say
            print(f"starting {', '.join(entry.card.id for entry in entries)} …", flush=True)
            logging.getLogger().setLevel(logging.WARNING)
        return run_loop(serve(config, entries, listener, announce))


def fetch_models(config: Config) -> list[ModelEntry]:
    """The configured models, pulled if need be, each once however often it is named."""
    config.home.mkdir(mode=0o700, parents=True, exist_ok=True)
    shelf = ModelStore(config.home)
    remote = [name for worker in remote_workers(config.endpoints) for name in worker.models]
    entries = [fetch(name, shelf) for name in (*_local(config), *remote)]
    return list({entry.card.id: entry for entry in entries}.values())


def _local(config: Config) -> tuple[str, ...]:
    """The models that workers of ours compute: those that are named, or one, if nobody else has any."""
    return config.engine.models or (() if config.endpoints else (DEFAULT_MODEL,))


def _elsewhere(config: Config) -> dict[str, list[Endpoint]]:
    """Workers that others started, by the id of the model they serve. The models are here by now."""
    shelf = ModelStore(config.home)
    found: dict[str, list[Endpoint]] = {}
    for worker in remote_workers(config.endpoints):
        model = fetch(worker.models[0], shelf).card.id
        found.setdefault(model, []).append(msgspec.structs.replace(worker, models=(model,)))
    return found


def _is_local(entry: ModelEntry, config: Config, elsewhere: Mapping[str, object]) -> bool:
    """Whether workers of ours compute the model: if it was named for them, or nobody else does."""
    shelf = ModelStore(config.home)
    return entry.card.id not in elsewhere or any(
        fetch(name, shelf).card.id == entry.card.id for name in config.engine.models
    )


def _ids(entries: Sequence[ModelEntry]) -> list[str]:
    return [entry.card.id for entry in entries]


async def serve(
    config: Config,
    entries: Sequence[ModelEntry],
    listener: socket.socket,
    on_ready: OnReady,
    stop: asyncio.Event | None = None,
) -> None:
    """Serve the models until SIGTERM, SIGINT or `stop`; then let running requests finish."""
    stop = stop or asyncio.Event()
    async with contextlib.AsyncExitStack() as stack:
        elsewhere = _elsewhere(config)
        local = {entry.card.id: entry.path for entry in entries if _is_local(entry, config, elsewhere)}
        cluster = EngineWorkers(plan_workers(config.engine, local), config.engine)
        stack.push_async_callback(cluster.stop, WORKER_GRACE_S)
        await cluster.start()

        # The workers load in their processes while we import and read tokenizers in ours.
        from emberline.cli.http_worker import load_models, open_events, serve_http
        from emberline.jobs.webhooks.deliverer import DeliveryMetrics
        from emberline.service import open_service
        from emberline.service.core import LocalCore
        from emberline.service.open import DATABASE
        from emberline.store import open_store
        from emberline.upstream.config import servers_of
        from emberline.upstream.relay import discover

        endpoints = {model: cluster.endpoints.get(model, []) + elsewhere.get(model, []) for model in _ids(entries)}
        served = load_models(entries, endpoints)
        await cluster.wait_ready()
        store = await open_store(config.store.url or config.home / DATABASE)
        stack.push_async_callback(store.close)
        service = await open_service(
            served,
            data_dir=config.home,
            retention_days=config.responses.retention_days,
            queue_share=config.queue.share,
            store=store,
            upstreams=await discover(servers_of(config.endpoints)),
        )
        stack.push_async_callback(service.close)
        if not await service.ready(CONNECT_S):
            if len(config.endpoints) == 0:
                raise Unavailable("the engine workers are ready but do not let us in; their log lines say why")
            log.warning("some workers cannot be reached; `emberline ps` tells which")
        events = open_events(store, config)
        stack.push_async_callback(events.close)
        events.deliver()
        assert isinstance(service.core, LocalCore), "this process is the core"
        service.core.count(DeliveryMetrics(events.deliverer))
        batches = await _open_queue(stack, config, store, service, stop)
        doors = await _open_doors(stack, config, entries, cluster.folder, endpoints, service, listener)

        listen(listener, config.server)
        address = msgspec.structs.replace(Address.of(config), port=listener.getsockname()[1])
        on_ready(address, entries, [worker.ready_line for worker in cluster.workers])
        stack.callback(_impatience(asyncio.current_task(), stop, config.server.drain_s).cancel)
        if doors.children:
            _on_signals(stop.set)
            await stop.wait()
            listener.close()  # with it open, new connections would wait for doors that take no more
        else:
            await serve_http(service, config, listener, stop, events, batches)


async def _open_queue(
    stack: contextlib.AsyncExitStack, config: Config, store: "Database", service: "Service", stop: asyncio.Event
) -> "BatchService":
    """The durable queue, its doors, and the puller that runs what is in it when engines have room."""
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
    batches.load()
    auth = Authenticator(Secret.open(config.home))
    models = [card.id for card in service.models()]
    puller = Puller(queue, service, core.grants, models, auth.principal, LeaseOwner(config.home))
    stack.push_async_callback(puller.close)
    core.count(puller.metrics)
    puller.start(stop)
    return batches


async def _open_doors(
    stack: contextlib.AsyncExitStack,
    config: Config,
    entries: Sequence[ModelEntry],
    folder: Path,
    endpoints: Mapping[str, list[Endpoint]],
    service: "Service",
    listener: socket.socket,
) -> HttpWorkers:
    """Door processes, and the socket where they ask us for decisions; none where this process is the one door."""
    from emberline.cli.http_worker import HttpWorkerPlan
    from emberline.service import open_core_server

    core_socket, plan_file = folder / "core.sock", folder / "doors.json"
    n_doors = config.server.doors if config.server.doors > 1 else 0
    doors = HttpWorkers(n_doors, listener, "emberline.cli.http_worker", ["--plan", str(plan_file)])
    if n_doors:
        models = [(entry.card, entry.path, endpoints[entry.card.id]) for entry in entries]
        HttpWorkerPlan(config=config, core_socket=core_socket, core_pid=os.getpid(), models=models).write(plan_file)
        core = await open_core_server(service, core_socket)
        stack.push_async_callback(core.close)
        stack.push_async_callback(doors.stop, config.server.drain_s + WORKER_GRACE_S)
        await doors.start()
        await doors.wait_ready()
    return doors


def run_loop(main: Coroutine[Any, Any, None]) -> int:
    """Run until done. SIGTERM before the doors are open cancels; after that the doors hear it and drain."""
    import uvloop

    async def terminable() -> None:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        await main

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            runner.run(terminable())
        except asyncio.CancelledError:
            return 128 + signal.SIGTERM
    return 0


def _impatience(serving: asyncio.Task[Any] | None, stop: asyncio.Event, drain_s: float) -> asyncio.Task[None]:
    """After the signal that began the drain, another one ends it."""
    assert serving is not None

    async def watch() -> None:
        await stop.wait()
        log.info("stopping: running requests may finish within %g s; Ctrl-C again cuts them off", drain_s)
        _on_signals(serving.cancel)

    return asyncio.create_task(watch())


def _on_signals(act: Callable[[], object]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        with contextlib.suppress(ValueError, RuntimeError):  # not the main thread: `stop` alone counts
            asyncio.get_running_loop().add_signal_handler(number, act)
