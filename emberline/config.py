"""The configuration, resolved once into frozen data: defaults < emberline.toml < environment < command-line flags.

The file is `$EMBERLINE_HOME/emberline.toml`; every key `[section] key` is also `EMBERLINE_SECTION_KEY` in the
environment. An unknown key or a value out of range stops the program with the name of the key and where it was set.
"""

import ipaddress
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import msgspec
from msgspec import Meta

from emberline.protocol.errors import BadInput
from emberline.protocol.gateway import GatewaySettings
from emberline.protocol.price import Price, PriceFields

FILE_NAME = "emberline.toml"
MIN_KEY_LEN = 16  # characters of an API key that protects more than loopback

T = TypeVar("T")
Count = Annotated[int, Meta(ge=0)]
Share = Annotated[float, Meta(gt=0, le=1)]
Seconds = Annotated[float, Meta(ge=0, le=86400)]


class ConfigError(BadInput):
    """The configuration is wrong; the message names the key and where it was set."""


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One table of emberline.toml."""


class ServerConfig(Section, frozen=True):
    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8686  # 0: any free one
    http_workers: Annotated[int, Meta(ge=1, le=256)] = 1  # processes; with 1 the core process serves HTTP itself
    allowed_hosts: tuple[str, ...] = ()  # Host headers to accept besides the bound address
    cors_origins: tuple[str, ...] = ()  # web origins that may call, e.g. http://localhost:3000
    auth: Literal["auto", "keys", "none"] = "auto"  # auto: keys beyond loopback or where an admin key is set, else none
    drain_timeout_s: Annotated[float, Meta(ge=0, le=3600)] = 30.0  # for running requests to finish at shutdown


class ClientConfig(Section, frozen=True):
    """The server that commands talk to, where it is not this machine's own."""

    url: Annotated[str, Meta(pattern=r"^(|https?://[^/?#@\s]+(/[^?#\s]*)?)$")] = ""  # empty: [server] host and port
    key: str | None = None  # an API key for it; None: [auth] key

    def __repr__(self) -> str:
        return f"ClientConfig(url={self.url!r}, key={'set' if self.key else None})"


class AuthConfig(Section, frozen=True):
    key: str | None = None  # the admin key

    def __repr__(self) -> str:
        return f"AuthConfig(key={'set' if self.key else None})"


Ranks = Annotated[int, Meta(ge=1, le=64)]


class EngineConfig(Section, frozen=True):
    models: tuple[str, ...] = ()  # names, paths or hf:org/repo; empty: the catalog's default
    device: Literal["auto", "cpu", "cuda"] = "auto"
    replicas: Count = 0  # workers per model; 0: one per GPU, one on a CPU
    prefill_workers: Count = 0  # per model; prefill/decode disaggregation needs both numbers
    decode_workers: Count = 0
    gpus: Annotated[str, Meta(pattern=r"^(|auto|[1-9]\d{0,2})$")] = ""  # for the model, divided as the plan recommends
    tp: Ranks = 1  # tensor parallelism: ranks of a worker that divide each layer
    pp: Ranks = 1  # pipeline parallelism: stages of a worker that divide the layers
    ep: bool = False  # expert parallelism: the ranks of `tp` hold whole experts
    dcp: Ranks = 1  # decode context parallelism: the KV of a sequence over so many ranks of `tp`; models with MLA
    step_timeout_s: Annotated[float, Meta(gt=0, le=86_400)] = 60.0  # that a step of several ranks may take
    threads: Count = 0  # per worker on a CPU; 0: the cores, shared by need
    kv_bytes: Count = 0  # KV cache per worker; 0: a quarter of the free memory, at most 2 GiB
    gpu_memory_share: tuple[Share, ...] = ()  # of a GPU, for each model in order or one for all; (): even shares
    context_len: Count = 0  # tokens of a sequence, prompt and reply; 0: as many as the model and the KV cache have
    max_running: Count = 0  # sequences in a batch; 0: the engine's default
    token_budget: Count = 0  # tokens computed per step; 0: the engine's default
    deterministic: bool = False
    weights: Literal["plain", "compressed", "auto"] = "plain"  # BF16 weights in a GPU's memory
    verify_weights: bool = False  # compressed checkpoints are compared with their SHA-256 before they are served
    speculation: Literal["auto", "off", "suffix", "grammar", "eagle3", "draft_model"] = (
        "auto"  # all that pay, none, or one
    )
    draft_head: str = ""  # folder of an EAGLE-3 head; empty: with eagle3, the one that comes with the package
    draft_model: str = ""  # a smaller model with the same tokenizer, which drafts: its name, folder or file


