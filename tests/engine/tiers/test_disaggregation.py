"""Tiers of prefill and decode workers: prefill reuses what it has saved, decode saves what it has received."""

import random
import threading
from contextlib import contextmanager

import pytest

from emberline.engine.addresses import listening
from emberline.engine.core.limits import Limits
from emberline.engine.core.step_loop import StepLoop
from emberline.engine.runners.cpu.torch_runner import TorchRunner
from emberline.engine.worker.build import build_scheduler
from emberline.engine.worker.socket_server import Server
from emberline.kv.cache import KVCache
from emberline.kv.tiers.group_tiers import GroupTiers
from emberline.kv.tiers.host import HostTier
from emberline.kv.tiers.manager import TierManager
from emberline.kv.tiers.mover import HostMover
from emberline.kv.transfer.group_transfers import GroupTransfers
from emberline.kv.transfer.host_transfers import host_transfers
from emberline.protocol.frames import Drain, EngineInfo
from tests.engine.client import Client
from tests.engine.fakes import VOCAB, expected, request
from tests.engine.runners.cpu.test_torch_runner import FULL, WINDOW, TorchFake
from tests.engine.transfer.test_prefill_decode import halves

LIMITS = Limits(context_len=300, vocab_size=VOCAB, eos_ids=(0,), max_running=4, token_budget=48)
N_BLOCKS = 24


@contextmanager
def serving(address, layouts):
    sizes = [N_BLOCKS] * len(layouts)
    runner = TorchRunner(TorchFake(layouts), sizes, LIMITS, shared=True)
    transfers = GroupTransfers(host_transfers("fake", layouts, runner.memory))
    host = HostTier(8 << 20, [layout.block_bytes for layout in layouts])
    tiers = GroupTiers(TierManager(layouts, HostMover(runner.memory), host, [], 1e9))
    cache = KVCache(layouts, sizes, chunk=LIMITS.token_budget)
    scheduler = build_scheduler(cache, LIMITS, "fake", transfers=transfers, tiers=tiers)
    loop = StepLoop(scheduler, runner)
    info = EngineInfo(
        model="fake",
        fingerprint="fake",
        context_len=300,
        vocab_size=VOCAB,
        eos_ids=(0,),
        kv_groups=layouts,
        transfers=transfers.own.receives_by,
    )
    with listening(str(address)) as (listener, at):
        server = Server(listener, loop, info, "secret", accept_sender=transfers.accept)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        with Client(at) as client:
            yield client, at, tiers
            client.send(Drain(0))
            thread.join(60)
        assert not thread.is_alive()


@pytest.mark.parametrize("layouts", [(FULL,), (FULL, WINDOW)], ids=["full", "window"])
def test_prefill_reuses_and_decode_saves(tmp_path, monkeypatch, layouts):
    monkeypatch.setattr("emberline.kv.tiers.fetch_policy.UNRATED_S", 60.0)
    rng = random.Random(4)
    prompts = [[rng.randrange(1, VOCAB) for _ in range(250)] for _ in range(3)]
    with (
        serving(tmp_path / "p.sock", layouts) as (prefill, _, _),
        serving(tmp_path / "d.sock", layouts) as (decode, d, saved),
    ):
        for turn in range(2):
            for n, prompt in enumerate(prompts):
                id = f"{turn}-{n}"
                first, second = halves(request(id, prompt, temperature=0.0, max_tokens=6), d, f"t{id}")
                decode.submit(second)
                prefill.submit(first)
                ids, finish = expected(prompt, second.sampling, layouts, 300)
                assert (decode.finish(id).finish, decode.tokens(id)) == (finish, ids)
                assert prefill.finish(f"{id}-p").finish == "stop"
        again = [prefill.deltas[f"1-{n}-p"][-1].usage.cached_by_tier for n in range(3)]
        assert all(cached["host"] >= 100 for cached in again)
        assert saved.flush(60)
        assert saved.own.all_tiers[0].stats().blocks > 3 * 10
