"""Host memory of several ranks under pressure: followers evict what rank 0 evicts, so that fetches find it."""

import random
from contextlib import ExitStack

import msgspec
import pytest

from emberline.engine.addresses import listening
from emberline.engine.tiers.opening import KEY_VARIABLE
from emberline.engine.worker.socket_server import Server
from tests.engine.fakes import VOCAB, request
from tests.engine.ranks.rank_engine import INFO, WAIT_S, RankEngine
from tests.engine.ranks.test_rank_kv_properties import TierScript

N_SESSIONS, N_TURNS = 8, 60


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_what_waits_for_a_plan_when_the_worker_ends_is_saved_on_every_rank(tmp_path, n_ranks):
    with ExitStack() as closing, listening(str(tmp_path / "worker")) as (listener, _):
        engine = RankEngine(n_ranks, n_blocks=20, host_blocks=64, closing=closing, steps_in_flight=2)
        server = Server(listener, engine.loop, INFO, "secret")
        engine.loop.submit(request("a", [3] * 100, max_tokens=200), 0.0)
        while not engine.loop.scheduler.orders:
            engine.pump()
            engine.loop.step(0.0)
        server.drain(0.0)
        server.run()
        engine.pump()
        assert all(manager.flush(WAIT_S) for manager in engine.managers[1:])
        saved = {key for _, key in engine.book.contents}
        held = [{key for key, _ in manager.all_tiers[0].held()} for manager in engine.managers]
        assert saved
        assert held == [saved] * n_ranks


def turns(engine):
    """Turns of sessions, half of which end in tool calls and come back soon. Retention keeps them longer than others
    that are as old."""
    script, rng = TierScript(engine, 5), random.Random(5)
    script.step_s = 0.0  # no fetch is late, however busy the machine is
    heads = [[rng.randrange(VOCAB) for _ in range(90)] for _ in range(N_SESSIONS)]
    for turn in range(N_TURNS):
        session = rng.choice([rng.randrange(4), rng.randrange(N_SESSIONS)])
        wanted = request(f"r{turn}", heads[session], session=f"s{session}")
        if session > 5:
            wanted = msgspec.structs.replace(wanted, session_final=True)
        engine.loop.submit(wanted, script.now_s)
        script.accepted[wanted.id], script.tokens[wanted.id] = wanted, []
        script.finish()
        engine.flush()  # what is fetched is where rank 0 says
        if session < 4:
            engine.loop.called_tools(wanted.id)
        script.now_s += 2.0
    script.check()
    return engine.book


@pytest.mark.parametrize("n_ranks", [2, 3])
def test_followers_evict_what_rank_0_evicts(n_ranks):
    with ExitStack() as closing:
        engine = RankEngine(n_ranks, n_blocks=14, host_blocks=24, closing=closing)
        book = turns(engine)
        assert book.n_wanted > 30
        assert engine.recomputed["host"] == 0
        held = [{key for key, _ in manager.all_tiers[0].held()} for manager in engine.managers]
        assert engine.managers[0].all_tiers[0].stats().evicted > 30
        assert all(each == held[0] for each in held)


@pytest.mark.parametrize("n_ranks", [2, 3])
def test_followers_evict_from_disk_what_rank_0_evicts(n_ranks, tmp_path, monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, "ab" * 32)
    with ExitStack() as closing:
        engine = RankEngine(n_ranks, n_blocks=14, host_blocks=0, closing=closing, disk=(tmp_path, 36))
        book = turns(engine)
        disks = [manager.all_tiers[0] for manager in engine.managers]
        assert disks[0].stats().evicted > 30
        assert [disk.stats().evicted for disk in disks[1:]] == [0] * (n_ranks - 1), "by themselves"
        assert book.n_wanted > 30
        assert engine.recomputed.total() == 0
        first, *others = [{key for key, _ in disk.held()} for disk in disks]
        assert all(first <= each for each in others)
