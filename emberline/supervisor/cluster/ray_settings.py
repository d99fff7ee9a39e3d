"""Settings with which our Ray nodes start: credential, environment and command line.

Ray places and supervises; it sees no requests, prompts or KV. Token authentication and TLS with certificates on both
sides are on, the dashboard, Ray Client, usage statistics and the memory monitor are off. The head keeps its state in
RocksDB, so one that comes back finds the same actors, and nodes wait for it.
"""

import base64
import binascii
import hashlib
import importlib.metadata
import json
import os
import re
import socket
import ssl
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from emberline.protocol.credential import read_private
from emberline.protocol.errors import BadInput, Unavailable
from emberline.supervisor.process import inherited_environment

OBJECT_STORE_BYTES = 80_000_000  # nothing of ours is put there
HEALTH_PERIOD_S, HEALTH_TIMEOUT_S = 1.0, 1.0
HEALTH_FAILURES = 3  # after so many, a node is dead, and what it held is placed elsewhere
HEAD_ABSENCE_S = 30 * 24 * 3600  # that nodes wait for the head, while their workers serve
CPU_RESOURCE = "emberline_cpu"  # of a machine without GPUs: one for each rank
GPU_LABEL, REGION_LABEL = "emberline.gpu", "emberline.region"
ADDRESS_VARIABLE, REGION_VARIABLE = "EMBERLINE_NODE_ADDRESS", "EMBERLINE_NODE_REGION"
PORTS_VARIABLE = "EMBERLINE_NODE_PORTS"
RAY_VERSION = "2.60"

_BLOCK = re.compile(r"-----BEGIN EMBERLINE NODE-----\s*([A-Za-z0-9+/=\s]+)-----END EMBERLINE NODE-----")
_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----\n?", re.DOTALL)
_PRIVATE_KEY = re.compile(r"-----BEGIN PRIVATE KEY-----.*?-----END PRIVATE KEY-----\n?", re.DOTALL)


class _Identity(msgspec.Struct, frozen=True):
    address: str
    cluster: str
    token: str


class NodeCredential(msgspec.Struct, frozen=True, kw_only=True):
    """Credential of a machine that becomes a node: the token of the cluster's Ray, and a certificate for the machine's
    address. Anyone who has it can run code on all nodes."""

    address: str
    cluster: str  # id of the cluster
    token: str
    pem: str  # private key, certificate, and the authority's certificate

    def __repr__(self) -> str:
        return f"NodeCredential(address={self.address!r}, cluster={self.cluster!r}, token=…)"

    def encode(self) -> str:
        identity = msgspec.json.encode(_Identity(self.address, self.cluster, self.token))
        body = base64.encodebytes(identity).decode()
        return f"-----BEGIN EMBERLINE NODE-----\n{body}-----END EMBERLINE NODE-----\n{self.pem}"

    @classmethod
    def parse(cls, text: str) -> "NodeCredential":
        try:
            found = _BLOCK.search(text)
            identity = msgspec.json.decode(base64.b64decode(found[1] if found else ""), type=_Identity)
        except (binascii.Error, msgspec.MsgspecError):
            raise BadInput(
                "this is no credential of a node: make one with `emberline cluster credential --node ADDRESS`"
            ) from None
        pem = _BLOCK.sub("", text).strip()
        if len(_CERTIFICATE.findall(pem)) != 2 or not _PRIVATE_KEY.search(pem):
            raise BadInput("this credential of a node has no certificates: make a new one")
        return cls(address=identity.address, cluster=identity.cluster, token=identity.token, pem=pem)

    @classmethod
    def open(cls, path: Path) -> "NodeCredential":
        return cls.parse(read_private(path))


class NodeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One Ray node of this machine."""

    address: str  # of this machine
    head: str  # of the head's machine
    port: int  # of the head
    is_head: bool = False  # it has no GPUs: replicas run on a node beside it, which survives it
    n_gpus: int = 0
    cpu_replicas: int = 0
    gpu: str = ""  # kind
    region: str = ""
    first_port: int = 7100  # for workers
    last_port: int = 7199
    folder: Path  # for credentials, state and logs; only this user may enter
    health_failures: int = HEALTH_FAILURES

    @property
    def name(self) -> str:
        return "head" if self.is_head else "node"

    @property
    def kind(self) -> str:
        """Kind of device that replicas use on this node, as a NodeOffer names it."""
        return (self.gpu or "cuda") if self.n_gpus else "cpu"

    @property
    def token_file(self) -> Path:
        return self.folder / "token"

    @property
    def state_folder(self) -> Path:
        return self.folder / "head-state"

    @property
    def temp_folder(self) -> Path:
        """Only this user may enter. Short enough for Ray's sockets; the head on the same machine has another one."""
        digest = hashlib.blake2b(f"{self.folder.absolute()}/{self.name}".encode(), digest_size=5).hexdigest()
        return Path(f"/tmp/ember-ray-{os.getuid()}-{digest}")

    @property
    def session_folder(self) -> Path:
        """Ray opens this one to all users: hence the folder around it."""
        return self.temp_folder / "t"


