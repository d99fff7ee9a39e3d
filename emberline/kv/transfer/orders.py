"""Orders to every rank about transfers: plain data that travels with the plans of steps.

A transfer has parts: what one rank of the sender has of the blocks of one rank of the receiver. Between two engines of
one rank each there is one part, of whole blocks.
"""

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from emberline.kv.slices import SliceMismatch, Slices, routes
from emberline.kv.transfer.messages import Denied, Grant, Item, Revoke
from emberline.protocol.request import Push

Peers = dict[int, list[int]]  # by rank of this group: numbers of connections there


class _Order(msgspec.Struct, array_like=True):
    urgent: ClassVar[bool] = True


class SenderOrder(_Order):
    number: int  # of the sequence
    push: Push


class OfferParts(SenderOrder, tag="offer"):
    """Each rank offers what it has to those ranks of the receiver that need it."""

    n_blocks: int
    key: bytes


class SendParts(SenderOrder, tag="send"):
    """Each rank sends its slices of blocks."""

    blocks: list[tuple[Item, int]]


class CancelParts(SenderOrder, tag="cancel"):
    """Each rank ends what it sends of a sequence."""

    message: str


class TellSenders(_Order, tag="tell"):
    """Each rank tells senders that are connected to it whether, and until when, they may write."""

    peers: Peers
    message: Grant | Denied | Revoke


TransferOrder = OfferParts | SendParts | CancelParts | TellSenders


def parts(push: Push, ranks: tuple[Slices, ...]) -> Sequence[tuple[int, int]]:
    """Return the pairs (rank of ours, rank of the receiver) that send and receive.

    Raises SliceMismatch if the receiver's ranks cannot have all that they need.
    """
    if push.ranks:
        return routes(ranks, tuple(endpoint.kv_groups for endpoint in push.ranks))
    if len(ranks) > 1:
        raise SliceMismatch("the request does not say which slices of each block the decode engine has")
    return ((0, 0),)