class KVConfig(Section, frozen=True):
    """The KV cache beyond the device: tiers of each worker, and the cluster's pool."""

    share_between_accounts: bool = False  # one account's prompts are found in the cache by all; False: by itself alone
    host_bytes: Count | None = None  # of host memory per worker, below the device's KV cache; None: a share for a GPU
    disk_bytes: Count = 0  # on disk per worker, below that; 0: none
    disk_path: str = ""  # the folder for it; empty: `kv` in the data folder
    disk_encryption: bool = False  # of the blocks on disk, under a key derived from the root secret
    store: Literal["", "mooncake"] = ""  # of the pool that all workers of the cluster share; empty: none
    key: str | None = None  # that tags stored blocks: 64 hexadecimal digits; None: derived from the root secret
    pool_bytes: Count | None = None  # memory that this machine lends to the pool; None: an eighth of it, at most 2 GiB
    pool_master: str = ""  # host:port of a Mooncake master that runs already; empty: one is started here
    pool_metrics: str = ""  # host:port of that master's HTTP server, which tells how full the pool is
    pool_host: str = "127.0.0.1"  # private address at which the pool's other machines reach this one
    pool_port: Annotated[int, Meta(ge=0, le=65535)] = 0  # of the master that is started here; 0: any free one
    pool_device: str = ""  # of RDMA, e.g. mlx5_0; empty: TCP

    def disk_folder(self, home: Path) -> Path:
        return (Path(self.disk_path).expanduser() if self.disk_path else home / "kv").absolute()

    def __repr__(self) -> str:
        return f"KVConfig(store={self.store!r}, key={'set' if self.key else None})"


class ModelsConfig(Section, frozen=True):
    """Models that are loaded on demand, beside those named in [engine] models."""

    on_demand: bool = True  # pulled models that are not named are loaded when a request asks for them
    memory_bytes: Count = 0  # for weights and KV caches of all loaded models; 0: four fifths of the free memory
    max_loaded: Count = 0  # at once; 0: as many as there is memory for
    keep_alive_s: Annotated[float, Meta(ge=0, le=31_536_000)] = 300.0  # of an idle model; named ones stay loaded
    switch_after_s: Annotated[float, Meta(ge=0, le=3600)] = 10.0  # of waiting, until a busy model makes way
    batch_switch_after_s: Annotated[float, Meta(ge=0, le=86_400)] = 60.0  # the same for queued jobs


class StoreConfig(Section, frozen=True):
    url: str = ""  # empty: SQLite in the data folder; else postgresql://… or sqlite:///path

    def __repr__(self) -> str:  # the URL may contain a password
        return f"StoreConfig(url={'set' if self.url else None})"


class ScalingConfig(Section, frozen=True, kw_only=True):
    """One `[cluster.models.NAME]` table: the bounds that the planner keeps to."""

    min_replicas: Count = 1  # 0: none while it is idle; requests are held while one starts
    max_replicas: Annotated[int, Meta(ge=1)] = 1
    disaggregated: bool = False  # prefill and decode on replicas of their own
    tolerated_s: Annotated[float, Meta(gt=0, le=3600)] = 2.0  # that a prompt may be queued
    grow_after_s: Seconds = 10.0  # that there must be too few
    shrink_after_s: Seconds = 300.0  # that there must be too many
    settle_s: Seconds = 30.0  # between two drains or role changes
    idle_s: Seconds = 900.0  # without a request, before the last replica is drained
    start_s: Annotated[float, Meta(gt=0, le=86400)] = 60.0  # that a replica takes to start, until it was measured
    hold_s: Seconds = 300.0  # that a request waits for a first replica
    max_held: Annotated[int, Meta(ge=1)] = 64  # requests that wait so at each core

    def __post_init__(self) -> None:
        least = max(self.min_replicas, 2 if self.disaggregated else 1)
        if self.max_replicas < least:
            why = ", for one prefill and one decode replica" if least == 2 > self.min_replicas else ""
            raise ValueError(f"max_replicas is {self.max_replicas}: use {least} or more{why}")


