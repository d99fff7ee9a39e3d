"""Storage of a rank's BF16 weights in a GPU's memory, plain or losslessly packed: `--weights plain|compressed|auto`.

Packed weights take about a quarter less memory, which becomes room for KV, and few sequences decode faster from them.
`auto` packs them where the KV cache would otherwise be too small for the sequences that the limits allow, and on Hopper
GPUs where the limits allow no more sequences than decode faster.
"""

import logging
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from emberline.engine.core.limits import Limits
from emberline.protocol.block_hash import bytes_per_token

if TYPE_CHECKING:
    from emberline.models.shard import Shard
    from emberline.weights.outline import TensorSource

EXPECTED_TOKENS = 4096  # of a sequence, prompt and reply: what `emberline plan` assumes of a prompt
FASTER_SEQUENCES = 8  # up to so many decode faster from packed weights, measured on an H200
FASTER_GPUS = ("H100", "H200")  # as plans name them
GIB = 1 << 30

WeightStorage = Literal["plain", "compressed", "auto"]
STORAGES = ("plain", "compressed", "auto")

_log = logging.getLogger(__name__)


class Choice(NamedTuple):
    """The chosen storage form, and the reason."""

    compress: bool
    reason: str


class Room(NamedTuple):
    """Bytes of a rank's GPU, with plain and with packed weights."""

    plain: int  # weights
    packed: int
    kv: int  # for KV with plain weights; below 0 where not even they fit
    wanted: int  # for KV
    few: int = 0  # the most sequences of a step, if they decode faster from packed weights; else 0


def few_sequences(limits: Limits, is_hopper: bool) -> int:
    """The value of `Room.few`."""
    return limits.max_running if is_hopper and limits.max_running <= FASTER_SEQUENCES else 0


def choose(asked: WeightStorage, room: Room) -> Choice:
    """Decide for a rank whose GPU has kernels for packed weights."""
    saved = room.plain - room.packed
    if saved <= 0:
        return Choice(False, "the checkpoint has no BF16 matrix that becomes smaller")
    if asked == "compressed":
        return Choice(True, f"asked for: {saved / GIB:.1f} GiB are saved")
    if room.few:
        return Choice(True, f"up to {room.few} sequences decode faster from them: {saved / GIB:.1f} GiB are saved")
    has, wanted = f"{max(0, room.kv) / GIB:.1f} GiB", f"{room.wanted / GIB:.1f} GiB"
    if room.kv >= room.wanted:
        return Choice(False, f"plain weights leave {has} for KV, and {wanted} are wanted")
    return Choice(True, f"plain weights leave {has} for KV, and {wanted} are wanted: {saved / GIB:.1f} GiB are saved")


def wanted_kv_bytes(model: Any, limits: Limits, kv_bytes: int | None) -> int:
    """Bytes of KV that were asked for, or that all sequences of the limits need at the expected length."""
    if kv_bytes is not None:
        return kv_bytes
    expected = min(limits.context_len, EXPECTED_TOKENS)
    return int(bytes_per_token(model.kv_groups) * limits.max_running * expected)


def choose_on_device(
    asked: WeightStorage,
    source: "TensorSource",
    shard: "Shard | None",
    device: str,
    limits: Limits,
    kv_bytes: int | None,
    memory_share: float,
) -> bool:
    """Decide for a rank of this process, and log the choice. Other devices than GPUs hold their weights in formats of
    their own: there the choice is plain."""
    if asked == "plain" or not device.startswith("cuda"):
        if asked != "plain":
            _log.info("weights: plain, for %s has no kernels for packed ones", device)
        return False
    import torch

    free, total = torch.cuda.mem_get_info(device)
    is_hopper = torch.cuda.get_device_capability(device) == (9, 0)
    choice = choose(asked, room_of(source, shard, limits, total, free, kv_bytes, memory_share, is_hopper))
    _log.info("weights: %s, because %s", "compressed" if choice.compress else "plain", choice.reason)
    return choice.compress


def room_of(
    source: "TensorSource",
    shard: "Shard | None",
    limits: Limits,
    total: int,
    free: int,
    kv_bytes: int | None,
    memory_share: float,
    is_hopper: bool,
) -> Room:
    """Count a rank's weights in both forms, by laying its model out without memory."""
    from emberline.engine.runners.gpu.rank_memory import StepMemory, bound_context, weight_bytes
    from emberline.models.registry import lay_out

    plain, packed = (lay_out(source, shard=shard, compress=compress) for compress in (False, True))
    n_plain, n_packed = weight_bytes(plain), weight_bytes(packed)
    step = StepMemory.of(plain, bound_context(limits, plain, max(0, free - n_plain)), speculates=True)
    room = int(memory_share * total) - (total - free) - n_plain - step.total
    return Room(n_plain, n_packed, room, wanted_kv_bytes(plain, limits, kv_bytes), few_sequences(limits, is_hopper))
