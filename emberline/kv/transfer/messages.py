"""The wire messages between two engines, on the connection over which one sends KV to the other.

    sender (prefill)                          receiver (decode)
    Hello(peer), ticket         ─────────▶            the engine's ordinary greeting
                                ◀─────────    Welcome
    OpenTransport               ─────────▶
                                ◀─────────    TransportOpened, or Denied
    Offer(transfer, ...)        ─────────▶
                                ◀─────────    Grant(transfer, epoch, blocks), or Denied
    BlockData, bytes (TCP only) ─────────▶
    BlocksWritten(epoch, items) ─────────▶
    KeepAlive(epochs)           ─────────▶            every other second: these are still being computed
                                ◀─────────    Ack(epoch): all blocks are there
    SendFailed(transfer)        ─────────▶            nothing more will be written
                                ◀─────────    Revoke(epoch): stop writing
    RevokeAck(epoch)            ─────────▶            nothing more will be written

An item is a pair (KV group, index of the block in the prompt).
"""

import msgspec

from emberline.protocol.block_hash import KVGroup

Item = tuple[int, int]


class OpenTransport(msgspec.Struct, tag="open"):
    name: str = msgspec.field(name="way")  # one of EngineInfo.transfers
    host: str = ""  # `transport.host_id` of the sender; some transports work on one machine only


class TransportOpened(msgspec.Struct, tag="opened"):
    handles: list[bytes] = []  # what the transport needs to reach the blocks, per group
    n_descriptors: int = 0  # file descriptors that came with this message
    probe: bytes = b""  # of pools on a device: what lies behind the blocks of each (0.1 has none)


class Offer(msgspec.Struct, tag="offer", frozen=True):
    transfer: str
    fingerprint: str  # of the weights
    tags: tuple[str, ...]  # layout tags of the KV groups
    block_bytes: tuple[int, ...]  # of each group
    n_blocks: int  # of the prompt, in every group without a window
    key: bytes  # content key of the last of them, and so of all: the end of the chain
    rank: int = 0  # of the sender, in its group
    ranks: tuple[tuple[KVGroup, ...], ...] = ()  # what each rank of the sender's group has; empty: whole blocks, of one


class Grant(msgspec.Struct, tag="grant"):
    transfer: str
    epoch: int
    blocks: list[dict[int, int]]  # per group: which blocks of the prompt the receiver lacks, and where they go


class Denied(msgspec.Struct, tag="denied"):
    transfer: str  # empty: the whole connection
    message: str


class BlockData(msgspec.Struct, tag="data"):
    """Followed by the bytes of the items, in this order."""

    epoch: int
    items: list[Item]


class BlocksWritten(msgspec.Struct, tag="landed"):
    epoch: int
    items: list[Item]


class KeepAlive(msgspec.Struct, tag="alive"):
    epochs: list[int]


class Ack(msgspec.Struct, tag="received"):
    epoch: int


class SendFailed(msgspec.Struct, tag="failed"):
    transfer: str
    message: str


class Revoke(msgspec.Struct, tag="revoke"):
    epoch: int


class RevokeAck(msgspec.Struct, tag="revoked"):
    epoch: int


ToReceiver = OpenTransport | Offer | BlockData | BlocksWritten | KeepAlive | SendFailed | RevokeAck
ToSender = TransportOpened | Grant | Denied | Ack | Revoke

to_receiver = msgspec.msgpack.Decoder(ToReceiver)
to_sender = msgspec.msgpack.Decoder(ToSender)