class ClusterConfig(Section, frozen=True):
    region: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{0,63}$")] = ""  # of this core; workers have their own
    core_only: bool = False  # start no engine workers here: they join
    planner: Literal["on", "dry-run", "off"] = "on"  # starts and drains replicas of the models below
    address: str = ""  # at which other cores reach replicas that are started here; empty: they need not
    launcher: Literal["auto", "ray", "local", "none"] = "auto"  # auto: Ray where it is up, else this machine
    local_replicas: Count = 0  # that the planner may start here; 0: one a GPU, or one a CPU core
    models: dict[str, ScalingConfig] = {}  # by name: those that the planner scales

    @property
    def scaled(self) -> dict[str, ScalingConfig]:
        """The models whose workers the planner starts."""
        return {} if self.planner == "off" else self.models


class QueueConfig(Section, frozen=True):
    capacity_share: Annotated[float, Meta(ge=0, le=1)] = 0.5  # of an engine, for jobs while requests are served too


class AccountsConfig(Section, frozen=True):
    provider_networks: tuple[str, ...] = ()  # private ranges that accounts' own providers may be in, e.g. 10.0.0.0/8
    budget_lease_s: Annotated[float, Meta(ge=10, le=3600)] = 120.0  # that a killed core's part of a budget is not free


class ResponsesConfig(Section, frozen=True):
    retention_days: Annotated[int, Meta(ge=1, le=3650)] = 30  # how long a stored response can be continued


class WebhooksConfig(Section, frozen=True):
    allowed_networks: tuple[str, ...] = ()  # private ranges that deliveries may reach, e.g. 10.0.0.0/8
    timeout_s: Annotated[float, Meta(ge=1, le=30)] = 15.0  # for a receiver to answer
    disable_after_days: Annotated[float, Meta(gt=0, le=365)] = 5.0  # without one successful delivery
    retention_days: Annotated[float, Meta(ge=1, le=3650)] = 30.0  # of events and their deliveries


class ImagesConfig(Section, frozen=True):
    fetch: bool = True  # images behind https: URLs
    allowed_networks: tuple[str, ...] = ()  # private ranges from which images may be fetched, e.g. 10.0.0.0/8
    fetch_timeout_s: Annotated[float, Meta(gt=0, le=120)] = 10.0  # of one URL, redirects included
    max_images: Annotated[int, Meta(ge=1, le=1000)] = 100  # of one request
    max_bytes: Annotated[int, Meta(ge=1024, le=256 << 20)] = 20 << 20  # of one image file
    max_pixels: Annotated[int, Meta(ge=1024, le=200_000_000)] = 50_000_000  # of one image
    cache_bytes: Annotated[int, Meta(ge=0)] = 256 << 20  # of decoded images, in each HTTP process


class PredictorsConfig(Section, frozen=True):
    """Models that users bring along: who may push them, and what their first setup may fetch."""

    # Which keys may push over HTTP: none, operators', or all. A process that can write the data folder can always push.
    remote_push: Literal["off", "admins", "accounts"] = "off"
    max_bytes: Annotated[int, Meta(ge=1 << 20)] = 64 << 30  # that all pushed models may take, when one is pushed so
    account_bytes: Annotated[int, Meta(ge=1 << 20)] = 4 << 30  # that the models of one account may take on disk
    account_memory_bytes: Annotated[int, Meta(ge=1 << 20)] = 2 << 30  # that a model of an account may ask for
    account_cpus: Annotated[float, Meta(gt=0)] = 1.0  # that a model of an account may ask for
    fetch_hosts: tuple[str, ...] = ()  # from which `setup` may fetch when it is pushed, e.g. huggingface.co
    allowed_networks: tuple[str, ...] = ()  # private ranges that those hosts may be in, e.g. 10.0.0.0/8
    max_fetched_bytes: Annotated[int, Meta(ge=1 << 20)] = 64 << 30  # by one push
    image_registries: tuple[str, ...] = ()  # from which images may be pulled, e.g. ghcr.io/me; else none is pulled


