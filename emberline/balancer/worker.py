"""One endpoint as the balancer sees it: what it was given, what it says, how fast it is, whether it is well."""

import math
from hashlib import blake2b
from typing import TYPE_CHECKING

from emberline.balancer.circuit_breaker import CircuitBreaker
from emberline.balancer.cost_model import Cost, SpeedEstimate
from emberline.balancer.endpoint import Capacity, Endpoint
from emberline.balancer.ledger import Account
from emberline.balancer.load_reports import LoadReports
from emberline.protocol.block_hash import BLOCK_TOKENS
from emberline.protocol.frames import EngineLoad

if TYPE_CHECKING:
    from emberline.balancer.admission_queue import QueuedRequest

STALLED_S = 30.0  # work but no report for so long: tokens do not move
RECENT_S = 120.0  # over which prompts count as recent
DEFAULT_KV_TOKENS = 1 << 20  # where an endpoint does not say
RELAX_S = 30.0  # without a first token, after which its pace is less and less believed
KV_FULL = 0.95  # of the tokens: more streams would push each other out
_MASK64 = (1 << 64) - 1


class Worker:
    __slots__ = (
        "account",
        "bits",
        "breaker",
        "busy_s",
        "capacity",
        "connected",
        "cost",
        "decode_pace",
        "draining",
        "endpoint",
        "first_s",
        "hash64",
        "heard_s",
        "held",
        "incarnation",
        "mean_s",
        "old_slot",
        "prefill_pace",
        "problem",
        "recent_at_s",
        "recent_tokens",
        "slot",
        "stalled",
        "witness",
    )

    def __init__(self, endpoint: Endpoint, capacity: Capacity, cost: Cost, slot: int) -> None:
        self.endpoint = endpoint
        self.capacity = capacity
        self.cost = cost
        self.slot = slot  # in the index
        self.old_slot: int | None = None  # of one that publishes no events: what it was given some minutes ago
        self.bits = 1 << slot  # of both
        self.account = Account()
        self.witness = LoadReports()
        self.breaker = CircuitBreaker()
        self.prefill_pace = SpeedEstimate()
        self.decode_pace = SpeedEstimate()
        self.connected = True
        self.draining = False
        self.stalled = False
        self.problem = ""  # why it is not connected
        self.incarnation = 0
        self.held: set[QueuedRequest] = set()  # tickets that wait for it
        self.heard_s: float | None = None  # its last report, believed or not
        self.busy_s = 0.0  # when work last arrived at the idle endpoint
        self.first_s = 0.0  # when a prompt was last done
        self.mean_s = 1.0  # smoothed time that a request takes
        self.recent_tokens = 0.0
        self.recent_at_s = 0.0
        self.hash64 = int.from_bytes(blake2b(endpoint.name.encode(), digest_size=8).digest(), "little")

    @property
    def name(self) -> str:
        return self.endpoint.name

    def move(self, slot: int, old_slot: int | None) -> None:
        self.slot, self.old_slot = slot, old_slot
        self.bits = 1 << slot | (0 if old_slot is None else 1 << old_slot)

    @property
    def ready(self) -> bool:
        return self.connected and not self.draining and not self.stalled and self.breaker.allows

    @property
    def state(self) -> str:
        if not self.connected:
            return "down"
        if self.draining or self.stalled:
            return "draining" if self.draining else "stalled"
        return "ready" if self.breaker.state == "closed" else self.breaker.state

    def look(self, now_s: float) -> bool:
        """Time passes. Whether that changes anything about its health."""
        before = self.ready
        self.breaker.look(now_s)
        busy = self.account.active > 0 or bool(self.account.pending)
        last_s = max(self.busy_s, self.first_s, self.heard_s or 0.0)
        # One that never reports is not stuck for all we know.
        self.stalled = self.heard_s is not None and busy and now_s - last_s > STALLED_S
        return self.ready != before

    def wait_s(self, now_s: float) -> float:
        """Until the prompts that are there now are computed."""
        account, witness = self.account, self.witness
        if not account.work_us and not witness.foreign_tokens:
            return 0.0
        own_s = account.work_us * 1e-6
        if witness.done_tokens and account.prefill_tokens:
            own_s *= max(0.0, 1 - witness.done_tokens / account.prefill_tokens)
        scale = self.prefill_pace.scale
        return own_s * scale + witness.foreign_s(now_s, scale * self.cost.token_s)

    def active(self, now_s: float, passes_flex: bool = False) -> int:
        """Sequences that do not make room: ours, and those of other cores."""
        account = self.account
        return account.sync_active - account.flex_active * passes_flex + self.witness.foreign_active(now_s)

    def slot_wait_s(self, n: int, tokens: int, now_s: float, passes_flex: bool = False) -> float:
        """Until there is a place among the running."""
        capacity = self.capacity
        over = self.active(now_s, passes_flex) + n - capacity.max_running
        if over <= 0 and self.has_memory(tokens, now_s):
            return 0.0
        return self.mean_s * max(1, over) / capacity.max_running

    def fits(self, n: int, tokens: int, now_s: float, passes_flex: bool = False, spare: int = 0) -> bool:
        """Whether it has a place, and memory, for `n` more sequences, `spare` beyond those it runs at once."""
        active = self.active(now_s, passes_flex)
        if active + n > self.capacity.max_running + spare:
            return active == 0
        return not self.account.active or self.has_memory(tokens, now_s)

    def has_memory(self, tokens: int, now_s: float) -> bool:
        """By its own count, where there is one: streams may share much of their KV. And what it has not begun yet."""
        account, kv_tokens = self.account, self.capacity.kv_tokens
        if not kv_tokens or account.decode_tokens + tokens <= KV_FULL * kv_tokens:
            return True
        if not self.witness.is_fresh(now_s) or not self.witness.load.kv_total_blocks:
            return False
        used = self.witness.load.kv_used_blocks * BLOCK_TOKENS + account.prefill_tokens
        return used + tokens <= KV_FULL * kv_tokens

    @property
    def streams_step_s(self) -> float:
        """What the streams that are there make a step longer by."""
        account, cost = self.account, self.cost
        return (cost.stream_s * account.active + cost.context_s * account.decode_tokens) * self.decode_pace.scale

    def queues(self, now_s: float) -> bool:
        """Whether a request would stand behind others there; an engine may have a queue while places are free."""
        load = self.witness.load
        fresh = self.witness.foreign_active(now_s) or self.account.sync_active
        return bool(fresh) and load.waiting > load.waiting_batch

    def relax(self, prefill_scale: float, decode_scale: float, now_s: float) -> None:
        """While it shows no pace of its own, it is taken to be as fast as others of its model."""
        if self.prefill_pace.n == 0 or now_s - self.first_s > RELAX_S:
            self.prefill_pace.relax(prefill_scale)
            self.decode_pace.relax(decode_scale)

    def learn_step(self, before: EngineLoad, load: EngineLoad, elapsed_s: float) -> None:
        """The pace of steps, from two reports with work between them."""
        n_steps = load.steps - before.steps
        if n_steps > 0 and 0 < elapsed_s < 2.0 and before.running and load.running:
            tokens = load.kv_used_blocks * BLOCK_TOKENS
            self.decode_pace.add(elapsed_s / n_steps, self.cost.decode_step_s(load.running, tokens))

    def given(self, tokens: int, now_s: float) -> None:
        if self.account.active == 0 and not self.account.pending:
            self.busy_s = now_s
        self.recent_tokens = self.recent(now_s) + tokens
        self.recent_at_s = now_s

    def recent(self, now_s: float) -> float:
        """Prompt tokens of the last minutes, cached or not."""
        return self.recent_tokens * math.exp((self.recent_at_s - now_s) / RECENT_S)

    def crowd(self, now_s: float) -> float:
        """How often its memory was asked for of late: how many conversations live here, by their weight."""
        return self.recent(now_s) / (self.capacity.kv_tokens or DEFAULT_KV_TOKENS)

    def weight(self, session64: int) -> int:
        """For rendezvous hashing: every core finds the same order."""
        mixed = ((session64 ^ self.hash64) * 0x9E3779B97F4A7C15) & _MASK64
        mixed ^= mixed >> 32
        return (mixed * 0xD6E8FEB86659FD93) & _MASK64
