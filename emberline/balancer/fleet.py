"""The engines of every model, who is in flight on which, and where the next request goes."""

import time
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b

from emberline.balancer.engine_client import EngineClient
from emberline.protocol.errors import Overloaded, Unavailable
from emberline.protocol.frames import EngineLoad

MAX_WAITING = 256  # sequences an engine may have beyond those it can run
DEFAULT_MAX_RUNNING = 16  # where an engine does not say
STALLED_S = 30.0  # work but no step for so long: tokens do not move
_SMOOTHING = 0.1  # of the mean duration


class Member:
    """One engine's place in the fleet: what the core knows beside what the engine reports."""

    def __init__(self, model: str, client: EngineClient) -> None:
        self.model = model
        self.client = client
        self.in_flight = 0  # sequences granted and not yet released
        self.batch_in_flight = 0  # those of them that are queued work, which makes room for all others
        self.mean_s = 1.0  # smoothed time a sequence takes
        self.hash_key = blake2b(client.name.encode(), digest_size=32).digest()
        self._busy_s = 0.0  # when work last arrived at the idle engine
        self._seen_load = EngineLoad()  # the newest that a door saw on its own connection, and when
        self._seen_s = 0.0

    @property
    def name(self) -> str:
        return self.client.name

    @property
    def max_running(self) -> int:
        info = self.client.info
        return (info.max_running if info is not None else 0) or DEFAULT_MAX_RUNNING

    @property
    def load(self) -> EngineLoad:
        return self._seen_load if self._seen_s > self.client.progress_s else self.client.load

    @property
    def stalled(self) -> bool:
        last_s = max(self._busy_s, self._seen_s, self.client.progress_s)
        return self.in_flight > 0 and time.monotonic() - last_s > STALLED_S

    @property
    def healthy(self) -> bool:
        return self.client.connected and not self.stalled

    @property
    def sync_in_flight(self) -> int:
        return self.in_flight - self.batch_in_flight

    @property
    def retry_after_s(self) -> float:
        """When those that wait now should have been served."""
        return min(60.0, max(1.0, (self.sync_in_flight - self.max_running) * self.mean_s / self.max_running))

    def would_wait(self, n: int) -> bool:
        """Whether `n` more sequences would stand behind others. An engine may have a queue while slots are free."""
        waiting = self.load.waiting - self.load.waiting_batch
        return self.sync_in_flight + n > self.max_running or (self.sync_in_flight > 0 and waiting > 0)

    def take(self, n: int, batch: bool = False) -> None:
        if self.in_flight == 0:
            self._busy_s = time.monotonic()
        self.in_flight += n
        self.batch_in_flight += n * batch

    def give_back(self, n: int, took_s: float | None, batch: bool = False) -> None:
        self.in_flight -= n
        self.batch_in_flight -= n * batch
        assert self.in_flight >= self.batch_in_flight >= 0
        if took_s is not None:
            self.mean_s += _SMOOTHING * (took_s - self.mean_s)

    def observe(self, load: EngineLoad, age_s: float) -> None:
        """What a door has seen of the engine, `age_s` ago."""
        seen_s = time.monotonic() - age_s
        if seen_s > self._seen_s:
            self._seen_load, self._seen_s = load, seen_s


class Fleet:
    """Chooses and counts. Lives where admission lives: in the core."""

    def __init__(self, engines: Mapping[str, Sequence[EngineClient]], max_waiting: int = MAX_WAITING) -> None:
        self._by_model = {model: [Member(model, client) for client in clients] for model, clients in engines.items()}
        self._by_name = {member.name: member for members in self._by_model.values() for member in members}
        assert len(self._by_name) == sum(map(len, self._by_model.values())), "endpoint names are unique"
        self._max_waiting = max_waiting

    def __iter__(self) -> Iterator[Member]:
        return iter(self._by_name.values())

    def __getitem__(self, name: str) -> Member:
        return self._by_name[name]

    def choose(
        self, model: str, affinity: str | None, n: int, avoid: Sequence[str] = (), reject_if_busy: bool = False
    ) -> Member:
        """The engine for `n` more sequences, counted as in flight until `give_back`.

        An affinity goes to its home, found by rendezvous hashing, so cores agree without talking; when the home has
        no room to run it, or there is no affinity, to the least loaded. Overloaded when not even that one may queue it,
        or, if so asked, when it would have to.
        """
        members = self._eligible(model, avoid)
        if reject_if_busy:
            members = _free(members, n)
        least = min(members, key=lambda member: (member.sync_in_flight / member.max_running, member.in_flight))
        chosen = least
        if affinity is not None and len(members) > 1:
            home = max(members, key=lambda member: _weight(affinity, member))
            if home.sync_in_flight + n <= home.max_running or home.sync_in_flight <= least.sync_in_flight:
                chosen = home
        waiting = chosen.sync_in_flight - chosen.max_running
        if waiting + n > self._max_waiting:
            raise Overloaded(
                f"{waiting} requests already wait for {model}; come back in {chosen.retry_after_s:.0f} s",
                retry_after_s=chosen.retry_after_s,
            )
        chosen.take(n)
        return chosen

    def of(self, model: str) -> Sequence[Member]:
        return self._by_model.get(model, ())

    def place(self, name: str, n: int) -> Member:
        """The engine that `n` sequences of queued work were granted, counted as in flight there until `give_back`."""
        member = self._by_name[name]
        if not member.healthy:
            raise Unavailable(f"engine {name} is not there any more", retry_after_s=1)
        member.take(n, batch=True)
        return member

    def _eligible(self, model: str, avoid: Sequence[str]) -> list[Member]:
        """Engines that are connected; those to avoid and those that are stuck only when there is no other."""
        connected = [member for member in self._by_model.get(model, ()) if member.client.connected]
        if not connected:
            raise Unavailable(f"no engine of {model} is connected", retry_after_s=2)
        wanted = [member for member in connected if member.name not in avoid]
        return [member for member in wanted if not member.stalled] or wanted or connected


def _free(members: list[Member], n: int) -> list[Member]:
    free = [member for member in members if not member.would_wait(n)]
    if not free:
        retry_after_s = min(member.retry_after_s for member in members)
        raise Overloaded(f"{members[0].model} is busy, and the request is not to wait", retry_after_s=retry_after_s)
    return free


def _weight(affinity: str, member: Member) -> bytes:
    return blake2b(affinity.encode("utf-8", "surrogatepass"), key=member.hash_key, digest_size=8).digest()