class TracingConfig(Section, frozen=True):
    """Settings of tracing. The standard OTEL_* variables supply those that are not set."""

    endpoint: str = ""  # of an OTLP/HTTP collector, e.g. http://localhost:4318; empty: no tracing
    sample_ratio: Annotated[float, Meta(ge=0, le=1)] | None = None  # of the traces that begin here; None: all
    content: bool | None = None  # prompts and replies in the spans


class LogConfig(Section, frozen=True):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "text", "json"] = "auto"  # auto: text on a terminal, JSON otherwise
    max_bytes: Count = 64 << 20  # of the log files in the data folder; 0: none are written


class EndpointConfig(Section, frozen=True, kw_only=True):
    """One `[[endpoints]]` table: an OpenAI-compatible server, or an Emberline worker on another machine."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    url: str  # http://host:port; of an Emberline worker tcp://host:port or unix:/path
    role: Literal["both", "prefill", "decode"] = "both"
    kind: Literal["emberline", "vllm", "sglang", "openai"] = "openai"
    models: tuple[str, ...] = ()  # that it serves; empty: ask /v1/models
    key: str | None = None  # API key or join token to send; also EMBERLINE_ENDPOINTS_<NAME>_KEY
    transfer: Literal["", "nixl", "mooncake", "bootstrap", "store"] = ""  # of KV between two endpoints
    bootstrap: str = ""  # host:port of a prefill server's bootstrap service
    kv_events: str = ""  # tcp://host:5557
    kv_replay: str = ""  # tcp://host:5558
    tokenizer: str = ""  # the model's file or folder; needed to use KV events
    max_running: Count = 0  # requests it computes at once; 0: unknown
    context_len: Count = 0  # 0: as it reports

    def __repr__(self) -> str:
        return f"EndpointConfig(name={self.name!r}, url={self.url!r}, key={'set' if self.key else None})"


class ProviderConfig(Section, frozen=True, kw_only=True):
    """One `[[providers]]` table: a provider whose models are asked for as `name/model`."""

    name: Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9._-]{0,31}$")]
    kind: Literal["", "openai", "vllm", "sglang", "anthropic", "gemini", "any-llm"] = ""  # empty: as the name tells
    provider: str = ""  # of kind any-llm: as that package calls it; empty: the name
    url: str = ""  # of its API; empty: as the name tells
    key: str | None = None  # also EMBERLINE_PROVIDERS_<NAME>_KEY
    key_env: str = ""  # the environment variable with the key
    models: tuple[str, ...] = ()  # to be listed, without the provider's name; any other can be used too
    max_running: Count = 0  # requests at once; 0: 1024
    timeout_s: Annotated[float, Meta(gt=0, le=3600)] = 600.0  # without a byte of the reply

    def __repr__(self) -> str:
        return f"ProviderConfig(name={self.name!r}, url={self.url!r}, key={'set' if self.key else None})"


class PriceConfig(PriceFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One `[[prices]]` table: what a model costs, in any currency, as long as it is the same everywhere."""

    model: Annotated[str, Meta(min_length=1, max_length=256)]


class GatewayConfig(GatewaySettings, frozen=True):
    """One `[[gateways]]` table: settings of a gateway, of one account or, without an account, for all of them."""


class Config(Section, frozen=True, kw_only=True):
    home: Path
    endpoints: tuple[EndpointConfig, ...] = ()
    providers: tuple[ProviderConfig, ...] = ()
    gateways: tuple[GatewayConfig, ...] = ()
    aliases: dict[str, dict[str, int]] = {}  # other names of models: the models that each stands for, by weight
    prices: dict[str, Price] = {}  # by model, in lower case
    server: ServerConfig = ServerConfig()
    client: ClientConfig = ClientConfig()
    auth: AuthConfig = AuthConfig()
    engine: EngineConfig = EngineConfig()
    kv: KVConfig = KVConfig()
    models: ModelsConfig = ModelsConfig()
    store: StoreConfig = StoreConfig()
    cluster: ClusterConfig = ClusterConfig()
    queue: QueueConfig = QueueConfig()
    accounts: AccountsConfig = AccountsConfig()
    responses: ResponsesConfig = ResponsesConfig()
    webhooks: WebhooksConfig = WebhooksConfig()
    images: ImagesConfig = ImagesConfig()
    predictors: PredictorsConfig = PredictorsConfig()
    tracing: TracingConfig = TracingConfig()
    log: LogConfig = LogConfig()


