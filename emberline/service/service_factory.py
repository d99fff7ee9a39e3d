"""Builds a service: in the core process, and in the other HTTP workers."""

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from emberline.accounts.budgets import LEASE_S, Budgets
from emberline.accounts.key_directory import KeyDirectory
from emberline.accounts.limit_enforcement import LimitEnforcer
from emberline.accounts.price_store import PriceStore
from emberline.accounts.prices import PUBLISHED
from emberline.accounts.shared_rate_limits import SharedRateLimiter
from emberline.accounts.usage_journal import UsageJournal
from emberline.accounts.usage_ledger import UsageLedger
from emberline.balancer.admission_controller import AdmissionController
from emberline.balancer.balancer import Balancer
from emberline.balancer.cost_model import DEFAULTS, Settings
from emberline.balancer.grants import SHARE
from emberline.catalog.aliases import open_aliases
from emberline.catalog.card_files import CardFiles
from emberline.cluster.cluster import Cluster, ClusterKeys
from emberline.cluster.member_table import MemberLimits, MemberTable
from emberline.cluster.membership import Membership, WorkerConnections
from emberline.cluster.planner_table import PlannerTable
from emberline.cluster.prefix_push import PrefixPusher
from emberline.cluster.scaled_models import ScaledModels
from emberline.cluster.served_models import Served, ServedModels, load_served
from emberline.cluster.timings import DEFAULTS as DEFAULT_TIMINGS
from emberline.cluster.timings import Timings
from emberline.config import ScalingConfig
from emberline.images.request_images import RequestImages
from emberline.protocol.price import Price
from emberline.service.core import CoreConnection, LocalCore
from emberline.service.core_link import CoreServer, RemoteCore
from emberline.service.responses import RETENTION_DAYS, DatabaseResponses
from emberline.service.service import Service
from emberline.service.sessions import Sessions
from emberline.store import Database, open_store
from emberline.text.grammar.compiler_pool import GrammarCompiler
from emberline.text.template_renderer import LocalRenderer, RendererFactory
from emberline.upstream.models import UpstreamModels
from emberline.upstream.providers.client import ProviderClient
from emberline.upstream.providers.directory import ProviderDirectory
from emberline.upstream.servers.client import UpstreamClient

DATABASE = "emberline.db"
USAGE = "usage"  # the folder of usage journals
CORE_WAIT_S = 5.0


class ClusterSettings(NamedTuple):
    """Settings of a core whose cluster workers may join."""

    keys: ClusterKeys
    region: str = ""
    tls: ssl.SSLContext | None = None  # with this core's certificate
    core: str = ""  # its name, unique in the cluster and the same after a restart
    bounds: Mapping[str, ScalingConfig] = {}  # of models that are scaled
    members: MemberLimits = MemberLimits()