def write_credential(credential: NodeCredential, folder: Path) -> None:
    """Write the credential as the files that Ray reads, readable by this user alone."""
    make_private(folder)
    own, authority = _CERTIFICATE.findall(credential.pem)
    key = _PRIVATE_KEY.search(credential.pem)
    assert key is not None
    for name, text in (("token", credential.token), ("node.key", key[0]), ("node.pem", own), ("ca.pem", authority)):
        path = folder / name
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)


def make_private(folder: Path) -> None:
    """BadInput: the folder exists, and is another user's or open to others."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if {found.st_uid, folder.lstat().st_uid} != {os.getuid()}:  # nor a link that another user has put there
        raise BadInput(f"{folder} belongs to another user: remove it, or run this as that user")
    if found.st_mode & 0o077:
        raise BadInput(f"{folder} is open to others (mode {found.st_mode & 0o777:o}): run chmod 700 {folder}")


def ray_environment(node: NodeSettings, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment of every process of this node, and of drivers on its machine. Raises BadInput if others
    can read the token."""
    if not read_private(node.token_file).strip():
        raise BadInput(f"{node.token_file} is empty: run `emberline cluster up` again")
    inherited = {name: value for name, value in inherited_environment(environ).items() if not name.startswith("RAY_")}
    settings = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(node.token_file),
        "RAY_USE_TLS": "1",
        "RAY_TLS_SERVER_CERT": str(node.folder / "node.pem"),
        "RAY_TLS_SERVER_KEY": str(node.folder / "node.key"),
        "RAY_TLS_CA_CERT": str(node.folder / "ca.pem"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_health_check_period_ms": str(round(HEALTH_PERIOD_S * 1000)),
        "RAY_health_check_timeout_ms": str(round(HEALTH_TIMEOUT_S * 1000)),
        "RAY_health_check_failure_threshold": str(node.health_failures),
        "RAY_gcs_rpc_server_reconnect_timeout_s": str(HEAD_ABSENCE_S),
        ADDRESS_VARIABLE: node.address,
        REGION_VARIABLE: node.region,
        PORTS_VARIABLE: f"{node.first_port}-{node.last_port}",
    }
    if node.is_head:
        settings |= {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(node.state_folder)}
    return {**inherited, **settings}


def ray_command(node: NodeSettings) -> list[str]:
    """Return the command of a node. It runs until it gets a signal or one of the node's own processes ends, and then
    ends them all."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", f"--node-ip-address={node.address}"]
    if node.is_head:
        command += ["--head", f"--port={node.port}", "--include-dashboard=false", "--no-monitor"]
        command += ["--disable-usage-stats"]
    else:
        command.append(f"--address={host_port(node.head, node.port)}")
        labels = {GPU_LABEL: node.kind, REGION_LABEL: node.region}
        command.append("--labels=" + ",".join(f"{name}={value}" for name, value in labels.items() if value))
    resources = {CPU_RESOURCE: node.cpu_replicas} if node.cpu_replicas and not node.n_gpus else {}
    return [
        *command,
        "--num-cpus=0",  # Ray's own unit, which we do not use
        f"--num-gpus={node.n_gpus}",
        f"--resources={json.dumps(resources)}",
        f"--object-store-memory={OBJECT_STORE_BYTES}",
        f"--temp-dir={node.session_folder}",
        "--include-log-monitor=false",
    ]


def tls_context(folder: Path) -> ssl.SSLContext:
    """Return the TLS context of a client of Ray with this machine's certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    try:
        context.load_verify_locations(str(folder / "ca.pem"))
        context.load_cert_chain(str(folder / "node.pem"), str(folder / "node.key"))
    except (OSError, ssl.SSLError) as error:
        raise BadInput(f"the certificates in {folder} cannot be used: {error}") from None
    return context


def check_ray() -> None:
    """Unavailable: it is not installed, or another version than was tried."""
    try:
        version = importlib.metadata.version("ray")  # without importing it, which changes this process
    except importlib.metadata.PackageNotFoundError:
        raise Unavailable("a cluster with Ray needs the package ray: pip install 'emberline[ray]'") from None
    if not version.startswith(f"{RAY_VERSION}."):
        raise Unavailable(f"Ray {version} is installed, and {RAY_VERSION} is needed, the same on all machines")


def own_address(towards: str) -> str:
    """The address of this machine on the way to another one. BadInput: there is no way."""
    try:
        family, kind, _, _, to = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(to)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise BadInput(f"no address of this machine towards {towards} ({error}): give --address") from None


def is_own(host: str) -> bool:
    """True if `host` is an address of this machine."""
    try:
        family, kind, _, _, to = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(to)
    except OSError:
        return False
    return True


def host_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def gpu_kind(drivers: Path = Path("/proc/driver/nvidia/gpus")) -> str:
    """Return the driver's name of this machine's GPUs, such as h200; empty if there are none, or if the name is not
    known."""
    for path in sorted(drivers.glob("*/information")):
        found = re.search(r"^Model:\s*(.+)$", path.read_text(errors="replace"), re.MULTILINE)
        if found:
            words = re.sub(r"[^a-z0-9]+", "-", found[1].lower().replace("nvidia", "")).strip("-")
            return words[:63]
    return ""