_SECTIONS: dict[str, type[Section]] = {
    field.name: field.type
    for field in msgspec.structs.fields(Config)
    if field.name not in ("home", "endpoints", "providers", "gateways", "aliases", "prices")
}
_SHORT_NAMES = {
    "EMBERLINE_PORT": ("server", "port"),
    "EMBERLINE_URL": ("client", "url"),
    "EMBERLINE_KEY": ("client", "key"),
}
_STORES = ("postgresql://", "postgres://", "sqlite:///")
_SECRETS = (("auth", "key"), ("client", "key"), ("store", "url"), ("kv", "key"))  # values that no error message shows
_FLAGS = {  # where a flag is not the key's name
    "models": "argument MODEL",
    "allowed_hosts": "flag --allowed-host",
    "cors_origins": "flag --cors-origin",
    "level": "flag --log-level",
    "store": "flag --kv-store",
    "key": "flag --api-key",
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)

# A value and where it was set, by (section, key).
_Values = dict[tuple[str, str], tuple[Any, str]]


def resolve(
    flags: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None, home: Path | None = None
) -> Config:
    """The configuration of this process. `flags` maps "section.key" to the command line's value, None if not given."""
    environ = os.environ if environ is None else environ
    home = home_dir(environ) if home is None else home.expanduser().absolute()
    path = home / FILE_NAME
    document = _document(path)
    endpoints = _endpoints(document.pop("endpoints", []), path, environ)
    providers = _providers(document.pop("providers", []), path, environ)
    gateways = _gateways(document.pop("gateways", []), path)
    aliases = _aliases(document.pop("aliases", {}), path)
    prices = _prices(document.pop("prices", []), path)
    values = {**_from_file(document, path), **_from_environment(environ)}
    for name, value in (flags or {}).items():
        if value is not None:
            section, _, key = name.partition(".")
            values[section, key] = (value, _FLAGS.get(key, f"flag --{key.replace('_', '-')}"))
    assert {section for section, _ in values} <= set(_SECTIONS)
    sections: dict[str, Any] = {name: _section(name, values) for name in _SECTIONS}
    listed: dict[str, Any] = {"endpoints": endpoints, "providers": providers, "gateways": gateways, "prices": prices}
    config = Config(home=home, aliases=aliases, **listed, **sections)
    _check(config)
    return config


