"""A simulated engine worker: continuous batching, chunked prefill, a KV cache with prefix sharing and eviction.

It follows the real scheduler: decoding sequences first, then prefill in order of arrival within the prefill policy's
budget; a sequence that does not fit waits and none overtakes it; when memory runs out, the latest arrival is preempted.
Identical steps are fused into one event, which is exact as long as nothing else happens.
"""

from collections import deque
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import Protocol

from emberline.engine.core.step_times import MIN_RATED_TOKENS, smoothed
from emberline.kv.eviction_order import EvictionOrder
from emberline.kv.retention import Retention
from emberline.kv.tiers.fetch_policy import ComputeQueue
from emberline.protocol.block_hash import BLOCK_TOKENS
from emberline.protocol.frames import EngineLoad, WorkerRole
from emberline.simulator.coefficients import Coefficients, PrefillPolicy
from emberline.simulator.kv_cache import OnKVChange, OracleOrder, SimKVCache
from emberline.simulator.request import SimRequest, SimSequence
from emberline.simulator.tiers import RetentionName, Segment, SimFetch, SimTier, TierSpec, WorkerTiers, make_order
from emberline.simulator.virtual_clock import VirtualClock

MAX_FUSED_PREFILL_STEPS = 8  # with equal chunks of one prompt
REMEMBERED_FILLS = 4  # a cache of this size, filled so often since, has nothing left of an old request


class WorkerListener(Protocol):
    """Receives the events of a worker. `on_prefill` with 0 tokens: the sequence was admitted."""

    def on_prefill(self, worker: "SimWorker", seq: SimSequence, n_tokens: int) -> None: ...
    def on_first_token(self, worker: "SimWorker", seq: SimSequence) -> None: ...
    def on_finish(self, worker: "SimWorker", seq: SimSequence) -> None: ...
    def on_step(self, worker: "SimWorker", seconds: float, n_tokens: int) -> None: ...
    def on_change(self, worker: "SimWorker") -> None: ...


