"""A modelled engine worker: continuous batching, chunked prefill, a KV memory with prefix sharing and eviction.

It follows the real scheduler: streams first, then prompts by arrival, as many tokens as the chunking allows; who does
not fit waits, and nobody passes; when memory runs out the last to arrive gives back what it holds. Steps that only
decode are taken many at a time, which is exact as long as nothing else happens.
"""

from collections import deque
from heapq import heappop, heappush
from typing import Protocol

from emberline.protocol.block_hash import BLOCK_TOKENS
from emberline.protocol.frames import EngineLoad, WorkerRole
from emberline.simulator.coefficients import Chunking, Coefficients
from emberline.simulator.job import Job, Seq
from emberline.simulator.kv_memory import Cache, Changed
from emberline.simulator.virtual_clock import Clock

LOOK_AHEAD = 8  # steps with chunks of one prompt that are taken at once, chunks of one size


class Listener(Protocol):
    """Who is told what happens on a worker."""

    def chunk(self, worker: "Worker", seq: Seq, n_tokens: int) -> None: ...
    def first(self, worker: "Worker", seq: Seq) -> None: ...
    def ended(self, worker: "Worker", seq: Seq) -> None: ...
    def stepped(self, worker: "Worker", seconds: float, n_tokens: int) -> None: ...
    def changed(self, worker: "Worker") -> None: ...


