"""KV transfer from a prefill to a decode worker: what overlaps with computing and what does not."""

import pytest
from msgspec.structs import replace

from emberline.simulator.baselines import BaselineRouter
from emberline.simulator.coefficients import LatencyTargetBudget, load
from emberline.simulator.fleet import Fleet, LinkSpec
from emberline.simulator.request import SimRequest
from emberline.simulator.virtual_clock import VirtualClock

MODEL = replace(load("h200-llama-8b"), context_len=60_000, kv_tokens=100_000)


class PassiveRouter(BaselineRouter):
    """Makes no decisions: the tests send the requests."""

    def on_first_token(self, request: SimRequest) -> None: ...
    def on_finish(self, request: SimRequest) -> None: ...


def served(link: LinkSpec, *requests: SimRequest) -> Fleet:
    clock = VirtualClock()
    done: list[SimRequest] = []
    fleet = Fleet(["prefill", "decode"], MODEL, LatencyTargetBudget(), clock, 64, link, done.append, lambda *_: None)
    fleet.routers = [PassiveRouter(fleet.workers, fleet.send)]
    for request in requests:
        clock.at(request.arrival_s, fleet.send, request, "w001", "w000")
    clock.run(1000)
    assert done == list(requests)
    assert all(worker.n_running == worker.cache.n_used == 0 for worker in fleet.workers)
    return fleet


def make_request(
    number: int = 0, arrival_s: float = 0.0, path: tuple[int, ...] = (0,), n_blocks: int = 512
) -> SimRequest:
    lengths = (512,) if len(path) == 1 else (512, n_blocks - 512)
    return SimRequest(
        f"j{number}", number, 0, 0, path, lengths, 64 * n_blocks, 10, block_tokens=64, arrival_s=arrival_s
    )


def test_only_the_last_chunk_adds_latency() -> None:
    one = make_request()  # 32,768 tokens: four chunks
    fleet = served(LinkSpec(50e9, latency_s=0.0), one)
    assert fleet.network.n_bytes == (32_768 - 16) * MODEL.kv_bytes
    last_s = (8192 - 16) * MODEL.kv_bytes / 50e9
    rest_s = MODEL.step_s + MODEL.chunk_s(16, 32_752)
    assert one.first_token_s == pytest.approx(MODEL.prefill_s(32_768) + last_s + rest_s)


def test_slow_link_adds_latency() -> None:
    one = make_request()
    served(LinkSpec(1e9, latency_s=0.0), one)
    assert one.first_token_s > (32_768 - 16) * MODEL.kv_bytes / 1e9


def test_cached_blocks_are_not_sent() -> None:
    first, second = make_request(0), make_request(1, 100.0, (0, 1), 520)
    fleet = served(LinkSpec(50e9), first, second)
    assert second.cached_tokens == 32_768
    assert fleet.network.n_bytes == (32_768 - 16 + 8 * 64 - 16) * MODEL.kv_bytes
    assert [worker.computed for worker in fleet.workers] == [33_280, 32]
