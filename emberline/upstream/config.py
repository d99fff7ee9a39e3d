"""One of other people's servers, as the configuration has it."""

from collections.abc import Sequence

import msgspec

from emberline.balancer.endpoint import Endpoint
from emberline.config import ConfigError, EndpointConfig
from emberline.upstream.disaggregation import DEFAULT_TRANSFER, Adapter, adapter_for, transfers_of
from emberline.upstream.http_client import parse

BOOTSTRAP_PORT = 8998  # of Mooncake and SGLang alike


class UpstreamConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    endpoint: Endpoint  # its address is the URL, its token the key that the server wants
    transfer: str = ""  # how KV goes from prefill to decode; empty: the kind's usual way
    bootstrap: str = ""  # host:port where a prefill server tells how to reach its KV; empty: 8998 at its host
    kv_events: str = ""  # "tcp://host:5557"
    kv_replay: str = ""  # "tcp://host:5558", to ask again for events that were missed
    tokenizer: str = ""  # file or folder of the model's tokenizer; empty: not known here
    max_running: int = 0  # 0: unknown
    context_len: int = 0  # 0: as the server says

    @property
    def name(self) -> str:
        return self.endpoint.name

    @property
    def kind(self) -> str:
        return self.endpoint.kind

    @property
    def meeting_point(self) -> str:
        return self.bootstrap or f"{parse(self.endpoint.address).host}:{BOOTSTRAP_PORT}"

    def adapter(self) -> Adapter | None:
        return adapter_for(self.kind, self.transfer)


def servers_of(endpoints: Sequence[EndpointConfig]) -> list[UpstreamConfig]:
    """Other people's servers; Emberline's own workers among the endpoints are left out."""
    servers = [_server(endpoint) for endpoint in endpoints if endpoint.kind != "emberline"]
    _check_pairs(servers)
    return servers


def _server(config: EndpointConfig) -> UpstreamConfig:
    def wrong(what: str) -> ConfigError:
        return ConfigError(f"endpoint {config.name}: {what}", param="endpoints")

    try:
        parse(config.url)
    except ValueError as error:
        raise wrong(f"url: {error}") from None
    adapter = adapter_for(config.kind, config.transfer)
    if config.transfer and adapter is None:
        known = ", ".join(transfers_of(config.kind)) or "none"
        raise wrong(f"transfer {config.transfer!r} is not known for kind {config.kind!r}; there are {known}")
    if config.role != "both" and adapter is None:
        raise wrong(f"servers of kind {config.kind!r} cannot be told to work in pairs: leave role out")
    if config.bootstrap and not config.bootstrap.rpartition(":")[2].isdecimal():
        raise wrong(f"bootstrap is host:port, not {config.bootstrap!r}")
    for name, address in (("kv_events", config.kv_events), ("kv_replay", config.kv_replay)):
        if address and not address.startswith(("tcp://", "ipc://")):
            raise wrong(f"{name} is tcp://host:port, not {address!r}")
    if config.kv_events and not config.tokenizer:
        raise wrong("kv_events speak of token ids: give tokenizer, the model's file or folder, too")
    return UpstreamConfig(
        endpoint=Endpoint(
            name=config.name,
            address=config.url,
            token=config.key or "",
            role=config.role,
            kind=config.kind,
            models=config.models,
            alone=config.role != "decode" or adapter is None or adapter.decodes_alone,
        ),
        transfer=config.transfer,
        bootstrap=config.bootstrap,
        kv_events=config.kv_events,
        kv_replay=config.kv_replay,
        tokenizer=config.tokenizer,
        max_running=config.max_running,
        context_len=config.context_len,
    )


def _check_pairs(servers: Sequence[UpstreamConfig]) -> None:
    """A prefill server must be able to hand over to every decode server of its model."""
    ways: dict[str, tuple[str, str, str]] = {}
    for server in servers:
        if server.endpoint.role == "both":
            continue
        for model in server.endpoint.models:
            way = (server.kind, server.transfer or DEFAULT_TRANSFER.get(server.kind, ""))
            kind, transfer, name = ways.setdefault(model, (*way, server.name))
            if way != (kind, transfer):
                raise ConfigError(
                    f"endpoints {name} and {server.name} share {model} and cannot hand over to each other: "
                    f"{kind}/{transfer} and {'/'.join(way)}",
                    param="endpoints",
                )
