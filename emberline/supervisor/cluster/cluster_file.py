"""The cluster file: which machines there are and which models run on them. `deploy/cluster.yaml` is one with comments.

Every key has a default: an empty file is a head on this machine, whatever nodes join it, and no models. A key that is
not known, a value out of range, and models that need more GPUs than the nodes have are refused by name.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from emberline.protocol.errors import BadInput, Unavailable
from emberline.protocol.frames import WorkerRole
from emberline.protocol.parallel_layout import Layout
from emberline.supervisor.cluster.launcher import CPU, ReplicaOrder

HEAD_PORT = 6379
CORE_PORT = 8686
MAX_REPLICAS = 1000

Host = Annotated[str, Meta(pattern=r"^[A-Za-z0-9.:_-]{0,253}$")]
Label = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{0,63}$")]
Port = Annotated[int, Meta(ge=1, le=65535)]
Count = Annotated[int, Meta(ge=0, le=MAX_REPLICAS)]
Ranks = Annotated[int, Meta(ge=1, le=64)]
_UNKNOWN = re.compile(r"unknown field `(?P<key>.*?)`(?: - at `\$\.?(?P<at>.*?)`)?$")


class _Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class PortRange(_Entry, frozen=True):
    """Ports of a machine that are open to cores and to other workers: one for each worker, more for groups of ranks."""

    first: Port = 7100
    last: Port = 7199


class NodeEntry(_Entry, frozen=True):
    address: Host  # at which the other machines reach it
    gpus: Count | None = None  # None: those that it has
    gpu: Label = ""  # their kind, e.g. h200; empty: what the driver calls them
    cpu_replicas: Count | None = None  # on a machine without GPUs; None: as many as it has cores
    region: Label = ""


class ModelEntry(_Entry, frozen=True):
    name: Annotated[str, Meta(min_length=1, max_length=256)]  # its id, as requests name it
    path: str = ""  # of the weights, the same on every node; empty: the model that cores have under this name
    replicas: Count | None = None  # that serve both stages; None: one, unless there are prefill and decode replicas
    prefill: Count = 0  # replicas, with prefill/decode disaggregation
    decode: Count = 0
    tp: Ranks = 1
    pp: Ranks = 1
    ep: bool = False
    dcp: Ranks = 1
    gpu: Label = ""  # kind, as nodes have it; cpu: on machines without one; empty: any
    region: Label = ""  # empty: any
    account: Annotated[str, Meta(max_length=256)] = ""  # that alone may use it

    @property
    def layout(self) -> Layout:
        return Layout(tp=self.tp, pp=self.pp, ep=self.ep, dcp=self.dcp)

    @property
    def counts(self) -> dict[WorkerRole, int]:
        """Replicas to start, by role."""
        both = (0 if self.prefill or self.decode else 1) if self.replicas is None else self.replicas
        counts: dict[WorkerRole, int] = {"both": both, "prefill": self.prefill, "decode": self.decode}
        return {role: n for role, n in counts.items() if n}

    @property
    def n_started(self) -> int:
        return sum(self.counts.values())

    @property
    def n_gpus(self) -> int:
        return self.n_started * self.layout.n_ranks


class ClusterFile(_Entry, frozen=True):
    head: Host = ""  # address of the head's machine; empty: this one's
    port: Port = HEAD_PORT  # of the head
    cores: tuple[str, ...] = ()  # URLs that workers announce themselves at; empty: a core on the head's machine
    ports: PortRange = PortRange()
    nodes: tuple[NodeEntry, ...] = ()  # empty: every node that joins is used as it is
    models: tuple[ModelEntry, ...] = ()

    def core_urls(self, head: str) -> tuple[str, ...]:
        host = f"[{head}]" if ":" in head else head
        return self.cores or (f"http://{host}:{CORE_PORT}",)

    def node(self, address: str) -> NodeEntry:
        """BadInput: the file lists nodes, and this is none of them."""
        for node in self.nodes:
            if node.address == address:
                return node
        if self.nodes and address != self.head:
            known = ", ".join(node.address for node in self.nodes)
            raise BadInput(f"the cluster file has no node {address} (it has {known}): add it, or give --address")
        return NodeEntry(address=address)

    def orders(self, paths: Mapping[str, Path]) -> list[ReplicaOrder]:
        """The replicas to start. `paths`: of the weights, for models without one in the file."""
        return [
            ReplicaOrder(
                name=f"{replica_prefix(model.name)}-{number if role == 'both' else f'{role}{number}'}",
                model=model.name,
                path=Path(model.path) if model.path else paths[model.name],
                role=role,
                gpu=model.gpu,
                region=model.region,
                account=model.account,
                layout=model.layout,
            )
            for model in self.models
            for role, n in model.counts.items()
            for number in range(n)
        ]


def replica_prefix(model: str) -> str:
    """The beginning of its replicas' names: the last part of a model's id, of characters that a member's name has."""
    words = re.split(r"[^a-z0-9_-]+", model.rstrip("/").rpartition("/")[2].lower())
    return "-".join(filter(None, words)).strip("-_")[:40] or "model"


