"""Orders to every rank about transfers in parts: plain data that travels with the plans of steps."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import msgspec

from emberline.kv.slices import Slices, routes
from emberline.kv.transfer.manager import TransferManager
from emberline.kv.transfer.messages import Item
from emberline.protocol.parallel_layout import MAX_RANKS
from emberline.protocol.request import Push

_EVERY_INTERFACE = ("0.0.0.0", "[::]", "::")

Peers = dict[int, list[int]]  # by rank of this group: numbers of connections there


class OfferParts(msgspec.Struct, tag="offer", array_like=True):
    """Each rank offers what it has to those ranks of the receiver that need it."""

    number: int  # of the sequence
    push: Push
    n_blocks: int
    key: bytes
    urgent: ClassVar[bool] = True


class SendParts(msgspec.Struct, tag="send", array_like=True):
    number: int
    push: Push
    blocks: list[tuple[Item, int]]
    urgent: ClassVar[bool] = True


class CancelParts(msgspec.Struct, tag="cancel", array_like=True):
    number: int
    push: Push
    message: str
    urgent: ClassVar[bool] = True


class GrantParts(msgspec.Struct, tag="grant", array_like=True):
    peers: Peers
    transfer: str
    epoch: int
    blocks: list[dict[int, int]]
    urgent: ClassVar[bool] = True


class DenyParts(msgspec.Struct, tag="deny", array_like=True):
    peers: Peers
    transfer: str
    message: str
    urgent: ClassVar[bool] = True


class RevokeParts(msgspec.Struct, tag="revoke", array_like=True):
    peers: Peers
    epoch: int
    urgent: ClassVar[bool] = True


TransferOrder = OfferParts | SendParts | CancelParts | GrantParts | DenyParts | RevokeParts


def part_number(number: int, receiver: int) -> int:
    """Number of a sequence's transfer to one rank of the receiver: below 0, unlike those of whole blocks."""
    return -(number * MAX_RANKS + receiver) - 1


def sequence_and_rank(part: int) -> tuple[int, int]:
    return divmod(-part - 1, MAX_RANKS)


def targets(push: Push, ranks: tuple[Slices, ...], rank: int) -> list[int]:
    """The receiver's ranks that one of ours sends to. SliceMismatch: they cannot have all that they need."""
    return [to for sender, to in routes(ranks, receivers(push)) if sender == rank]


def receivers(push: Push) -> tuple[Slices, ...]:
    return tuple(endpoint.kv_groups for endpoint in push.ranks)


def dialed(address: str, worker: str) -> str:
    """Where a rank of the worker at this address is reached. One that listens on every interface is on its machine."""
    host, _, port = address.removeprefix("tcp:").rpartition(":")
    if host in _EVERY_INTERFACE and worker.startswith("tcp:"):
        return f"{worker.rpartition(':')[0]}:{port}"
    return address or worker


class TransferExecutor:
    """Does one rank's part of orders. ranks: slices of every rank of its group. lock: held meanwhile."""

    def __init__(
        self,
        manager: TransferManager,
        rank: int,
        ranks: tuple[Slices, ...],
        lock: AbstractContextManager[Any] | None = None,
    ) -> None:
        self._manager, self._rank, self._ranks = manager, rank, ranks
        self._lock = lock or nullcontext()

    def execute(self, orders: Sequence[TransferOrder]) -> None:
        """Begin what is ordered."""
        with self._lock:
            for order in orders:
                self._execute(order)

    def _execute(self, order: TransferOrder) -> None:
        manager, rank, ranks = self._manager, self._rank, self._ranks
        if isinstance(order, OfferParts):
            for to in targets(order.push, ranks, rank):
                endpoint = order.push.ranks[to]
                address = dialed(endpoint.address, order.push.address)
                push = msgspec.structs.replace(order.push, address=address, ranks=())
                number = part_number(order.number, to)
                manager.offer_part(number, push, order.n_blocks, order.key, rank, ranks, endpoint.kv_groups)
        elif isinstance(order, SendParts):
            for to in targets(order.push, ranks, rank):
                TransferManager.send(manager, part_number(order.number, to), order.blocks)
        elif isinstance(order, CancelParts):
            for to in targets(order.push, ranks, rank):
                TransferManager.cancel(manager, part_number(order.number, to), order.message)
        else:
            for peer in order.peers.get(rank, ()):
                if isinstance(order, GrantParts):
                    TransferManager.grant(manager, peer, order.transfer, order.epoch, order.blocks)
                elif isinstance(order, DenyParts):
                    TransferManager.deny(manager, peer, order.transfer, order.message)
                else:
                    TransferManager.revoke(manager, peer, order.epoch)
