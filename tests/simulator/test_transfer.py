"""KV that moves from a prefill worker to a decode worker: what hides behind computing, and what does not."""

import pytest
from msgspec.structs import replace

from emberline.simulator.baselines import Plain
from emberline.simulator.coefficients import Timed, load
from emberline.simulator.fleet import Fleet
from emberline.simulator.job import Job
from emberline.simulator.transfer import Wire
from emberline.simulator.virtual_clock import Clock

MODEL = replace(load("h200-llama-8b"), context_len=60_000, kv_tokens=100_000)


class Told(Plain):
    """Sends nothing by itself."""

    def began(self, job: Job) -> None: ...
    def ended(self, job: Job) -> None: ...


def served(wire: Wire, *jobs: Job) -> Fleet:
    clock = Clock()
    done: list[Job] = []
    fleet = Fleet(["prefill", "decode"], MODEL, Timed(), clock, 64, wire, done.append, lambda *_: None)
    fleet.routers = [Told(fleet.workers, fleet.send)]
    for job in jobs:
        clock.at(job.asked_s, fleet.send, job, "w001", "w000")
    clock.run(1000)
    assert done == list(jobs)
    assert all(worker.n_running == worker.cache.n_used == 0 for worker in fleet.workers)
    return fleet


def job(number: int = 0, asked_s: float = 0.0, path: tuple[int, ...] = (0,), n_blocks: int = 512) -> Job:
    lengths = (512,) if len(path) == 1 else (512, n_blocks - 512)
    return Job(f"j{number}", number, 0, 0, path, lengths, 64 * n_blocks, 10, block_tokens=64, asked_s=asked_s)


def test_only_the_last_chunk_is_waited_for() -> None:
    one = job()  # 32,768 tokens: four chunks
    fleet = served(Wire(50e9, latency_s=0.0), one)
    assert fleet.links.n_bytes == (32_768 - 16) * MODEL.kv_bytes
    last_s = (8192 - 16) * MODEL.kv_bytes / 50e9
    rest_s = MODEL.step_s + MODEL.chunk_s(16, 32_752)
    assert one.first_s == pytest.approx(MODEL.prefill_s(32_768) + last_s + rest_s)


def test_a_wire_slower_than_computing_is_waited_for() -> None:
    one = job()
    served(Wire(1e9, latency_s=0.0), one)
    assert one.first_s > (32_768 - 16) * MODEL.kv_bytes / 1e9


def test_what_decode_has_is_not_sent_again() -> None:
    first, second = job(0), job(1, 100.0, (0, 1), 520)
    fleet = served(Wire(50e9), first, second)
    assert second.cached_tokens == 32_768
    assert fleet.links.n_bytes == (32_768 - 16 + 8 * 64 - 16) * MODEL.kv_bytes
    assert [worker.computed for worker in fleet.workers] == [33_280, 32]
