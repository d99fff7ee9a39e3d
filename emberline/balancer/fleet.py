"""The engines of every model, and who is in flight on which."""

import time
from collections.abc import Iterator, Mapping, Sequence

from emberline.balancer.endpoint import DEFAULT_MAX_RUNNING, Client
from emberline.protocol.frames import EngineLoad

STALLED_S = 30.0  # work but no step for so long: tokens do not move


class Member:
    """One engine's place in the fleet: what the core knows beside what the engine reports."""

    def __init__(self, model: str, client: Client) -> None:
        self.model = model
        self.client = client
        self.in_flight = 0  # sequences granted and not yet released
        self.batch_in_flight = 0  # those of them that are queued work, which makes room for all others
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
    def writes(self) -> bool:
        """Whether replies come from it; else it computes prompts for those that they do come from."""
        return self.client.info is None or self.client.info.role != "prefill"

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

    def take(self, n: int, batch: bool = False) -> None:
        if self.in_flight == 0:
            self._busy_s = time.monotonic()
        self.in_flight += n
        self.batch_in_flight += n * batch

    def give_back(self, n: int, batch: bool = False) -> None:
        self.in_flight -= n
        self.batch_in_flight -= n * batch
        assert self.in_flight >= self.batch_in_flight >= 0

    def observe(self, load: EngineLoad, age_s: float) -> None:
        """What a door has seen of the engine, `age_s` ago."""
        seen_s = time.monotonic() - age_s
        if seen_s > self._seen_s:
            self._seen_load, self._seen_s = load, seen_s


class Fleet:
    """All there are. Lives where admission lives: in the core."""

    def __init__(self, engines: Mapping[str, Sequence[Client]]) -> None:
        self._by_model = {model: [Member(model, client) for client in clients] for model, clients in engines.items()}
        self._by_name = {member.name: member for members in self._by_model.values() for member in members}
        assert len(self._by_name) == sum(map(len, self._by_model.values())), "endpoint names are unique"

    def __iter__(self) -> Iterator[Member]:
        return iter(self._by_name.values())

    def __getitem__(self, name: str) -> Member:
        return self._by_name[name]

    def of(self, model: str) -> Sequence[Member]:
        return self._by_model.get(model, ())
