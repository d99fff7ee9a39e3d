"""Serves HTTP over a service: in the core process itself, and in processes of this module, which are those of
`--http-workers N` and one for large requests.

python -m emberline.server.http_worker --fd N --name NAME, with its plan on standard input
"""

import argparse
import asyncio
import contextlib
import gc
import os
import socket
import ssl
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from emberline import log as logs
from emberline.accounts.account_service import AccountService
from emberline.accounts.auth import Authenticator
from emberline.accounts.secret import Secret
from emberline.api.app import ApiSettings, App
from emberline.api.batch_loader import BatchService
from emberline.api.http.large_requests import LargeRequestRelay
from emberline.balancer.endpoint import Endpoint
from emberline.catalog.card_files import CardFiles
from emberline.catalog.model_card import ModelCard
from emberline.catalog.model_files import ModelFiles, read_info, read_text
from emberline.catalog.model_store import ModelEntry, ModelStore
from emberline.cluster.cluster import cluster_id
from emberline.config import Config, needs_keys
from emberline.gateway.gateways import GatewayService
from emberline.images.decoders import MEMORY_BYTES as DECODER_BYTES
from emberline.images.decoders import ImageDecoders
from emberline.images.request_images import RequestImages
from emberline.images.sources import ImageLimits, ImageSources
from emberline.jobs.queue.queue import open_queue
from emberline.jobs.webhooks.service import WebhookService, WebhookSettings
from emberline.net.egress_policy import EgressPolicy
from emberline.net.http_server import serve
from emberline.predictor.remote_push import RemotePushes
from emberline.protocol.credential import client_context
from emberline.server.model_memory import machine_memory
from emberline.service import Served, Service, open_http_worker
from emberline.service.model_pulls import ModelPulls
from emberline.service.service_factory import DATABASE
from emberline.store import Database, open_store
from emberline.supervisor.cluster.certificate_authority import KEY_BYTES, CertificateAuthority
from emberline.supervisor.process import send_heartbeats, wait_or_stop
from emberline.supervisor.sandbox.confinement import Confinement
from emberline.supervisor.sandbox.launcher import Launcher
from emberline.telemetry import tracing
from emberline.telemetry.tracing import TracingSettings
from emberline.text.template_processes import ConfinedTemplates
from emberline.text.template_renderer import LocalRenderer, RendererFactory
from emberline.upstream.models import discover
from emberline.upstream.providers.directory import ProviderDirectory
from emberline.upstream.servers.client import upstream_configs

CONNECT_TIMEOUT_S = 30.0  # to the core and every engine; after that HTTP is served and reports what is unavailable
GC_THRESHOLD = 3000  # objects: most that a request makes are gone by then; a collection takes 2 to 3 ms

TEMPLATE_BYTES = 512 << 20  # of memory that a process for a chat template may take


class HttpWorkerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The start parameters of an HTTP worker. They hold secrets: they travel through a pipe and are in no file."""

    config: Config
    core_socket: Path
    core_pid: int = 0  # 0: the parent, whichever process that is
    large_socket: Path | None = None  # where large requests are relayed to; None: this is the worker for them
    models: list[tuple[ModelCard, Path, list[Endpoint]]]
    tracing: TracingSettings = TracingSettings()

    def encode(self) -> bytes:
        return msgspec.json.encode(self, enc_hook=str)

    @classmethod
    def decode(cls, encoded: bytes) -> "HttpWorkerPlan":
        return msgspec.json.decode(encoded, type=cls, dec_hook=lambda kind, value: kind(value))


def confined_templates() -> RendererFactory:
    """Run chat templates that are not of the built-in catalog in confined processes."""
    return ConfinedTemplates(Launcher(Confinement(memory_bytes=TEMPLATE_BYTES)).start)


def open_images(config: Config) -> RequestImages:
    """Open the parts that prepare the images of requests in one process."""
    settings = config.images
    limits = ImageLimits(
        n_images=settings.max_images,
        n_bytes=settings.max_bytes,
        n_pixels=settings.max_pixels,
        fetch_s=settings.fetch_timeout_s,
        fetches=settings.fetch,
    )
    sources = ImageSources(EgressPolicy(settings.allowed_networks, setting="[images] allowed_networks"), limits)
    decoders = ImageDecoders(Launcher(Confinement(memory_bytes=DECODER_BYTES)).start)
    return RequestImages(sources, decoders, settings.cache_bytes)


def load_models(
    entries: Sequence[ModelEntry],
    endpoints: Mapping[str, Sequence[Endpoint]],
    templates: RendererFactory = LocalRenderer,
) -> list[Served]:
    """The models with their tokenizers and the endpoints of their engines. What an engine would tell of a model that
    has none yet is read from its files. `templates` run the chat templates that are not of the built-in catalog."""

    def served(entry: ModelEntry, workers: Sequence[Endpoint]) -> Served:
        files = ModelFiles(entry.card, str(entry.path))
        return Served(entry.card, read_text(files, templates), tuple(workers), None if workers else read_info(files))

    return [served(entry, endpoints[entry.card.id]) for entry in entries]


def open_webhooks(store: Database, config: Config) -> WebhookService:
    """Records and reads events; delivers them only where `deliver` is called: in the core process."""
    webhooks = config.webhooks
    settings = WebhookSettings(
        allow=webhooks.allowed_networks,
        timeout_s=webhooks.timeout_s,
        disable_after_days=webhooks.disable_after_days,
        retention_days=webhooks.retention_days,
    )
    return WebhookService(store, Secret.open(config.home), settings)


def open_providers(config: Config, accounts: AccountService) -> ProviderDirectory:
    """The configured providers, and those whose keys are stored. ConfigError says what is wrong with one."""
    egress = EgressPolicy(config.accounts.provider_networks, setting="[accounts] provider_networks")
    return ProviderDirectory(config.providers, CardFiles(config.home).apply, accounts.provider_keys, egress)


def core_tls(home: Path) -> ssl.SSLContext:
    """The TLS settings of a core's connections, with a new certificate of the cluster's authority."""
    secret = Secret.open(home)
    authority = CertificateAuthority(secret.derive("cluster-ca", size=KEY_BYTES), cluster_id(secret))
    return client_context(authority.core_pem())


async def serve_http(
    service: Service,
    config: Config,
    listener: socket.socket,
    stop: asyncio.Event,
    webhooks: WebhookService,
    batches: BatchService,
    large_socket: Path | None,
    accounts: AccountService,
    gateways: GatewayService,
) -> None:
    """Serve HTTP until `stop`, then drain running requests. Large ones are relayed to `large_socket`, if given."""
    secret, shares_kv = Secret.open(config.home), config.kv.share_between_accounts
    auth = Authenticator(secret, config.auth.key, accounts.directory, needs_keys(config), shares_kv)
    settings = ApiSettings(auth, hosts=config.server.allowed_hosts, origins=config.server.cors_origins)
    if large_socket is not None:
        warmup = asyncio.create_task(service.warm_up())
        warmup.add_done_callback(lambda task: task.cancelled() or task.exception())  # a request reports the same error
    gc.freeze()  # modules and vocabularies are permanent: collections need not traverse them
    gc.set_threshold(GC_THRESHOLD)
    closing = asyncio.create_task(_close_streams(stop, webhooks, batches))
    try:
        large_requests = None if large_socket is None else LargeRequestRelay(large_socket)
        pulls = ModelPulls(ModelStore(config.home), machine_memory, RemotePushes(config.home, config.predictors))
        app = App(service, settings, webhooks, batches, large_requests, accounts, gateways, pulls)
        await serve(app, listener, drain_s=config.server.drain_timeout_s, stop=stop)
    finally:
        closing.cancel()


async def _close_streams(stop: asyncio.Event, webhooks: WebhookService, batches: BatchService) -> None:
    """Streams of events and of queued jobs have no end of their own, so the drain must not wait for them."""
    await stop.wait()
    webhooks.feed.end()
    batches.closing.set()


async def _run(plan: HttpWorkerPlan, listener: socket.socket) -> None:
    stop = asyncio.Event()
    with _stop_with_core(stop, plan.core_pid):
        async with contextlib.AsyncExitStack() as stack:
            entries = [ModelEntry(card, path) for card, path, _ in plan.models]
            templates = confined_templates()
            served = load_models(entries, {card.id: endpoints for card, _, endpoints in plan.models}, templates)
            upstreams = await discover(upstream_configs(plan.config.endpoints))
            store = await open_store(plan.config.store.url or plan.config.home / DATABASE)
            stack.push_async_callback(store.close)
            accounts = AccountService(store, Secret.open(plan.config.home))
            stack.push_async_callback(accounts.close)
            await accounts.open()
            gateways = GatewayService(store, plan.config.gateways)
            stack.push_async_callback(gateways.close)
            await gateways.open()
            webhooks = open_webhooks(store, plan.config)
            stack.push_async_callback(webhooks.close)
            queue = await open_queue(store, plan.config.home)
            stack.push_async_callback(queue.close)
            service = await open_http_worker(
                served,
                core_socket=plan.core_socket,
                upstreams=upstreams,
                providers=open_providers(plan.config, accounts),
                data_dir=plan.config.home,
                tls=core_tls(plan.config.home),
                templates=templates,
                images=open_images(plan.config),
            )
            stack.push_async_callback(service.close)
            service.use_files(queue.files)
            batches = BatchService(queue, service)
            stack.push_async_callback(batches.close)
            batches.start_loading()
            # As long as this process lives, no other can listen on its port: it must not outlast the core.
            await wait_or_stop(service.ready(CONNECT_TIMEOUT_S), stop)
            if not stop.is_set():
                print('{"ready": true}', flush=True)
                beating = asyncio.create_task(send_heartbeats(sys.stdout.fileno()))
                stack.callback(beating.cancel)
                large_socket = plan.large_socket
                await serve_http(
                    service, plan.config, listener, stop, webhooks, batches, large_socket, accounts, gateways
                )


@contextlib.contextmanager
def _stop_with_core(stop: asyncio.Event, core_pid: int) -> Iterator[None]:
    """Set `stop` when the core process dies, even if it did while this one started."""
    if core_pid and os.getppid() != core_pid:
        stop.set()
    try:
        descriptor = os.pidfd_open(os.getppid())
    except (AttributeError, OSError):  # not Linux: only the closing of the core's socket shows it
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

    parser = argparse.ArgumentParser(prog="python -m emberline.server.http_worker", allow_abbrev=False)
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--name", default="http")
    args = parser.parse_args(argv)
    plan = HttpWorkerPlan.decode(sys.stdin.buffer.read())
    logs.setup(args.name, plan.config.log.level)
    runner: Any = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    tracing.start(plan.tracing, args.name)
    with runner, socket.socket(fileno=args.fd) as listener:
        runner.run(_run(plan, listener))
    tracing.stop()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
