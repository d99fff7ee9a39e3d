"""Room for queued work: how many lines may run on which engine now, so that requests with a waiting client come first.

A line is claimed only against a grant, and then goes straight to the engine that the grant names. While requests are
there, queued work has a share of the engine's places, less when steps or first tokens become slow; when there are none
it has them all. A few places are always granted: the engine itself sees to it that those who wait are not starved.
"""

import asyncio
import time
from collections.abc import Callable

from emberline.balancer.fleet import Fleet, Member

SHARE = 0.5  # of an engine's places, while others use it too
QUIET_S = 5.0  # without a request: the engine is the queue's
STEP_S = 0.05  # what a step may take when a request may have to wait for its end
FLOOR = 1 / 16  # of an engine's places; one at least
AHEAD = 1 / 8  # beyond an engine's places, when it is the queue's: it is never idle while the next lines are claimed
KV_FULL = 0.9  # of the blocks: more lines would only push each other out
BUSY = 0.98  # utilisation of an accelerator that has nothing to give
_LOOK_S = 0.2  # between two corrections
_SLOWER, _FASTER = 0.8, 0.02  # the cap is multiplied by the one, or grows by the other, at every correction
_SMOOTHING = 0.2
_MIN_SAMPLES = 5
_STALE_S = 300.0  # first tokens without queued work that are older tell nothing about now


class Mean:
    """A smoothed figure, and how old it is."""

    def __init__(self) -> None:
        self.value = 0.0
        self.n = 0
        self.at_s = 0.0

    def add(self, value: float, now_s: float) -> None:
        self.n += 1
        self.at_s = now_s
        self.value += max(_SMOOTHING, 1 / self.n) * (value - self.value)

    def known(self, now_s: float) -> bool:
        return self.n >= _MIN_SAMPLES and now_s - self.at_s < _STALE_S


class Room:
    """One engine, as queued work sees it."""

    def __init__(self, member: Member, share: float, now_s: float) -> None:
        self.member = member
        self.granted = 0  # sequences
        self.emptied = False  # for a line that is to run alone,
        self.alone = False  # which runs
        self.step_s = Mean()
        self._share = share
        self._cap = 1.0  # of the places
        self._sync_s = now_s - QUIET_S  # when a request was last there
        self._first_s = {True: Mean(), False: Mean()}  # to a first token, beside queued work and without
        self._looked_s, self._looked_steps = now_s, 0

    @property
    def floor(self) -> int:
        return max(1, int(self.member.max_running * FLOOR))

    def free(self, now_s: float) -> int:
        """Sequences that may be granted now."""
        member = self.member
        self._look(now_s)
        if not member.healthy or self.emptied:
            return 0
        return max(0, max(self._most(now_s), self.floor) - self.granted)

    def heard(self, first_token_s: float, mixed: bool, now_s: float) -> None:
        self._first_s[mixed].add(first_token_s, now_s)

    def _most(self, now_s: float) -> int:
        member, load = self.member, self.member.load
        places = member.max_running
        if load.waiting > load.waiting_batch:
            return 0
        if load.kv_total_blocks and load.kv_used_blocks > KV_FULL * load.kv_total_blocks:
            return self.granted
        if now_s - self._sync_s >= QUIET_S:
            return places + max(1, int(places * AHEAD))
        return min(int(places * min(self._cap, self._share)), places - self._others())

    def _others(self) -> int:
        """Sequences that are not ours to run: requests, and what other cores have there."""
        load, member = self.member.load, self.member
        return max(member.sync_in_flight, load.running + load.waiting - member.batch_in_flight)

    def _look(self, now_s: float) -> None:
        """Learn the pace of steps, and give queued work more or less of the engine."""
        if self._others() > 0:
            self._sync_s = now_s
        elapsed_s, steps = now_s - self._looked_s, self.member.load.steps
        if elapsed_s < _LOOK_S:
            return
        n_steps = steps - self._looked_steps
        self._looked_s, self._looked_steps = now_s, steps
        if n_steps <= 0 or elapsed_s > 5 * _LOOK_S:
            return  # it was idle, or begins anew
        self.step_s.add(elapsed_s / n_steps, now_s)
        if now_s - self._sync_s >= QUIET_S:
            return  # nobody who could mind: what was learnt is kept for the next who comes
        if self.granted and self._slow(now_s):
            self._cap = max(min(self._cap, self._share) * _SLOWER, FLOOR)
        else:
            self._cap = min(self._cap + _FASTER, 1.0)

    def _slow(self, now_s: float) -> bool:
        mixed, alone = self._first_s[True], self._first_s[False]
        # By its mean: the unlucky wait twice as long.
        late = mixed.known(now_s) and alone.known(now_s) and mixed.value > alone.value + STEP_S / 2
        utilisation = self.member.load.utilisation
        full = utilisation is not None and utilisation > BUSY
        return late or full or self.step_s.value > STEP_S


class Grant:
    """A place on an engine, for one line. Given back once."""

    __slots__ = ("_n", "_on_return", "_room", "alone")

    def __init__(self, room: Room, on_return: Callable[[], None], alone: bool = False) -> None:
        self._room = room
        self._n = 1
        self._on_return = on_return
        self.alone = room.alone = alone
        room.granted += 1

    @property
    def engine(self) -> str:
        return self._room.member.name

    def widen(self, n: int) -> None:
        """The line wants `n` sequences."""
        self._room.granted += n - self._n
        self._n = n

    def give_back(self) -> None:
        self._room.granted -= self._n
        assert self._room.granted >= 0
        self._n = 0
        if self.alone:
            self._room.emptied = self._room.alone = self.alone = False
        self._on_return()


class Grants:
    def __init__(self, fleet: Fleet, share: float = SHARE, clock: Callable[[], float] = time.monotonic) -> None:
        self._fleet = fleet
        self._clock = clock
        self._rooms = {member.name: Room(member, share, clock()) for member in fleet}
        self._stirred = asyncio.Event()

    def issue(self, model: str, most: int) -> list[Grant]:
        """Up to `most` places, those of one engine together."""
        now_s = self._clock()
        grants: list[Grant] = []
        for room in sorted(self._of(model), key=lambda room: room.granted / room.member.max_running):
            n = min(room.free(now_s), most - len(grants))
            grants += [Grant(room, self.stir) for _ in range(n)]
        return grants

    def issue_alone(self, model: str) -> Grant | None:
        """An engine with nothing else of the queue on it. None: one is being emptied; ask again."""
        rooms = [room for room in self._of(model) if room.member.healthy]
        if not rooms:
            return None
        room = min(rooms, key=lambda room: (not room.emptied, room.granted))
        room.emptied = True
        return Grant(room, self.stir, alone=True) if not room.granted else None

    def call_off(self, model: str) -> None:
        """No line is to run alone after all."""
        for room in self._of(model):
            room.emptied = room.alone
        self.stir()

    def heard(self, member: Member, first_token_s: float, mixed: bool) -> None:
        """How long a request waited for its first token; `mixed`: queued work was there when it came."""
        self._rooms[member.name].heard(first_token_s, mixed, self._clock())

    def stir(self) -> None:
        """There may be room where there was none."""
        self._stirred.set()

    async def stirred(self) -> None:
        await self._stirred.wait()
        self._stirred.clear()

    def _of(self, model: str) -> list[Room]:
        return [self._rooms[member.name] for member in self._fleet.of(model) if member.writes]
