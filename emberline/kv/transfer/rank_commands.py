"""What rank 0 tells the other ranks of its group about transfers of KV: plain data, in the order of the steps."""

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


class SendParts(msgspec.Struct, tag="send", array_like=True):
    number: int
    push: Push
    blocks: list[tuple[Item, int]]


class CancelParts(msgspec.Struct, tag="cancel", array_like=True):
    number: int
    push: Push
    message: str


class GrantParts(msgspec.Struct, tag="grant", array_like=True):
    peers: Peers
    transfer: str
    epoch: int
    blocks: list[dict[int, int]]


class DenyParts(msgspec.Struct, tag="deny", array_like=True):
    peers: Peers
    transfer: str
    message: str


class RevokeParts(msgspec.Struct, tag="revoke", array_like=True):
    peers: Peers
    epoch: int


TransferCommand = OfferParts | SendParts | CancelParts | GrantParts | DenyParts | RevokeParts


def part_number(number: int, receiver: int) -> int:
    """Of a sequence's transfer to one rank of the receiver: below 0, where no transfer of whole blocks has a number."""
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


def execute(manager: TransferManager, command: TransferCommand, rank: int, ranks: tuple[Slices, ...]) -> None:
    """A rank's part of a command. `ranks`: the slices of its group."""
    if isinstance(command, OfferParts):
        for to in targets(command.push, ranks, rank):
            endpoint = command.push.ranks[to]
            address = dialed(endpoint.address, command.push.address)
            push = msgspec.structs.replace(command.push, address=address, ranks=())
            number = part_number(command.number, to)
            manager.offer_part(number, push, command.n_blocks, command.key, rank, ranks, endpoint.kv_groups)
    elif isinstance(command, SendParts):
        for to in targets(command.push, ranks, rank):
            TransferManager.send(manager, part_number(command.number, to), command.blocks)
    elif isinstance(command, CancelParts):
        for to in targets(command.push, ranks, rank):
            TransferManager.cancel(manager, part_number(command.number, to), command.message)
    else:
        for peer in command.peers.get(rank, ()):
            if isinstance(command, GrantParts):
                TransferManager.grant(manager, peer, command.transfer, command.epoch, command.blocks)
            elif isinstance(command, DenyParts):
                TransferManager.deny(manager, peer, command.transfer, command.message)
            else:
                TransferManager.revoke(manager, peer, command.epoch)
