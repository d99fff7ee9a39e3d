"""What two engines say to each other on the connection over which one pushes KV to the other.

    prefill                                   decode
    Hello(peer), token          ─────────▶            the engine's ordinary greeting
                                ◀─────────    Welcome
    Open(way)                   ─────────▶
                                ◀─────────    Opened, or Denied
    Offer(transfer, ...)        ─────────▶
                                ◀─────────    Grant(transfer, epoch, blocks), or Denied
    Data, bytes (TCP alone)     ─────────▶
    Landed(epoch, items)        ─────────▶
    Alive(epochs)               ─────────▶            every other second: these are still computed
                                ◀─────────    Received(epoch): all of it is there
    Failed(epoch)               ─────────▶            nothing more will be written
                                ◀─────────    Revoke(epoch): write no more
    Revoked(epoch)              ─────────▶            nothing more will be written

An item is a pair (KV group, which of the prompt's blocks).
"""

import struct

import msgspec

MAX_MESSAGE_BYTES = 16 << 20
LENGTH = struct.Struct("<I")

Item = tuple[int, int]


class Open(msgspec.Struct, tag="open"):
    way: str  # one of the names in EngineInfo.transfers
    host: str = ""  # names the machine and its boot; some ways do not lead to another


class Opened(msgspec.Struct, tag="opened"):
    handles: list[bytes] = []  # what the way needs to reach the blocks, per group
    n_descriptors: int = 0  # that came with this message


class Offer(msgspec.Struct, tag="offer", frozen=True):
    transfer: str
    fingerprint: str  # of the weights
    tags: tuple[str, ...]  # of the KV groups: where bytes lie in a block
    block_bytes: tuple[int, ...]  # of each group
    n_blocks: int  # of the prompt, in every group that sees everything


class Grant(msgspec.Struct, tag="grant"):
    transfer: str
    epoch: int
    blocks: list[dict[int, int]]  # per group: which of the prompt's blocks are lacking, and where they go


class Denied(msgspec.Struct, tag="denied"):
    transfer: str  # empty: of the whole connection
    message: str


class Data(msgspec.Struct, tag="data"):
    """Followed by the items' bytes, in this order."""

    epoch: int
    items: list[Item]


class Landed(msgspec.Struct, tag="landed"):
    epoch: int
    items: list[Item]


class Alive(msgspec.Struct, tag="alive"):
    epochs: list[int]


class Received(msgspec.Struct, tag="received"):
    epoch: int


class Failed(msgspec.Struct, tag="failed"):
    transfer: str
    message: str
    epoch: int = 0  # 0: it was never granted


class Revoke(msgspec.Struct, tag="revoke"):
    epoch: int


class Revoked(msgspec.Struct, tag="revoked"):
    epoch: int


ToDecode = Open | Offer | Data | Landed | Alive | Failed | Revoked
ToPrefill = Opened | Grant | Denied | Received | Revoke

to_decode = msgspec.msgpack.Decoder(ToDecode)
to_prefill = msgspec.msgpack.Decoder(ToPrefill)
