"""What the threads that move KV tell the step loop, and what it may ask of them. Plain data; nobody waits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from emberline.kv.transfer.messages import Item, Offer
from emberline.protocol.request import Push

# --- of pushes: this engine computes and sends ----------------------------------------------------------------------


@dataclass(slots=True, frozen=True)
class Granted:
    number: int  # of the sequence
    wanted: list[set[int]]  # per group: the blocks that the other side lacks


@dataclass(slots=True, frozen=True)
class Sent:
    """These blocks are not read any more, whether they arrived or not."""

    number: int
    items: Sequence[Item]


@dataclass(slots=True, frozen=True)
class Delivered:
    number: int


@dataclass(slots=True, frozen=True)
class Rejected:
    number: int
    message: str


# --- of arrivals: this engine owns the blocks and receives ----------------------------------------------------------


@dataclass(slots=True, frozen=True)
class Offered:
    peer: int  # the connection, not the name: two engines may have one name
    offer: Offer


@dataclass(slots=True, frozen=True)
class Arrived:
    epoch: int
    items: Sequence[Item]


@dataclass(slots=True, frozen=True)
class Renewed:
    """Nothing has come of it, but its sender lives and works on it."""

    epoch: int


@dataclass(slots=True, frozen=True)
class GivenUp:
    """The other side will write no more, and has not written all."""

    peer: int
    transfer: str
    epoch: int  # 0: it was never granted
    message: str


@dataclass(slots=True, frozen=True)
class Released:
    """What was revoked is not written any more."""

    epoch: int


@dataclass(slots=True, frozen=True)
class PeerLost:
    """Nothing will be written by it any more."""

    peer: int
    message: str


Notice = Granted | Sent | Delivered | Rejected | Offered | Arrived | Renewed | GivenUp | Released | PeerLost


class Transfers(Protocol):
    """How the step loop reaches the threads. No call blocks; answers come as notices."""

    def notices(self) -> list[Notice]: ...

    def offer(self, number: int, push: Push, n_blocks: int) -> None: ...

    def send(self, number: int, items: Sequence[tuple[Item, int]]) -> None:
        """Each with the block of ours that holds it: read until `Sent` names it."""

    def cancel(self, number: int, message: str) -> None:
        """Whatever is still to be sent is not; each item is named by a `Sent` all the same."""

    def grant(self, peer: int, transfer: str, epoch: int, blocks: list[dict[int, int]]) -> None: ...

    def deny(self, peer: int, transfer: str, message: str) -> None: ...

    def revoke(self, peer: int, epoch: int) -> None:
        """Answered by `Released`, or by `PeerLost`."""