async def open_service(
    served: Sequence[Served],
    *,
    data_dir: Path,
    max_waiting: int = DEFAULTS.max_waiting,
    retention_days: int = RETENTION_DAYS,
    store_url: str = "",
    queue_share: float = SHARE,
    budget_lease_s: float = LEASE_S,
    store: Database | None = None,
    upstreams: Sequence[UpstreamClient] = (),
    providers: ProviderDirectory | None = None,
    on_stall: Callable[[str], None] | None = None,
    on_leave: Callable[[str], Awaitable[None]] | None = None,
    directory: KeyDirectory | None = None,
    prices: Mapping[str, Price] | None = None,
    aliases: Mapping[str, Mapping[str, int]] | None = None,
    cluster: ClusterSettings | None = None,
    timings: Timings = DEFAULT_TIMINGS,
    grammars: GrammarCompiler | None = None,
    templates: RendererFactory = LocalRenderer,
    images: RequestImages | None = None,
) -> Service:
    """The core process's service. Opens the store, by default in `data_dir`; connects to the engines meanwhile.

    A `store` that is given is used instead, and its owner closes it. `upstreams` are servers whose models are known by
    now (`discover`). `on_stall` is called with the name of an engine that hangs, to restart it; `on_leave` with that
    of a worker that has left, to end it. `directory`, which is open, has the accounts' and keys' limits; `prices` are
    the configured ones, by model, and `aliases` the configured aliases. With `cluster`, workers may join. `grammars`
    compiles the grammars of replies; the service closes it. `templates` run the chat templates of models that are not
    of the built-in catalog. `images` prepares images, which are refused without it; the service closes it.
    """
    upstream = UpstreamModels(upstreams, CardFiles(data_dir).apply, providers, templates)
    tls = None if cluster is None else cluster.tls
    connections = _connections(served, upstream, timings, templates, on_stall, tls)
    own = await open_store(store_url or data_dir / DATABASE) if store is None else None
    store = store or own
    assert store is not None
    responses = DatabaseResponses(store, retention_days)
    await responses.open()
    admission = AdmissionController(
        Balancer(Settings(max_waiting=max_waiting, region="" if cluster is None else cluster.region))
    )
    workers: list[CoreConnection] = [*connections.engines.values(), *upstream.clients.values()]
    journal = UsageJournal(data_dir / USAGE)
    usage = UsageLedger(store, journal, timings.usage)
    budgets = Budgets(store, journal.name, lease_s=budget_lease_s)
    budgets.start()
    usage.start(budgets.recover)
    shared = SharedRateLimiter(store, journal.name) if directory is not None and store.is_shared else None
    if shared is not None:
        shared.start()
    limits = None if directory is None else LimitEnforcer(directory, budgets, shared)
    written = None if store.is_shared else data_dir
    price_store = PriceStore(store)
    known = [*(item.card for item in served), *connections.upstream.cards()]
    stated = ((card.id, card.price or PUBLISHED.get(card.id)) for card in known)
    await price_store.start(prices, {model: price for model, price in stated if price is not None})
    sessions = Sessions()
    core = LocalCore(admission, workers, usage, sessions, responses, queue_share, written, limits, price_store)
    core.aliases = await open_aliases(store, aliases or {})
    membership = core.membership = Membership(core, connections, on_leave)
    membership.pusher = PrefixPusher(sessions.recent, admission, connections.engines, timings.push_s)

    def provider_added(client: ProviderClient) -> None:
        core.add(client)
        client.start(watch=True)

    def provider_gone(client: ProviderClient) -> None:
        core.discard(client.name)
        core.forget_provider(client.provider.name)

    upstream.providers.on_new.append(provider_added)
    upstream.providers.on_gone.append(provider_gone)
    core.know_model = upstream.providers.ensure
    core.lists_model = upstream.lists

    if cluster is not None:
        table = MemberTable(store, cluster.members)
        core.cluster = Cluster(table, membership, cluster.keys, cluster.region, cluster.tls is not None, timings)
        if store.is_shared:
            await table.claim(core.cluster.id)
        await core.cluster.start()
        core.scaling = ScaledModels(
            cluster.core or journal.name,
            PlannerTable(store),
            admission,
            core.grants,
            connections.models.model_id,
            cluster.bounds,
            timings,
        )
        await core.scaling.start()
    sweep = upstream.sweep_providers(timings.provider_sweep_s, lambda client: admission.has_requests(client.name))
    tasks = [asyncio.create_task(core.history.run()), asyncio.create_task(sweep)]

    async def close_core() -> None:
        for task in tasks:
            task.cancel()
        await core.aliases.close()
        if core.scaling is not None:
            await core.scaling.close()
        if core.cluster is not None:
            await core.cluster.close()
        await membership.close()
        admission.close()
        await responses.close()
        if shared is not None:
            await shared.close()
        await budgets.close(usage.all_stored)
        await usage.close()
        await price_store.close()
        if own is not None:
            await own.close()

    connections.upstream.start(watch=True)
    engines, upstream = connections.engines, connections.upstream
    compiler = grammars or GrammarCompiler()
    return Service(core, connections.models, engines, close_core, compiler, upstream, data_dir, timings, images)


async def open_core_server(service: Service, socket_path: Path) -> CoreServer:
    """Let HTTP workers of this user use the core of `service`. Close the server before the service."""
    assert isinstance(service.core, LocalCore), "only the core process serves HTTP workers"
    server = CoreServer(service.core, socket_path)
    await server.start()
    return server


async def open_http_worker(
    served: Sequence[Served],
    *,
    core_socket: Path,
    upstreams: Sequence[UpstreamClient] = (),
    providers: ProviderDirectory | None = None,
    data_dir: Path | None = None,
    tls: ssl.SSLContext | None = None,
    timings: Timings = DEFAULT_TIMINGS,
    templates: RendererFactory = LocalRenderer,
    images: RequestImages | None = None,
) -> Service:
    """The service of an HTTP worker. Waits a moment for the core; without it, requests are answered Unavailable."""
    described = (lambda card: card) if data_dir is None else CardFiles(data_dir).apply
    models = UpstreamModels(upstreams, described, providers, templates)
    connections = _connections(served, models, timings, templates, tls=tls)
    core = RemoteCore(core_socket, connections.engines.values(), models.abort, connections.follow, timings)
    await core.wait_connected(CORE_WAIT_S)
    models.start(watch=False)
    engines = connections.engines

    async def close() -> None:
        sweeping.cancel()
        await core.close()

    service = Service(core, connections.models, engines, close, GrammarCompiler(), models, data_dir, timings, images)
    sweep = models.sweep_providers(
        timings.provider_sweep_s, lambda client: service.in_flight.runs_on_provider(client.provider.name)
    )
    sweeping = asyncio.create_task(sweep)
    return service


def _connections(
    served: Sequence[Served],
    upstream: UpstreamModels,
    timings: Timings,
    templates: RendererFactory,
    on_stall: Callable[[str], None] | None = None,
    tls: ssl.SSLContext | None = None,
) -> WorkerConnections:
    """Connections to the configured workers. The service starts those to engines."""
    models = ServedModels(served, partial(load_served, templates=templates))
    connections = WorkerConnections(models, upstream, on_stall, tls, timings)
    for item in served:
        for endpoint in item.endpoints:
            connections.add_engine(msgspec.structs.replace(endpoint, models=endpoint.models or (item.card.id,)))
    return connections