def read_cluster_file(path: Path) -> ClusterFile:
    """BadInput: what is wrong with it, and where."""
    try:
        import yaml
    except ImportError:
        raise Unavailable("reading a cluster file needs the package pyyaml: pip install 'emberline[ray]'") from None
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    try:
        return parse_cluster_file(content)
    except BadInput as error:
        raise BadInput(f"{path}: {error.message}", param=error.param) from None


def parse_cluster_file(content: Any) -> ClusterFile:
    """BadInput names the key."""
    try:
        file = msgspec.convert({} if content is None else content, ClusterFile)
    except msgspec.ValidationError as error:
        raise BadInput(_readable(str(error))) from None
    _check_urls(file)
    _check_ports(file.ports)
    _check_nodes(file)
    for at, model in enumerate(file.models):
        _check_model(f"models[{at}]", model, file)
    _check_gpus(file)
    return file


def _readable(message: str) -> str:
    unknown = _UNKNOWN.search(message)
    if unknown is None:
        what, _, where = message.partition(" - at `$")
        key = where.rstrip("`").lstrip(".")
        return f"{key}: {what[:1].lower()}{what[1:]}" if key else f"{what[:1].lower()}{what[1:]}"
    at = unknown["at"] or ""
    kinds: dict[str, type[_Entry]] = {"nodes": NodeEntry, "models": ModelEntry, "ports": PortRange}
    kind = kinds.get(at.partition("[")[0], ClusterFile)
    known = ", ".join(kind.__struct_fields__)
    return f"{at}{'.' if at else ''}{unknown['key']} is no key of a cluster file; there are {known}"


def _check_urls(file: ClusterFile) -> None:
    for at, url in enumerate(file.cores):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BadInput(f"cores[{at}]: {url!r} is no URL of a core, such as http://10.0.0.1:{CORE_PORT}")


def _check_ports(ports: PortRange) -> None:
    if ports.last < ports.first:
        raise BadInput(f"ports: first is {ports.first} and last is {ports.last}: there is none between them")


def _check_nodes(file: ClusterFile) -> None:
    seen: set[str] = set()
    for at, node in enumerate(file.nodes):
        if not node.address:
            raise BadInput(f"nodes[{at}].address is empty")
        if node.address in seen:
            raise BadInput(f"nodes[{at}]: {node.address} is there twice")
        seen.add(node.address)


def _check_model(where: str, model: ModelEntry, file: ClusterFile) -> None:
    if bool(model.prefill) != bool(model.decode):
        raise BadInput(f"{where} ({model.name}): prefill/decode disaggregation needs both, prefill and decode replicas")
    if model.prefill and model.replicas:
        raise BadInput(f"{where} ({model.name}): give replicas, or prefill and decode, not both")
    prefix = replica_prefix(model.name)
    twin = next((each.name for each in file.models if replica_prefix(each.name) == prefix), model.name)
    if twin != model.name or sum(each.name == model.name for each in file.models) > 1:
        raise BadInput(f"{where} ({model.name}): its replicas would have the names of {twin}'s, {prefix}-0 and so on")
    try:
        model.layout.check()
    except BadInput as error:
        raise BadInput(f"{where} ({model.name}): {error.message}") from None
    regions = {node.region for node in file.nodes}
    if file.nodes and model.region and model.region not in regions:
        raise BadInput(f"{where} ({model.name}): no node is in region {model.region}")


def _check_gpus(file: ClusterFile) -> None:
    """Refuse a file whose models need more GPUs than it states. A number that only the machines know is checked when
    they start."""
    if not file.nodes or any(node.gpus is None for node in file.nodes):
        return
    taken = 0
    total = sum(node.gpus or 0 for node in file.nodes)
    for at, model in enumerate(file.models):
        if model.gpu == CPU or (not total and not model.gpu):
            continue
        fitting = [
            node
            for node in file.nodes
            if model.region in ("", node.region) and model.gpu in ("", node.gpu or model.gpu)
        ]
        exist = sum(node.gpus or 0 for node in fitting)
        free = min(exist, total - taken)
        if model.n_gpus > free:
            which = f" of kind {model.gpu}" if model.gpu else ""
            where = f" in region {model.region}" if model.region else ""
            rest = f", {free} of them left by the models before it" if free < exist else ""
            raise BadInput(
                f"models[{at}] ({model.name}) needs {model.n_gpus} GPUs{which}{where}, and the nodes have {exist}{rest}"
                ": lower its replicas or its layout, or add nodes"
            )
        taken += model.n_gpus
