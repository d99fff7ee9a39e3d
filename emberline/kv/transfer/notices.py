"""The interface between the step loop and the transfer threads: commands in, notices out. No call blocks.

A thread owns each connection and its socket (`sender.Sender`, `receiver.Receiver`). The step loop owns the blocks, the
transfer epochs and the quarantine (engine/transfer). A rank's own notices have the number of a part instead of a
sequence's, and that of a connection as the peer; `group_transfers.py` makes those of whole transfers of them.
"""

from collections.abc import Sequence

import msgspec

from emberline.kv.transfer.messages import Item, Offer


class OfferGranted(msgspec.Struct, frozen=True, tag=True):
    number: int  # of the sequence
    wanted: list[set[int]]  # per group: the blocks that the receiver lacks


class BlocksReleased(msgspec.Struct, frozen=True, tag=True):
    """The sender does not read these blocks any more, whether they were delivered or not."""

    number: int
    items: Sequence[Item]


class SendAcked(msgspec.Struct, frozen=True, tag=True):
    number: int


class SendRejected(msgspec.Struct, frozen=True, tag=True):
    number: int
    message: str


class OfferReceived(msgspec.Struct, frozen=True, tag=True):
    peer: int  # a number, not the name: two engines may have one name
    offer: Offer


class BlocksReceived(msgspec.Struct, frozen=True, tag=True):
    epoch: int
    items: Sequence[Item]


class LeaseRenewed(msgspec.Struct, frozen=True, tag=True):
    """No block was received, but the sender is alive and computes."""

    epoch: int


class SenderGaveUp(msgspec.Struct, frozen=True, tag=True):
    """The sender writes no more, and has not written all."""

    peer: int
    transfer: str
    epoch: int  # which the receiver has ended, so that nothing is accepted under it; 0: none was granted yet
    message: str


class EpochReleased(msgspec.Struct, frozen=True, tag=True):
    """The blocks of a revoked epoch are not written any more."""

    epoch: int
    peer: int = 0


class SenderLost(msgspec.Struct, frozen=True, tag=True):
    """A sender's connection is lost: it writes nothing any more."""

    peer: int
    message: str


SenderNotice = OfferGranted | BlocksReleased | SendAcked | SendRejected
ReceiverNotice = OfferReceived | BlocksReceived | LeaseRenewed | SenderGaveUp | EpochReleased | SenderLost
Notice = SenderNotice | ReceiverNotice
