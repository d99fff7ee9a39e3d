"""Two cores over one fleet share no state: they see the same late load reports, and must not herd to one worker."""

import random
from collections import Counter

from emberline.balancer.balancer import Balancer
from emberline.protocol.frames import EngineLoad
from tests.balancer.balancing import fleet, keys, request

N = 8
REPORT_S = 0.2  # age of load reports


class Engines:
    """Workers that compute prompts one after the other at a fixed rate, in virtual time."""

    def __init__(self, cores: list[Balancer]) -> None:
        self.cores = cores
        self.queues: dict[str, list[tuple[float, int, str, bytes, Balancer]]] = {f"e{i}": [] for i in range(N)}
        self.free_s = dict.fromkeys(self.queues, 0.0)
        self.waits: list[float] = []
        self.deepest = 0

    def submit(self, name: str, request_id: str, uncached: int, chain: bytes, core: Balancer, now_s: float) -> None:
        begin_s = max(now_s, self.free_s[name])
        self.waits.append(begin_s - now_s)
        self.free_s[name] = begin_s + core.settings.cost.prefill_s(uncached, uncached)
        self.queues[name].append((self.free_s[name], uncached, request_id, chain, core))
        self.deepest = max(self.deepest, len(self.queues[name]))

    def step(self, now_s: float) -> None:
        for name, queue in self.queues.items():
            while queue and queue[0][0] <= now_s:
                _, _, request_id, chain, core = queue.pop(0)
                core.first_token(request_id, now_s)
                core.ended(request_id, now_s, "finished", 20)
                for each in self.cores:
                    each.fleet.stored(name, chain, now_s)

    def report(self, now_s: float) -> None:
        for name, queue in self.queues.items():
            tokens = sum(uncached for _, uncached, *_ in queue)
            for core in self.cores:
                core.fleet.report(name, EngineLoad(running=len(queue), waiting_tokens=tokens), now_s)


def run(n_cores: int, seed: int = 1) -> tuple[Engines, Counter[str]]:
    """Bursts of uncached prompts, each request at a random core."""
    rng = random.Random(seed)
    cores = [fleet(*["both"] * N, max_running=1000, ahead_s=1e9) for _ in range(n_cores)]
    engines, sent = Engines(cores), Counter[str]()
    now_s = 0.0
    for burst in range(60):
        for i in range(N):  # as many as there are workers, at once: each should get one
            core = cores[rng.randrange(n_cores)]
            wanted = request(keys((f"{seed}/{burst}/{i}", 100)), id=f"{burst}/{i}")
            core.enqueue(wanted, now_s)
            for record in core.dispatch(now_s):
                assert record.route is not None
                sent[record.route.decode] += 1
                uncached = record.request.input_tokens - record.route.cached_tokens
                engines.submit(record.route.decode, record.request.id, uncached, record.request.keys, core, now_s)
        for _ in range(3):
            now_s += REPORT_S
            engines.step(now_s)
            engines.report(now_s)
    return engines, sent


def test_two_cores_do_not_herd() -> None:
    one, _ = run(1)
    two, sent = run(2)
    assert max(sent.values()) <= 1.3 * sum(sent.values()) / N
    assert two.deepest <= one.deepest + 2  # a whole burst at one worker would be 8 deep
    assert sum(two.waits) / len(two.waits) < 0.25


def test_cores_without_contact_agree_on_two_workers_per_session() -> None:
    cores = [fleet(*["both"] * N) for _ in range(2)]
    homes: list[set[str]] = []
    for session in range(40):
        chain = keys(("system", 50), (f"s{session}", 50))
        names: set[str] = set()
        for core in cores:
            wanted = request(chain, id=f"{session}")
            core.enqueue(wanted, float(session))
            names |= {record.route.decode for record in core.dispatch(float(session)) if record.route}
            core.ended(wanted.id, float(session), "cancelled")
        homes.append(names)
    assert sum(len(home) == 1 for home in homes) >= 36


def test_a_core_learns_of_anothers_requests_from_load_reports() -> None:
    here, there = fleet(*["both"] * N), fleet(*["both"] * N)
    chain = keys(("conversation", 2000))
    wanted = request(chain)
    here.enqueue(wanted, 0.0)
    [record] = here.dispatch(0.0)
    assert record.route is not None
    there.fleet.stored(record.route.decode, chain, 1.0)  # KV events go to both cores
    follow = request(chain + keys(("next", 40)))
    there.enqueue(follow, 5.0)
    [other] = there.dispatch(5.0)
    assert other.route is not None
    assert other.route.decode == record.route.decode
    assert other.route.cached_tokens == 32_000
