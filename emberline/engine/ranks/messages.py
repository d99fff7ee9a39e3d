"""Messages between ranks beside the collectives: joining a group, and what a step computes.

    follower                              rank 0
    Join(rank, token, facts)   ─────────▶
                               ◀─────────    Welcome, or Refused with both sides' values
    Loaded(kv, n_blocks)       ─────────▶            its weights have their memory: so many blocks are left
                               ◀─────────    Agreed(n_blocks): the smallest of all ranks
    Ready                      ─────────▶
                               ◀═════════    Launch, SampleStep, Prepare, End: in the plan channel, alike for all
    StepResult, RankFailed     ─────────▶
    KVReport                   ─────────▶

Everything is plain data (msgpack): no rank runs code that another one sends.
"""

from typing import Any

import msgspec

from emberline.engine.core.plan import Columns, StepPlan
from emberline.kv.retention import Conversation
from emberline.kv.tiers.orders import TierOrder, TierReport
from emberline.kv.transfer.notices import Notice
from emberline.kv.transfer.orders import TransferOrder
from emberline.protocol.block_hash import KVGroup
from emberline.protocol.parallel_layout import Layout


class RankFacts(msgspec.Struct, frozen=True):
    """Settings that must be the same in every rank of a group."""

    version: str  # of Emberline
    torch: str
    fingerprint: str  # of the checkpoint
    layout: Layout
    bounds: tuple[int, ...]  # of the stages, by layer
    device: str  # the kind: "cpu" or a GPU's name
    deterministic: bool
    max_running: int
    token_budget: int
    kv_host_bytes: int = 0  # of all ranks; rank 0 orders what their tiers keep
    kv_disk_bytes: int = 0

    def differences(self, other: "RankFacts") -> list[str]:
        """In words, the other's values first."""
        named = {field: (getattr(other, field), getattr(self, field)) for field in self.__struct_fields__}
        named["layout"] = (other.layout.name, self.layout.name)
        return [f"{name} {theirs} there, {ours} here" for name, (theirs, ours) in named.items() if theirs != ours]


class Join(msgspec.Struct, tag="join"):
    rank: int
    token: str
    facts: RankFacts


class Loaded(msgspec.Struct, tag="loaded"):
    kv: tuple[str, ...]  # name and dtype of each KV group, which must be the same everywhere
    n_blocks: list[int]  # per group: for how many this rank has memory
    slices: tuple[KVGroup, ...] = ()  # what it has of each block
    address: str = ""  # where it receives KV of other engines; empty: it does not


class Ready(msgspec.Struct, tag="ready"):
    pass


class StepResult(msgspec.Struct, tag="result"):
    """Tokens that the last stage has sampled."""

    number: int  # of the step
    sampled: list[tuple[int, float | None, list[tuple[int, float]]]]  # token id, log-probability, the most likely ones
    drafts: list[bytes] = []  # what a draft head or model proposes after each row that samples


class KVReport(msgspec.Struct, tag="kv"):
    """Progress of this rank's part of transfers, and of its slices in tiers."""

    transfers: list[Notice] = []
    tiers: list[TierReport] = []


class RankFailed(msgspec.Struct, tag="failed"):
    """The sending rank cannot go on, and so the group cannot."""

    message: str


ToLeader = Join | Loaded | Ready | StepResult | KVReport | RankFailed


class Welcome(msgspec.Struct, tag="welcome"):
    store: str  # where the collectives of the group meet: file:PATH or tcp:HOST:PORT
    n_descriptors: int = 0  # 1: the plan channel is the shared memory that comes with this; 0: this connection


class Refused(msgspec.Struct, tag="refused"):
    message: str


class Agreed(msgspec.Struct, tag="agreed"):
    n_blocks: list[int]
    slices: tuple[tuple[KVGroup, ...], ...] = ()  # of every rank
    token: str = ""  # the worker's join token, of which tickets for senders of KV are made
    pem: str = ""  # its certificates in a cluster, with which each rank sends and receives KV; empty: no TLS


ToFollower = Welcome | Refused | Agreed


class Launch(msgspec.Struct, tag="launch", array_like=True):
    plan: StepPlan


ORDERS: dict[str, Any] = {"tiers": list[TierOrder], "transfers": list[TransferOrder]}  # types by feature


def orders_of(plan: StepPlan) -> dict[str, list[Any]]:
    """The orders of a plan that was decoded, in their own types."""
    return {feature: msgspec.convert(orders, ORDERS[feature]) for feature, orders in plan.orders.items()}


class SampleStep(msgspec.Struct, tag="sample", array_like=True):
    """Behind a plan whose rows wait for masks: what their grammars allow."""

    rows: list[int]  # as in `plan.Masks`
    bits: bytes  # u32 LE


class Prepare(msgspec.Struct, tag="prepare", array_like=True):
    """Prepare the next kind of step: compile its kernels, capture its CUDA graph."""


class End(msgspec.Struct, tag="end", array_like=True):
    """The group ends in good order."""


StepMessage = Launch | SampleStep | Prepare | End


def _encode(value: Any) -> Any:
    """Turn the columns of a plan into plain data, and a conversation, which means nothing elsewhere, into null."""
    assert isinstance(value, Columns | Conversation), f"{type(value).__name__} is no plain data"
    return value.encode() if isinstance(value, Columns) else None


def _decode(kind: type, value: Any) -> Any:
    """Turn plain data back into the columns of a plan, the only values that msgspec cannot decode."""
    assert kind is Columns
    return Columns.decode(value)


to_leader = msgspec.msgpack.Decoder(ToLeader)
to_follower = msgspec.msgpack.Decoder(ToFollower)
step_messages = msgspec.msgpack.Decoder(StepMessage, dec_hook=_decode)
encoder = msgspec.msgpack.Encoder(enc_hook=_encode)