class SimWorker:
    def __init__(
        self,
        name: str,
        model: Coefficients,
        prefill_policy: PrefillPolicy,
        clock: VirtualClock,
        listener: WorkerListener,
        block_tokens: int,
        role: WorkerRole = "both",
        kv_changed: OnKVChange | None = None,
        retention: RetentionName = "learned",
        tiers: Sequence[TierSpec] = (),
        shared: Sequence[SimTier] = (),
    ) -> None:
        assert model.context_len <= model.kv_tokens, "the KV cache must hold one full context"
        self.name, self.role, self.model = name, role, model
        self.block_tokens = block_tokens
        capacity = model.kv_tokens // block_tokens
        self._kv_changed = kv_changed
        self._orders: list[EvictionOrder] = []
        self._retention_name: RetentionName = retention
        self._retention = None if retention == "lru" else Retention(sample=1)
        of_tiers: RetentionName = "oracle" if retention == "oracle" else "lru"
        own = [
            SimTier(spec, spec.tokens // block_tokens, clock, self._order(spec.tokens // block_tokens, of_tiers))
            for spec in tiers
        ]
        if own:  # the last one holds the most: the worker has what that one has
            own[-1].changed, self._kv_changed = kv_changed, None
        self.cache = self._empty_cache(capacity)
        self._tiers: WorkerTiers | None = None
        if own or shared:
            self._tiers = WorkerTiers([*own, *shared], name, block_tokens, model.kv_bytes, clock)
        self._prefill_rate = 0.0  # tokens per second in prefill-heavy steps, as the engine measures it
        self.busy_s = 0.0
        self.computed = self.cached = self.n_steps = self.n_preempted = self.n_output = 0
        self._prefill_policy, self._clock, self._listener = prefill_policy, clock, listener
        self._waiting: deque[SimSequence] = deque()
        self._prefilling: list[SimSequence] = []  # admitted, by arrival
        self._awaiting_kv: set[SimSequence] = set()  # admitted; their blocks are in transfer
        self._decoding: list[tuple[int, int, SimSequence]] = []  # heap: (step of the last token, rank, sequence)
        self._pending: dict[int, SimSequence] = {}  # segments being computed, by whom
        self._n_decoding = self._context = self._reply_tokens = 0  # context: tokens of all decoding sequences
        self._n_arrived = 0
        self._prefill_tokens = 0  # prompt tokens not yet computed, of all sequences
        self._chunks: list[tuple[SimSequence, int]] = []  # prefill of the running step
        self._is_running = False
        self._start_s = 0.0  # of the running step or fused steps
        self._n_fused = 0
        self._step_s = self._growth_s = 0.0  # duration of the first of them, and its increase per step
        self._event = 0  # id of the only completion event that is valid
        self._end_s = 0.0  # when it comes
        self._hung_s: float | None = None  # since when nothing moves

    def _order(self, n_blocks: int, name: RetentionName) -> EvictionOrder:
        order = make_order(name, n_blocks, self._retention or Retention())
        self._orders.append(order)
        return order

    def _empty_cache(self, capacity: int) -> SimKVCache:
        order = self._order(capacity, self._retention_name)
        return SimKVCache(capacity, self._kv_changed, order) if self._kv_changed else SimKVCache(capacity, order=order)

    @property
    def n_running(self) -> int:
        return len(self._prefilling) + len(self._awaiting_kv) + self._n_decoding

    @property
    def n_present(self) -> int:
        """Sequences, those that wait included."""
        return self.n_running + len(self._waiting)

    @property
    def is_empty(self) -> bool:
        return not self.n_present

    @property
    def is_hung(self) -> bool:
        return self._hung_s is not None

    def present(self, segment: int) -> int:
        """Blocks of the segment that its KV events tell of."""
        own = self._tiers.own if self._tiers is not None else ()
        return own[-1].present(segment) if own else self.cache.present(segment)

    def remember(self, request: SimRequest, superseded: Sequence[Segment], n_after: int) -> None:
        """Store what the worker would have stored by answering the request before the simulation began, with segments
        of earlier turns that the request no longer contains. After it came n_after blocks of other requests."""
        seq = SimSequence(request, 0, request.n_prompt, request.n_output)
        prompt = [*zip(request.path, request.lengths)]
        self._begin_turn(seq, self.cache.match(request.path, request.lengths)[0])
        if n_after < REMEMBERED_FILLS * self.cache.capacity:
            for segment, length in prompt:
                self.cache.reserve(length)
                self.cache.reserve(self.cache.publish(segment, length, held_before=False) - length)
            self.cache.release(request.path, len(request.path), seq.conversation)
        self._end_turn(seq)
        if self._tiers is not None:
            self._tiers.remember(superseded, None, n_after)
            self._tiers.remember(prompt, seq.conversation, n_after)

    def busy_at(self, now_s: float) -> float:
        """Seconds of computing up to now, including the running step."""
        return self.busy_s + (now_s - self._start_s if self._is_running else 0.0)

    def load(self) -> EngineLoad:
        scale = self.block_tokens // BLOCK_TOKENS
        return EngineLoad(
            running=self.n_running,
            waiting=len(self._waiting),
            waiting_tokens=self._prefill_tokens,
            kv_used_blocks=self.cache.n_used * scale,
            kv_total_blocks=self.cache.capacity * scale,
            steps=self.n_steps,
            prompt_tokens=self.computed,
            cached_tokens=self.cached,
            output_tokens=self.n_output,
            preemptions=self.n_preempted,
        )

    @property
    def prefill_rate(self) -> float:
        """Prefill rate as the engine reports it. 0 if not measured yet."""
        return self._prefill_rate

    def decode_rate(self, interval_s: float) -> float:
        """Output tokens per second at which a step without prefill takes that long, for contexts as long as those that
        decode now; 0: none does."""
        if not self._n_decoding:
            return 0.0
        model = self.model
        row_s = model.row_s + model.context_s * self._context / self._n_decoding
        rows = min((interval_s - model.step_s) / row_s, model.max_running)
        return max(0.0, rows / interval_s)

    def submit(self, request: SimRequest, n_output: int, awaits_kv: bool = False) -> SimSequence:
        """After a failover, `request.n_written` tokens of the reply are part of what is to be computed."""
        n_prompt = request.n_prompt + request.n_written
        seq = SimSequence(request, self._n_arrived, n_prompt, n_output, awaits_kv, written=request.n_written)
        self._n_arrived += 1
        self._waiting.append(seq)
        _, n_blocks = self.cache.match(request.path, request.lengths)
        seq.done = min(n_blocks * self.block_tokens, seq.n_prompt - 1)  # an estimate until it is admitted
        self._prefill_tokens += 0 if awaits_kv else seq.n_prompt - seq.done
        if self._hung_s is not None:
            return seq
        if not self._is_running:
            self._start_step()
        elif self._n_fused > 1 and (awaits_kv or not self._chunks):
            self._shorten()
        self._listener.on_change(self)
        return seq

    # --- faults ------------------------------------------------------------------------------------------------------

    def hang(self) -> None:
        """Nothing moves until `resume`; requests are still taken."""
        self._hung_s = self._clock.now_s
        self._event += 1

    def resume(self) -> None:
        assert self._hung_s is not None
        hung_s, self._hung_s = self._clock.now_s - self._hung_s, None
        if self._is_running:
            self._start_s += hung_s
            self._schedule_completion(self._end_s + hung_s)
        else:
            self._start_step()
        self._listener.on_change(self)

    def die(self) -> list[SimRequest]:
        """Lose all sequences and the cache: the requests that were here, in the order of their arrival."""
        sequences = [*self._waiting, *self._prefilling, *(seq for _, _, seq in self._decoding)]
        sequences.sort(key=lambda seq: seq.rank)
        for seq in sequences:
            decoded = self.n_steps - seq.decode_start_step if seq.decode_start_step >= 0 else 0
            seq.request.n_written = seq.written + decoded
        if self._is_running:
            self.busy_s += self._clock.now_s - self._start_s
        self._waiting.clear()
        self._prefilling, self._decoding, self._chunks = [], [], []
        self._pending.clear()
        self._n_decoding = self._context = self._reply_tokens = self._prefill_tokens = 0
        self._is_running, self._event = False, self._event + 1
        self.cache = self._empty_cache(self.cache.capacity)
        return [seq.request for seq in sequences]

    def kv_arrived(self, seq: SimSequence) -> None:
        """The KV transfer of the prompt's full blocks is complete; the remaining tokens are computed here."""
        self._arrived(seq, (seq.n_prompt - 1) // BLOCK_TOKENS * BLOCK_TOKENS)

    def _arrived(self, seq: SimSequence, n_tokens: int) -> None:
        """The KV of the first n_tokens of the prompt is there, from another worker or from tiers."""
        self._awaiting_kv.remove(seq)
        seq.done = max(seq.done, n_tokens)
        self._prefill_tokens += seq.n_prompt - seq.done
        self._publish(seq)
        self._prefilling.append(seq)
        self._prefilling.sort(key=lambda other: other.rank)
        if not self._is_running:
            self._start_step()
        elif self._n_fused > 1:
            self._shorten()

    # --- steps -------------------------------------------------------------------------------------------------------

    def _start_step(self) -> None:
        """Begin the next step, or several identical ones that nothing can interrupt."""
        chunks = self._plan() if self._prefilling or self._waiting else []
        n, model = self._n_decoding, self.model
        self._is_running = bool(chunks or n)
        if not self._is_running:
            return
        self._start_s, self._chunks, self._n_fused = self._clock.now_s, chunks, 1
        self._step_s = model.batch_s(n, self._context, [(k, seq.done) for seq, k in chunks])
        self._growth_s = model.context_s * n
        if not chunks:
            self._n_fused = self._steps_until_event()
        elif n and len(chunks) == 1:
            seq, k = chunks[0]
            self._growth_s += model.pair_s * k * k
            whole = (seq.n_prompt - seq.done - 1) // k  # other prompts may join the last chunk's step
            self._n_fused = max(1, min(MAX_FUSED_PREFILL_STEPS, whole, self._steps_until_event()))
        self._schedule_completion(self._start_s + self._steps_s(self._n_fused))

    def _schedule_completion(self, at_s: float) -> None:
        self._event += 1
        self._end_s = at_s
        self._clock.at(at_s, self._complete, self._event)

    def _steps_until_event(self) -> int:
        """Steps until a sequence finishes or memory may run out."""
        room = self.cache.room * self.block_tokens - self._reply_tokens % self.block_tokens
        return max(1, min(self._decoding[0][0] - self.n_steps, room // self._n_decoding))

    def _steps_s(self, steps: int) -> float:
        """Duration of fused steps: the attended context grows with each."""
        return steps * self._step_s + self._growth_s * steps * (steps - 1) / 2

    def _shorten(self) -> None:
        """A sequence has arrived: complete at the end of the step that runs now."""
        low, high, elapsed_s = 1, self._n_fused, self._clock.now_s - self._start_s
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._steps_s(middle) >= elapsed_s else (middle + 1, high)
        if low < self._n_fused:
            self._n_fused = low
            self._schedule_completion(max(self._clock.now_s, self._start_s + self._steps_s(low)))

    def _complete(self, event: int) -> None:
        if event != self._event:
            return
        seconds = self._clock.now_s - self._start_s
        steps, n = self._n_fused, self._n_decoding
        self.busy_s += seconds
        self.n_steps += steps
        self._listener.on_step(self, seconds / steps, steps * n)
        if (n_prompt := sum(k for _, k in self._chunks)) >= MIN_RATED_TOKENS and seconds > 0:
            self._prefill_rate = smoothed(self._prefill_rate, steps * n_prompt / seconds)
        if n:
            self._context += n * steps
            self.n_output += n * steps
            self._grow_reply(n * steps)
            self._finish_decoded()
        for seq, k in self._chunks:
            self._advance(seq, k * steps)
        self._chunks = []
        while self.cache.room < 0:
            self._preempt()
        self._start_step()
        self._listener.on_change(self)

    def _grow_reply(self, n_tokens: int) -> None:
        """Replies take blocks, or return them (below 0). `_complete` preempts when there are none."""
        size = self.block_tokens
        before = -(-self._reply_tokens // size)
        self._reply_tokens += n_tokens
        self.cache.reserve(-(-self._reply_tokens // size) - before)

    def _finish_decoded(self) -> None:
        decoding = self._decoding
        while decoding and decoding[0][0] <= self.n_steps:
            _, _, seq = heappop(decoding)
            if seq.decode_start_step >= 0:
                self._leave_decoding(seq)
                self._finish(seq)

    def _finish(self, seq: SimSequence) -> None:
        """The reply stays in the cache if the trace names its segment and there is room."""
        segment, blocks = seq.request.reply
        if blocks and blocks <= self.cache.room:
            self.cache.reserve(blocks)
            new = self.cache.publish(segment, blocks, held_before=False)
            self.cache.reserve(new - blocks)
            self.cache.release((segment,), 1)
        self._end_turn(seq)
        self._release(seq)
        self._listener.on_finish(self, seq)

    def _leave_decoding(self, seq: SimSequence) -> None:
        seq.written += self.n_steps - seq.decode_start_step
        seq.decode_start_step = -1
        self._n_decoding -= 1
        self._context -= seq.request.n_prompt + seq.written
        self._grow_reply(-seq.written)

    def _advance(self, seq: SimSequence, n_tokens: int) -> None:
        seq.done += n_tokens
        self.computed += n_tokens
        self._prefill_tokens -= n_tokens
        self._publish(seq)
        self._listener.on_prefill(self, seq, n_tokens)
        if seq.done < seq.n_prompt:
            return
        self._prefilling.remove(seq)
        if not seq.n_output:
            self._release(seq)
            self._listener.on_finish(self, seq)
            return
        is_first = seq.written == seq.request.n_written  # here; after a preemption it is not
        seq.written += 1
        self.n_output += 1
        if is_first:
            self._listener.on_first_token(self, seq)
        if seq.written >= seq.n_output:
            self._finish(seq)
            return
        seq.decode_start_step = self.n_steps
        self._n_decoding += 1
        self._context += seq.request.n_prompt + seq.written
        self._release_reserved(seq)
        self._grow_reply(seq.written)
        heappush(self._decoding, (self.n_steps + seq.n_output - seq.written, seq.rank, seq))

    # --- scheduling --------------------------------------------------------------------------------------------------

    def _plan(self) -> list[tuple[SimSequence, int]]:
        budget = self._prefill_policy.budget(self.model, self._n_decoding, self._context)
        chunks: list[tuple[SimSequence, int]] = []
        for seq in self._prefilling:
            n = budget.take(seq.done, seq.n_prompt - seq.done)
            if n <= 0:
                return chunks
            chunks.append((seq, n))
        waiting = self._waiting
        place = 0
        while place < len(waiting) and self.n_running < self.model.max_running:
            seq = waiting[place]
            if not seq.awaits_kv and not budget.left and self._tiers is None:
                return chunks
            admitted = self._admit(seq, bool(budget.left))
            if admitted is None:
                place += 1  # its next segment is being computed for another sequence
                continue
            if not admitted:
                return chunks
            del waiting[place]
            if seq in self._awaiting_kv:
                continue
            if n := budget.take(seq.done, seq.n_prompt - seq.done):
                chunks.append((seq, n))
        return chunks

    def _admit(self, seq: SimSequence, may_compute: bool) -> bool | None:
        """Hold the cached prefix and reserve blocks for the rest. False: no room. None: more will be cached soon."""
        request, cache, size = seq.request, self.cache, self.block_tokens
        n_matched, n_blocks = cache.match(request.path, request.lengths)
        n_full = n_matched if n_blocks == sum(request.lengths[:n_matched]) else n_matched - 1
        if n_full < len(request.path) and request.path[n_full] in self._pending and not seq.awaits_kv:
            return None
        need = max(0, -(-seq.n_prompt // size) - n_blocks)
        spare = -(-self.n_running * BLOCK_TOKENS // size)
        if need + spare > cache.room - cache.idle_blocks(request.path, n_matched) and self.n_running:
            return False
        fetch = self._fetch(seq, n_blocks)
        if fetch is None and not may_compute and not seq.awaits_kv:
            return False
        self._begin_turn(seq, n_full)
        cache.hold(request.path, n_matched)
        cache.reserve(need)
        seq.n_held, seq.n_full, seq.reserved = n_matched, n_full, need
        seq.full_blocks = sum(request.lengths[:n_full])
        expected, seq.done = seq.done, min(n_blocks * size, seq.n_prompt - 1)
        if seq.awaits_kv:
            seq.done = min(seq.done, (seq.n_prompt - 1) // BLOCK_TOKENS * BLOCK_TOKENS)
            self._awaiting_kv.add(seq)
            self._listener.on_prefill(self, seq, 0)
            return True
        self._prefill_tokens += expected - seq.done
        n_cached = seq.done if fetch is None else n_blocks * size + fetch.n_tokens
        if not request.n_preempted and not request.n_failovers:
            self.cached += n_cached
            request.cached_tokens += n_cached
            request.fetched = None if fetch is None else fetch.by_tier
        for segment in request.path[n_full:]:
            self._pending.setdefault(segment, seq)
        if fetch is None:
            self._prefilling.append(seq)
        else:
            self._prefill_tokens -= seq.n_prompt - seq.done
            self._awaiting_kv.add(seq)
            self._clock.at(fetch.arrival_s, self._arrived, seq, min(n_cached, seq.n_prompt - 1))
        self._listener.on_prefill(self, seq, 0)
        return True

    def _fetch(self, seq: SimSequence, n_blocks: int) -> SimFetch | None:
        if self._tiers is None or seq.awaits_kv:
            return None
        request = seq.request
        before = self._prefill_tokens - (seq.n_prompt - seq.done)
        compute = ComputeQueue(self._prefill_rate, max(0, before), self.n_running > 0)
        return self._tiers.fetch(request.path, request.lengths, n_blocks, seq.n_prompt, compute)

    def _begin_turn(self, seq: SimSequence, n_full: int) -> None:
        request, retention = seq.request, self._retention
        if retention is not None and seq.conversation is None:
            retention.now_s = self._clock.now_s
            session, owner = b"%d" % request.session, b"%d" % request.tenant
            seq.conversation = retention.begin(owner, session, _keys(request.path), n_full)
        if self._tiers is not None:
            n_shared = 0 if seq.conversation is None else seq.conversation.n_shared
            self._tiers.use(request.path, n_shared, seq.conversation)

    def _end_turn(self, seq: SimSequence) -> None:
        request, retention = seq.request, self._retention
        if retention is None or seq.conversation is None:
            return
        retention.now_s = self._clock.now_s
        retention.end(seq.conversation, _keys(request.path))
        if request.called_tools:
            retention.ended_with_tool_calls(seq.conversation)
        for order in self._orders:
            if isinstance(order, OracleOrder):
                order.next_use_s[seq.conversation] = self._clock.now_s + request.next_s

    def _publish(self, seq: SimSequence) -> None:
        """Share the segments that are now computed in full."""
        request, n = seq.request, seq.n_full
        stored: list[Segment] = []
        while n < len(request.path):
            length = request.lengths[n]
            end = (seq.full_blocks + length) * self.block_tokens
            if end > seq.done and not (n == len(request.path) - 1 and seq.done == seq.n_prompt):
                break
            held = n < seq.n_held
            stored.append((request.path[n], length))
            seq.reserved -= self.cache.publish(request.path[n], length, held)
            seq.n_held += not held
            seq.full_blocks += length
            if self._pending.get(request.path[n]) is seq:
                del self._pending[request.path[n]]
            n += 1
        seq.n_full = n
        if self._tiers is not None and stored:
            self._tiers.store(stored, seq.conversation)

    def _release_reserved(self, seq: SimSequence) -> None:
        """Blocks whose content another sequence published, or that the reply now accounts for."""
        self.cache.reserve(-seq.reserved)
        seq.reserved = 0

    def _release(self, seq: SimSequence) -> None:
        for segment in seq.request.path[seq.n_full :]:
            if self._pending.get(segment) is seq:
                del self._pending[segment]
        self._release_reserved(seq)
        self.cache.release(seq.request.path, seq.n_held, seq.conversation)
        seq.n_held = -1

    def _preempt(self) -> None:
        """Return the latest arrival to the head of the waiting queue, without its blocks."""
        decoding = [seq for _, _, seq in self._decoding if seq.decode_start_step >= 0]
        last = max([*self._prefilling, *decoding], key=lambda seq: seq.rank)
        self.n_preempted += 1
        last.request.n_preempted += 1
        if last.decode_start_step >= 0:
            self._leave_decoding(last)
            self._decoding = [entry for entry in self._decoding if entry[2] is not last]
            heapify(self._decoding)
        else:
            self._prefilling.remove(last)
            self._prefill_tokens -= last.n_prompt - last.done
        self._release(last)
        n_prompt = last.request.n_prompt + last.written
        again = SimSequence(last.request, last.rank, n_prompt, last.n_output, written=last.written)
        again.conversation = last.conversation
        self._prefill_tokens += again.n_prompt
        self._waiting.appendleft(again)


def _keys(path: Sequence[int]) -> list[bytes]:
    """Content keys of segments: each names all that comes before it."""
    return [segment.to_bytes(8, "little") for segment in path]
