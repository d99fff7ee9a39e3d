"""The stand-in's KV: the bytes of a full block say which content they are, so that wrong ones are noticed."""

from dataclasses import dataclass

from emberline.engine.plan import Admission, Row
from emberline.kv.transfer.memory import HostMemory
from emberline.protocol import blockhash
from emberline.protocol.layout import BLOCK_TOKENS


class WrongKV(Exception):
    """A block that was to be read does not hold what it should."""


@dataclass(slots=True)
class _Slot:
    root: bytes
    ids: bytearray
    table: list[int]
    keys: list[bytes]
    fresh: bool = True  # what it was admitted with is still to be checked


class Stamps:
    """Follows the slots' tables; stamps what is computed, and checks what comes from the cache or from elsewhere."""

    def __init__(self, fingerprint: str, memory: HostMemory) -> None:
        self._fingerprint = fingerprint
        self._memory = memory
        self._slots: dict[int, _Slot] = {}

    def admit(self, admission: Admission) -> None:
        request = admission.request
        self._slots[admission.slot] = _Slot(
            blockhash.root(self._fingerprint, request.salt),
            bytearray(request.prompt_ids + admission.output_ids),
            list(admission.blocks[0]),
            [],
        )

    def compute(self, row: Row) -> None:
        slot = self._slots[row.slot]
        slot.table += row.blocks[0] if row.blocks is not None else []
        slot.ids[4 * row.start : 4 * row.end] = row.token_ids
        if row.end // BLOCK_TOKENS > len(slot.keys):
            blockhash.extend(slot.keys, slot.root, bytes(slot.ids[: 4 * row.end]))
        if slot.fresh:
            slot.fresh = False
            for j in range(row.start // BLOCK_TOKENS):
                if not self.holds(slot.table[j], slot.keys[j]):
                    raise WrongKV(f"block {j} of a prompt holds something else")
        for j in range(row.start // BLOCK_TOKENS, row.end // BLOCK_TOKENS):
            self._memory.block(0, slot.table[j])[:] = self._stamp(slot.keys[j])

    def holds(self, block: int, key: bytes) -> bool:
        return self._memory.block(0, block) == self._stamp(key)

    def _stamp(self, key: bytes) -> bytes:
        return stamp(key, self._memory.block_bytes[0])


def stamp(key: bytes, n_bytes: int) -> bytes:
    """What a full block with this content key holds."""
    return key * (n_bytes // len(key))