def home_dir(environ: Mapping[str, str]) -> Path:
    """The data folder: EMBERLINE_HOME, or `.emberline` in the user's home."""
    chosen = environ.get("EMBERLINE_HOME")
    return Path(chosen).expanduser().absolute() if chosen else Path.home() / ".emberline"


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def parse_size(text: str) -> int:
    """Bytes in "2G", "512 MiB" or "1000000"; K, M, G and T are powers of 1024."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size such as 2G or 512M")
    return int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " "))


def needs_keys(config: Config) -> bool:
    """True if every request needs an API key."""
    chosen, host = config.server.auth, config.server.host
    return chosen == "keys" or (chosen == "auto" and bool(config.auth.key)) or not is_loopback(host)


def check_exposure(config: Config) -> None:
    """Refuses to listen beyond loopback unless keys protect the server; called before a socket is bound."""
    key, host, chosen = config.auth.key, config.server.host, config.server.auth
    if chosen == "none" and key:
        raise ConfigError(
            "an admin key is set, but --auth none asks for no keys: drop one of the two", param="auth.key"
        )
    if is_loopback(host):
        return
    if chosen == "none":
        raise ConfigError(
            f"refusing to listen on {host} without keys: anyone who can reach this machine could use it. "
            "Use --auth keys",
            param="server.auth",
        )
    if (key and len(key) >= MIN_KEY_LEN) or (chosen == "keys" and not key):
        return
    what = f"an admin key of at least {MIN_KEY_LEN} characters" if key else "keys"
    raise ConfigError(
        f"refusing to listen on {host} without {what}: anyone who can reach this machine could use it.\n"
        "Either start with --auth keys, and create a key for each client:\n"
        "  emberline key create --account NAME\n"
        "or set an admin key, which may do everything, and start again:\n"
        "  export EMBERLINE_AUTH_KEY=$(python3 -c 'import secrets; print(secrets.token_urlsafe(32))')\n"
        f'or keep it in {config.home / FILE_NAME}:\n  [auth]\n  key = "…"\n'
        "Clients send a key as `Authorization: Bearer <key>`.",
        param="auth.key",
    )


def _document(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:  # invalid TOML or invalid UTF-8
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def _from_file(document: Mapping[str, Any], path: Path) -> _Values:
    values: _Values = {}
    for section, table in document.items():
        if section not in _SECTIONS:
            known = ", ".join((*_SECTIONS, "aliases", "endpoints", "gateways", "prices", "providers"))
            raise ConfigError(f"unknown section [{section}] in {path}; there are {known}", param=section)
        if not isinstance(table, dict):
            raise ConfigError(f"{section} in {path} must be a table: write [{section}]", param=section)
        values |= {(section, key): (value, str(path)) for key, value in table.items()}
    return values


def endpoint_key_variable(name: str) -> str:
    """The environment variable with the key of an endpoint."""
    return _key_variable("ENDPOINTS", name)


def _key_variable(section: str, name: str) -> str:
    return f"EMBERLINE_{section}_{re.sub('[^A-Z0-9]', '_', name.upper())}_KEY"


def _tables(name: str, kind: type[T], tables: Any, path: Path) -> list[T]:
    """The tables of a list of them, such as [[endpoints]]."""
    if not isinstance(tables, list):
        raise ConfigError(f"{name} in {path} is a list of tables: write [[{name}]]", param=name)
    found = list[T]()
    for number, table in enumerate(tables, 1):
        try:
            found.append(msgspec.convert(table, kind))
        except ValueError as error:
            raise ConfigError(f"[[{name}]] number {number} in {path}: {error}", param=name) from error
    return found


def _endpoints(tables: Any, path: Path, environ: Mapping[str, str]) -> tuple[EndpointConfig, ...]:
    found: dict[str, EndpointConfig] = {}
    for endpoint in _tables("endpoints", EndpointConfig, tables, path):
        if endpoint.name in found:
            raise ConfigError(f"two [[endpoints]] in {path} are named {endpoint.name!r}", param="endpoints")
        key = environ.get(endpoint_key_variable(endpoint.name), endpoint.key)
        if key and not is_header_safe(key):
            raise ConfigError(f"the key of endpoint {endpoint.name} must be printable ASCII without spaces")
        found[endpoint.name] = msgspec.structs.replace(endpoint, key=key)
    return tuple(found.values())


def _providers(tables: Any, path: Path, environ: Mapping[str, str]) -> tuple[ProviderConfig, ...]:
    found: dict[str, ProviderConfig] = {}
    for provider in _tables("providers", ProviderConfig, tables, path):
        name = provider.name
        if name in found:
            raise ConfigError(f"two [[providers]] in {path} are named {name!r}", param="providers")
        if provider.key and provider.key_env:
            raise ConfigError(f"provider {name}: give key or key_env, not both", param="providers")
        key = environ.get(provider.key_env) if provider.key_env else provider.key
        if provider.key_env and not key:
            message = f"provider {name}: the environment variable {provider.key_env}, its key_env, is not set"
            raise ConfigError(message, param="providers")
        key = environ.get(_key_variable("PROVIDERS", name), key)
        if key and not is_header_safe(key):
            raise ConfigError(f"the key of provider {name} must be printable ASCII without spaces", param="providers")
        found[name] = msgspec.structs.replace(provider, key=key)
    return tuple(found.values())


def _gateways(tables: Any, path: Path) -> tuple[GatewayConfig, ...]:
    found: dict[tuple[str, str], GatewayConfig] = {}
    for gateway in _tables("gateways", GatewayConfig, tables, path):
        if (gateway.account, gateway.name) in found:
            raise ConfigError(f"two [[gateways]] in {path} are named {gateway.name!r}", param="gateways")
        found[gateway.account, gateway.name] = gateway
    return tuple(found.values())


def _aliases(table: Any, path: Path) -> dict[str, dict[str, int]]:
    """`name = "model"`, or `name = { "model" = weight, … }`."""
    if not isinstance(table, dict):
        raise ConfigError(f"aliases in {path} must be a table: write [aliases]", param="aliases")
    targets = {name: {value: 1} if isinstance(value, str) else value for name, value in table.items()}
    try:
        return msgspec.convert(targets, dict[str, dict[str, Annotated[int, Meta(ge=1)]]])
    except msgspec.ValidationError as error:
        raise ConfigError(f"[aliases] in {path}: {error}", param="aliases") from error


def _prices(tables: Any, path: Path) -> dict[str, Price]:
    found: dict[str, Price] = {}
    for number, given in enumerate(_tables("prices", PriceConfig, tables, path), 1):
        try:
            price = given.price()
        except BadInput as error:
            raise ConfigError(f"[[prices]] number {number} in {path}: {error}", param="prices") from error
        if given.model.lower() in found:
            raise ConfigError(f"two [[prices]] in {path} are of {given.model!r}", param="prices")
        found[given.model.lower()] = price
    return found


def _from_environment(environ: Mapping[str, str]) -> _Values:
    values: _Values = {}
    for name in sorted(environ):  # EMBERLINE_PORT sorts before EMBERLINE_SERVER_PORT, which therefore wins
        prefix, _, rest = name.partition("_")
        section, _, key = rest.lower().partition("_")
        if name in _SHORT_NAMES:
            section, key = _SHORT_NAMES[name]
        elif prefix != "EMBERLINE" or section not in _SECTIONS or not key:
            continue
        values[section, key] = (environ[name], f"environment variable {name}")
    return values


def _section(section: str, values: _Values) -> Section:
    """One section from its values, each converted by itself so that an error names exactly one key and its source."""
    kind = _SECTIONS[section]
    known = {field.name: field.type for field in msgspec.structs.fields(kind)}
    converted: dict[str, Any] = {}
    for (name, key), (value, source) in values.items():
        if name != section:
            continue
        if key not in known:
            raise ConfigError(
                f"unknown key {key!r} in [{section}] ({source}); there are {', '.join(known)}", param=f"{section}.{key}"
            )
        try:
            converted[key] = msgspec.convert(_parse_text(key, value, known[key]), known[key], strict=False)
        except ValueError as error:
            shown = "" if (section, key) in _SECRETS else f" {value!r}"
            choices = get_args(known[key]) if get_origin(known[key]) is Literal else ()
            reason = f"there are {', '.join(choices)}" if choices else str(error)
            raise ConfigError(
                f"bad value{shown} for {key} in [{section}] ({source}): {reason}", param=f"{section}.{key}"
            ) from error
    return kind(**converted)


def _parse_text(key: str, value: Any, kind: Any) -> Any:
    """Sizes and lists written as text in the environment or a flag; msgspec converts numbers and booleans."""
    if not isinstance(value, str):
        return value
    if key.endswith("_bytes"):
        return parse_size(value)
    if get_origin(kind) is dict:
        return msgspec.json.decode(value)
    if get_origin(kind) is tuple:
        return [word.strip() for word in value.split(",") if word.strip()]
    return value


def _check(config: Config) -> None:
    """The rules that a type cannot express."""
    if config.auth.key is not None and not is_header_safe(config.auth.key):
        raise ConfigError("the key in [auth] must be printable ASCII without spaces", param="auth.key")
    if config.kv.key is not None and re.fullmatch("[0-9a-fA-F]{64}", config.kv.key) is None:
        raise ConfigError("the key in [kv] must be 64 hexadecimal digits, as of `openssl rand -hex 32`", param="kv.key")
    ranges = (("webhooks", "allowed_networks"), ("accounts", "provider_networks"))
    for section, key in ranges:
        for network in getattr(getattr(config, section), key):
            try:
                ipaddress.ip_network(network)
            except ValueError as error:
                message = f"[{section}] {key}: {network!r} is not a range: {error}"
                raise ConfigError(message, param=f"{section}.{key}") from None
    taken = {endpoint.name for endpoint in config.endpoints} & {provider.name for provider in config.providers}
    if taken:
        message = f"an endpoint and a provider are both named {min(taken)}: give one another name"
        raise ConfigError(message, param="providers")
    if config.store.url and not config.store.url.startswith(_STORES):
        raise ConfigError(f"[store] url must begin with {' or '.join(_STORES)}", param="store.url")


def is_header_safe(key: str) -> bool:
    return bool(key) and key.isascii() and key.isprintable() and " " not in key
