"""Implements `emberline cluster up` on one machine: its Ray nodes and, at the head, the replicas of the cluster file.

The head has no replicas of its own: a node runs beside it on its machine, so that workers survive the head.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Sequence
from pathlib import Path

from emberline.protocol.errors import BadInput, Conflict, EmberlineError, Unavailable
from emberline.supervisor import machine
from emberline.supervisor.cluster.cluster_file import HEAD_PORT, ClusterFile
from emberline.supervisor.cluster.launcher import LEFT, ReplicaOrder
from emberline.supervisor.cluster.ray_launcher import RayLauncher
from emberline.supervisor.cluster.ray_node import Record
from emberline.supervisor.cluster.ray_probe import check_guarded
from emberline.supervisor.cluster.ray_settings import NodeSettings, gpu_kind, is_own, own_address, tls_context

FOLDER = "ray"  # in the data folder
TEND_S = 2.0  # between two looks at the replicas
RETRY_S = 60.0  # after a replica could not be started
_ELSEWHERE = "192.0.2.1"  # reserved for documentation: on the way to all other machines
_LOOPBACK = ("127.0.0.1", "localhost", "::1")

log = logging.getLogger("emberline.cluster")


def split_address(text: str) -> tuple[str, int]:
    """HOST or HOST:PORT, of a head."""
    host, colon, port = text.rpartition(":")
    if not colon or (":" in host and not host.startswith("[")):
        return text.strip("[]"), HEAD_PORT
    if not port.isdigit() or not 0 < int(port) < 65536 or not host:
        raise BadInput(f"{text!r} is no address of a head: give HOST or HOST:PORT")
    return host.strip("[]"), int(port)


def address_of_machine(file: ClusterFile, head: str, given: str) -> str:
    """At which the other machines reach this one. `head`: to join; empty: this machine is to be the head."""
    address = given or (own_address(head) if head else file.head or own_address(_ELSEWHERE))
    if address in _LOOPBACK:
        raise BadInput(f"other machines cannot reach this one at {address}: give its address with --address")
    if not given and not head and file.head and not is_own(file.head):
        raise BadInput(
            f"the cluster file says that the head is {file.head}, which is not this machine: run `emberline cluster up "
            f"--join {file.head}` here, or give --address if this machine has that name"
        )
    return address


def node_settings(file: ClusterFile, folder: Path, address: str, join: tuple[str, int] | None) -> list[NodeSettings]:
    """The Ray nodes to start on this machine. BadInput: it has fewer GPUs than the file says."""
    head, port = join or (address, file.port)
    entry = file.node(address)
    found = len(machine.gpus())
    if entry.gpus is not None and entry.gpus > found:
        raise BadInput(
            f"the cluster file says that node {address} has {entry.gpus} GPUs, and this machine has {found}: correct "
            "its `gpus`, or leave it out to use all that there are; `emberline doctor` says which are found"
        )
    n_gpus = found if entry.gpus is None else entry.gpus
    cpu_replicas = machine.cores() if entry.cpu_replicas is None else entry.cpu_replicas
    node = NodeSettings(
        address=address,
        head=head,
        port=port,
        n_gpus=n_gpus,
        cpu_replicas=0 if n_gpus else cpu_replicas,
        gpu=(entry.gpu or gpu_kind()) if n_gpus else "",
        region=entry.region,
        first_port=file.ports.first,
        last_port=file.ports.last,
        folder=folder,
    )
    if join is not None:
        return [node]
    head_node = NodeSettings(address=address, head=head, port=port, is_head=True, folder=folder, region=entry.region)
    return [head_node, *([node] if node.n_gpus or node.cpu_replicas else [])]


def check_free(folder: Path) -> None:
    """Conflict: something that was started here still runs."""
    record = Record.read(folder)
    if record is not None and record.processes():
        raise Conflict("a Ray node of this data folder runs already: `emberline cluster down` ends it")


def check_head(settings: NodeSettings) -> None:
    """BadInput: a Ray listens where the head is to be, or the head to be joined answers without its token.
    Unavailable: there is no head to join."""
    secure = tls_context(settings.folder)
    if not settings.is_head:
        return check_guarded(settings.head, settings.port, secure)
    try:
        socket.create_connection((settings.address, settings.port), 1.0).close()
    except OSError:
        return
    with contextlib.suppress(Unavailable):
        check_guarded(settings.address, settings.port, secure)
    raise BadInput(
        f"something listens at {settings.address}:{settings.port} already: end it, or choose another `port` in the "
        "cluster file"
    )


async def tend(launcher: RayLauncher, orders: Sequence[ReplicaOrder], every_s: float = TEND_S) -> None:
    """Place the ordered replicas as soon as there is room for them, and let those run that Ray has placed. One that
    could not be started is tried again; one that has left is not. Runs until cancelled."""
    waiting = list(orders)
    problem = ""
    while True:
        try:
            waiting = await place(launcher, waiting)
            failed = {
                each.name
                for each in await launcher.placed()
                if each.state == "lost" and each.problem != LEFT and each.age_s >= RETRY_S
            }
            waiting += [order for order in orders if order.name in failed and order not in waiting]
            problem = ""
        except Exception as error:  # whatever it is, replicas that Ray has moved need their credentials
            text = error.message if isinstance(error, EmberlineError) else repr(error)
            if text != problem:
                problem = text
                log.warning("%s", problem)
        await asyncio.sleep(every_s)


async def place(launcher: RayLauncher, orders: Sequence[ReplicaOrder]) -> list[ReplicaOrder]:
    """Start the replicas, and return the orders for which there was no room."""
    left = []
    for at, order in enumerate(orders):
        try:
            await launcher.start(order)
        except Conflict:
            continue  # found again
        except Unavailable as error:
            log.info("replica %s waits: %s", order.name, error.message)
            left.append(order)
            if not launcher.is_connected:
                return [*left, *orders[at + 1 :]]
    return left