class Worker:
    def __init__(
        self,
        name: str,
        model: Coefficients,
        chunking: Chunking,
        clock: Clock,
        listener: Listener,
        block_tokens: int,
        role: WorkerRole = "both",
        kv_changed: Changed | None = None,
    ) -> None:
        assert model.context_len <= model.kv_tokens, "a lone sequence must be able to reach the end of its context"
        self.name, self.role, self.model = name, role, model
        self.block_tokens = block_tokens
        capacity = model.kv_tokens // block_tokens
        self.cache = Cache(capacity, kv_changed) if kv_changed else Cache(capacity)
        self.busy_s = 0.0
        self.computed = self.cached = self.n_steps = self.n_preempted = self.n_written = 0
        self._chunking, self._clock, self._listener = chunking, clock, listener
        self._waiting: deque[Seq] = deque()
        self._prefilling: list[Seq] = []  # admitted, by arrival
        self._awaiting: set[Seq] = set()  # admitted; their blocks are on the way
        self._streams: list[tuple[int, int, Seq]] = []  # heap: (step of the last token, rank, sequence)
        self._pending: dict[int, Seq] = {}  # segments that somebody computes now
        self._n_streams = self._context = self._reply_tokens = 0
        self._n_arrived = 0
        self._due = 0  # prompt tokens not yet computed, of all that are here
        self._chunks: list[tuple[Seq, int]] = []  # of the step that runs
        self._begun_s = 0.0  # when what runs began,
        self._stretch = 0  # how many steps it is,
        self._first_s = self._more_s = 0.0  # what the first takes, and how much more each next,
        self._event = 0  # and which of the asked-for ends counts
        self._runs = False

    # --- what others see ---------------------------------------------------------------------------------------------

    @property
    def n_running(self) -> int:
        return len(self._prefilling) + len(self._awaiting) + self._n_streams

    def busy_at(self, now_s: float) -> float:
        """Seconds it has computed up to now, the step that runs included."""
        return self.busy_s + (now_s - self._begun_s if self._runs else 0.0)

    def load(self) -> EngineLoad:
        scale = self.block_tokens // BLOCK_TOKENS
        return EngineLoad(
            running=self.n_running,
            waiting=len(self._waiting),
            waiting_tokens=self._due,
            kv_used_blocks=self.cache.n_used * scale,
            kv_total_blocks=self.cache.capacity * scale,
            steps=self.n_steps,
            prompt_tokens=self.computed,
            cached_tokens=self.cached,
            output_tokens=self.n_written,
            preemptions=self.n_preempted,
        )

    def submit(self, job: Job, n_output: int, awaits: bool = False) -> Seq:
        seq = Seq(job, self._n_arrived, job.n_prompt, n_output, awaits)
        self._n_arrived += 1
        self._waiting.append(seq)
        _, n_blocks = self.cache.match(job.path, job.lengths)
        seq.done = min(n_blocks * self.block_tokens, seq.n_prompt - 1)  # until it is admitted: what it may expect
        self._due += 0 if awaits else seq.n_prompt - seq.done
        if not self._runs:
            self._next()
        elif self._stretch > 1 and (awaits or not self._chunks):
            self._cut_short()
        self._listener.changed(self)
        return seq

    def landed(self, seq: Seq) -> None:
        """All of the prompt's full blocks have arrived from elsewhere; what is left is computed here."""
        self._awaiting.remove(seq)
        before, seq.done = seq.done, max(seq.done, (seq.n_prompt - 1) // BLOCK_TOKENS * BLOCK_TOKENS)
        assert before <= seq.done
        self._due += seq.n_prompt - seq.done
        self._publish(seq)
        self._prefilling.append(seq)
        self._prefilling.sort(key=lambda other: other.rank)
        if not self._runs:
            self._next()
        elif self._stretch > 1:
            self._cut_short()

    # --- steps -------------------------------------------------------------------------------------------------------

    def _next(self) -> None:
        """Begin the next step, or as many alike as nothing can interrupt."""
        chunks = self._plan() if self._prefilling or self._waiting else []
        n, model = self._n_streams, self.model
        self._runs = bool(chunks or n)
        if not self._runs:
            return
        self._begun_s, self._chunks, self._stretch = self._clock.now_s, chunks, 1
        self._first_s = model.decode_s(n, self._context) + sum(model.chunk_s(k, seq.done) for seq, k in chunks)
        self._more_s = model.context_s * n
        if not chunks:
            self._stretch = self._undisturbed()
        elif n and len(chunks) == 1:
            seq, k = chunks[0]
            self._more_s += model.pair_s * k * k
            whole = (seq.n_prompt - seq.done - 1) // k  # the last chunk is a step by itself: others may join it
            self._stretch = max(1, min(LOOK_AHEAD, whole, self._undisturbed()))
        self._event += 1
        self._clock.at(self._begun_s + self._stretch_s(self._stretch), self._done, self._event)

    def _undisturbed(self) -> int:
        """Steps until a stream ends, or memory might."""
        room = self.cache.room * self.block_tokens - self._reply_tokens % self.block_tokens
        return max(1, min(self._streams[0][0] - self.n_steps, room // self._n_streams))

    def _stretch_s(self, steps: int) -> float:
        """So many steps alike: each looks back a little further than the one before."""
        return steps * self._first_s + self._more_s * steps * (steps - 1) / 2

    def _cut_short(self) -> None:
        """Somebody has come: stop at the end of the step that runs now."""
        low, high, elapsed_s = 1, self._stretch, self._clock.now_s - self._begun_s
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._stretch_s(middle) >= elapsed_s else (middle + 1, high)
        if low < self._stretch:
            self._stretch = low
            self._event += 1
            end_s = max(self._clock.now_s, self._begun_s + self._stretch_s(low))
            self._clock.at(end_s, self._done, self._event)

    def _done(self, event: int) -> None:
        if event != self._event:
            return
        seconds = self._clock.now_s - self._begun_s
        steps, n = self._stretch, self._n_streams
        self.busy_s += seconds
        self.n_steps += steps
        self._listener.stepped(self, seconds / steps, steps * n)
        if n:
            self._context += n * steps
            self.n_written += n * steps
            self._take_reply(n * steps)
            self._finish_streams()
        for seq, k in self._chunks:
            self._advance(seq, k * steps)
        self._chunks = []
        while self.cache.room < 0:
            self._preempt()
        self._next()
        self._listener.changed(self)

    def _take_reply(self, n_tokens: int) -> None:
        """Replies take memory, or give it back. Where there is none, `_done` takes it from the last to arrive."""
        size = self.block_tokens
        before = -(-self._reply_tokens // size)
        self._reply_tokens += n_tokens
        self.cache.reserve(-(-self._reply_tokens // size) - before)

    def _finish_streams(self) -> None:
        streams = self._streams
        while streams and streams[0][0] <= self.n_steps:
            _, _, seq = heappop(streams)
            if seq.began_step >= 0:
                self._leave_streams(seq)
                self._finish(seq)

    def _finish(self, seq: Seq) -> None:
        """Its reply stays in the cache, as far as there is room and the trace tells what it was."""
        segment, blocks = seq.job.reply
        if blocks and blocks <= self.cache.room:
            self.cache.reserve(blocks)
            new = self.cache.publish(segment, blocks, held_before=False)
            self.cache.reserve(new - blocks)
            self.cache.release((segment,), 1)
        self._release(seq)
        self._listener.ended(self, seq)

    def _leave_streams(self, seq: Seq) -> None:
        seq.written += self.n_steps - seq.began_step
        seq.began_step = -1
        self._n_streams -= 1
        self._context -= seq.job.n_prompt + seq.written
        self._take_reply(-seq.written)

    def _advance(self, seq: Seq, n_tokens: int) -> None:
        seq.done += n_tokens
        self.computed += n_tokens
        self._due -= n_tokens
        self._publish(seq)
        self._listener.chunk(self, seq, n_tokens)
        if seq.done < seq.n_prompt:
            return
        self._prefilling.remove(seq)
        if not seq.n_output:
            self._release(seq)
            self._listener.ended(self, seq)
            return
        seq.written += 1
        self.n_written += 1
        if seq.written == 1:
            self._listener.first(self, seq)
        if seq.written >= seq.n_output:
            self._finish(seq)
            return
        seq.began_step = self.n_steps
        self._n_streams += 1
        self._context += seq.job.n_prompt + seq.written
        self._give_up_reserve(seq)
        self._take_reply(seq.written)
        heappush(self._streams, (self.n_steps + seq.n_output - seq.written, seq.rank, seq))

    # --- who computes what -------------------------------------------------------------------------------------------

    def _plan(self) -> list[tuple[Seq, int]]:
        budget = self._chunking.budget(self.model, self._n_streams, self._context)
        chunks: list[tuple[Seq, int]] = []
        for seq in self._prefilling:
            n = budget.take(seq.done, seq.n_prompt - seq.done)
            if n <= 0:
                return chunks
            chunks.append((seq, n))
        waiting = self._waiting
        place = 0
        while place < len(waiting) and self.n_running < self.model.max_running:
            seq = waiting[place]
            if not seq.awaits and not budget.left:
                return chunks
            verdict = self._admit(seq)
            if verdict is None:
                place += 1  # what it needs next is being computed for another
                continue
            if not verdict:
                return chunks
            del waiting[place]
            if seq.awaits:
                continue
            if n := budget.take(seq.done, seq.n_prompt - seq.done):
                chunks.append((seq, n))
        return chunks

    def _admit(self, seq: Seq) -> bool | None:
        """Give a waiting sequence its cached prefix and room for the rest. None: soon it will find more there."""
        job, cache, size = seq.job, self.cache, self.block_tokens
        n_matched, n_blocks = cache.match(job.path, job.lengths)
        n_full = n_matched if n_blocks == sum(job.lengths[:n_matched]) else n_matched - 1
        if n_full < len(job.path) and job.path[n_full] in self._pending and not seq.awaits:
            return None
        need = max(0, -(-seq.n_prompt // size) - n_blocks)
        spare = -(-self.n_running * BLOCK_TOKENS // size)
        if need + spare > cache.room - cache.idle_blocks(job.path, n_matched) and self.n_running:
            return False
        cache.hold(job.path, n_matched)
        cache.reserve(need)
        seq.n_held, seq.n_full, seq.reserved = n_matched, n_full, need
        seq.full_blocks = sum(job.lengths[:n_full])
        expected, seq.done = seq.done, min(n_blocks * size, seq.n_prompt - 1)
        if seq.awaits:
            seq.done = min(seq.done, (seq.n_prompt - 1) // BLOCK_TOKENS * BLOCK_TOKENS)
            self._awaiting.add(seq)
            self._listener.chunk(self, seq, 0)
            return True
        self._due += expected - seq.done
        if not job.n_preempted:
            self.cached += seq.done
            job.cached_tokens += seq.done
        self._prefilling.append(seq)
        for segment in job.path[n_full:]:
            self._pending.setdefault(segment, seq)
        self._listener.chunk(self, seq, 0)
        return True

    def _publish(self, seq: Seq) -> None:
        """Segments that are computed in full now are there for all."""
        job, n = seq.job, seq.n_full
        while n < len(job.path):
            length = job.lengths[n]
            end = (seq.full_blocks + length) * self.block_tokens
            if end > seq.done and not (n == len(job.path) - 1 and seq.done == seq.n_prompt):
                break
            held = n < seq.n_held
            seq.reserved -= self.cache.publish(job.path[n], length, held)
            seq.n_held += not held
            seq.full_blocks += length
            if self._pending.get(job.path[n]) is seq:
                del self._pending[job.path[n]]
            n += 1
        seq.n_full = n

    def _give_up_reserve(self, seq: Seq) -> None:
        """Blocks for what another computed too, or that a reply now accounts for."""
        self.cache.reserve(-seq.reserved)
        seq.reserved = 0

    def _release(self, seq: Seq) -> None:
        for segment in seq.job.path[seq.n_full :]:
            if self._pending.get(segment) is seq:
                del self._pending[segment]
        self._give_up_reserve(seq)
        self.cache.release(seq.job.path, seq.n_held)
        seq.n_held = -1

    def _preempt(self) -> None:
        streams = [seq for _, _, seq in self._streams if seq.began_step >= 0]
        last = max([*self._prefilling, *streams], key=lambda seq: seq.rank)
        self.n_preempted += 1
        last.job.n_preempted += 1
        if last.began_step >= 0:
            self._leave_streams(last)
            self._streams = [entry for entry in self._streams if entry[2] is not last]
        else:
            self._prefilling.remove(last)
            self._due -= last.n_prompt - last.done
        self._release(last)
        again = Seq(last.job, last.rank, last.job.n_prompt + last.written, last.n_output, written=last.written)
        self._due += again.n_prompt
        self._waiting.appendleft(again)
