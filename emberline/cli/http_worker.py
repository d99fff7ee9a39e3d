"""A front door: the HTTP app over a service. In the core process it is the only one; with `--doors N` there are N more.

python -m emberline.cli.http_worker --fd N --plan FILE --name NAME
"""

import argparse
import asyncio
import contextlib
import gc
import os
import socket
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from emberline import log as logs
from emberline.accounts.auth import Authenticator
from emberline.accounts.secret import Secret
from emberline.api.app import ApiSettings, create_app
from emberline.api.batch_loader import BatchService
from emberline.api.http.server import serve
from emberline.balancer.endpoint import Endpoint
from emberline.catalog.model_card import ModelCard
from emberline.catalog.model_store import ModelEntry
from emberline.cli.fetch import load_text
from emberline.config import Config
from emberline.jobs.queue.queue import open_queue
from emberline.jobs.webhooks.service import WebhookService, WebhookSettings
from emberline.service import Served, Service, open_http_worker
from emberline.service.open import DATABASE
from emberline.store import Database, open_store
from emberline.upstream.config import servers_of
from emberline.upstream.relay import discover

CONNECT_S = 30.0  # to reach the core and every engine; after that the door opens and says what is not there


class HttpWorkerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """All that a door process needs to know; the core writes it to a file that only this user can read."""

    config: Config
    core_socket: Path
    core_pid: int = 0  # 0: whoever started the door
    models: list[tuple[ModelCard, Path, list[Endpoint]]]

    def write(self, path: Path) -> None:
        with open(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "wb") as file:
            file.write(msgspec.json.encode(self, enc_hook=str))

    @classmethod
    def read(cls, path: Path) -> "HttpWorkerPlan":
        return msgspec.json.decode(path.read_bytes(), type=cls, dec_hook=lambda kind, value: kind(value))


def load_models(entries: Sequence[ModelEntry], endpoints: Mapping[str, Sequence[Endpoint]]) -> list[Served]:
    """The models with their tokenizers and the engines that compute them."""
    return [Served(entry.card, load_text(entry), tuple(endpoints[entry.card.id])) for entry in entries]


def open_events(store: Database, config: Config) -> WebhookService:
    """Where this process keeps and reads events; nothing is delivered until it is told to."""
    webhooks = config.webhooks
    settings = WebhookSettings(
        allow=webhooks.allow,
        timeout_s=webhooks.timeout_s,
        disable_after_days=webhooks.disable_after_days,
        retention_days=webhooks.retention_days,
    )
    return WebhookService(store, Secret.open(config.home), settings)


async def serve_http(
    service: Service,
    config: Config,
    listener: socket.socket,
    stop: asyncio.Event,
    events: WebhookService | None = None,
    batches: BatchService | None = None,
) -> None:
    """Answer HTTP until told to stop, then let running requests finish."""
    auth = Authenticator(Secret.open(config.home), config.auth.key)
    settings = ApiSettings(auth, hosts=config.server.allowed_hosts, origins=config.server.cors_origins)
    warming = asyncio.create_task(service.warm_up())
    warming.add_done_callback(lambda task: task.cancelled() or task.exception())  # a request that needs it says more
    gc.freeze()  # modules and vocabularies stay: the collector need not walk through them while streams wait
    ending = asyncio.create_task(_end_streams(stop, events, batches))
    try:
        app = create_app(service, settings, events, batches)
        await serve(app, listener, drain_s=config.server.drain_s, stop=stop)
    finally:
        ending.cancel()


async def _end_streams(stop: asyncio.Event, events: WebhookService | None, batches: BatchService | None) -> None:
    """Streams of events and of queued work may never end by themselves: the drain must not wait for them."""
    await stop.wait()
    if events is not None:
        events.feed.end()
    if batches is not None:
        batches.closing.set()


async def _run(plan: HttpWorkerPlan, listener: socket.socket) -> None:
    stop = asyncio.Event()
    with _parent_watched(stop, plan.core_pid):
        entries = [ModelEntry(card, path) for card, path, _ in plan.models]
        served = load_models(entries, {card.id: endpoints for card, _, endpoints in plan.models})
        upstreams = await discover(servers_of(plan.config.endpoints))
        service = await open_http_worker(served, core_socket=plan.core_socket, upstreams=upstreams)
        store = await open_store(plan.config.store.url or plan.config.home / DATABASE)
        events = open_events(store, plan.config)
        queue = await open_queue(store, plan.config.home)
        batches = BatchService(queue, service)
        batches.load()
        try:
            await _unless(stop, service.ready(CONNECT_S))
            if not stop.is_set():
                print('{"ready": true}', flush=True)
                await serve_http(service, plan.config, listener, stop, events, batches)
        finally:
            await batches.close()
            await service.close()
            await queue.close()
            await events.close()
            await store.close()


async def _unless(stop: asyncio.Event, waiting: Coroutine[Any, Any, Any]) -> None:
    """Wait for it, but not once we shall stop: until we are gone, nobody else can listen where we do."""
    tasks = [asyncio.create_task(waiting), asyncio.create_task(stop.wait())]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


@contextlib.contextmanager
def _parent_watched(stop: asyncio.Event, core_pid: int) -> Iterator[None]:
    """Stop when the core is gone, however it went; it may have gone while we started."""
    if core_pid and os.getppid() != core_pid:
        stop.set()
    try:
        descriptor = os.pidfd_open(os.getppid())
    except (AttributeError, OSError):  # not Linux: the core's socket closing is all we see
        yield
        return
    loop = asyncio.get_running_loop()
    loop.add_reader(descriptor, stop.set)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def main(argv: Sequence[str] | None = None) -> int:
    import uvloop

    parser = argparse.ArgumentParser(prog="python -m emberline.cli.http_worker")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--name", default="door")
    args = parser.parse_args(argv)
    plan = HttpWorkerPlan.read(args.plan)
    logs.setup(args.name, plan.config.log.level)
    runner: Any = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    with runner, socket.socket(fileno=args.fd) as listener:
        runner.run(_run(plan, listener))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
