"""Tiers and transfers of several ranks under random delays, losses and aborts: right tokens, each order ends once."""

import random
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emberline.engine.transfer import incoming, outgoing
from emberline.kv.tiers.tier import BlockId, layout_tag
from emberline.protocol import block_hash
from emberline.protocol.frames import transfer_ticket
from emberline.protocol.request import EngineRequest, Push, SamplingParams
from emberline.protocol.token_ids import pack, unpack
from tests.engine.fakes import VOCAB, expected, request
from tests.engine.ranks.rank_engine import WHOLE, WINDOW, Progress, RankEngine
from tests.examples import n_examples

setups = st.fixed_dictionaries(
    {
        "n_ranks": st.integers(1, 4),
        "n_blocks": st.integers(14, 24),
        "host_blocks": st.sampled_from([24, 40, 64]),
        "steps_in_flight": st.integers(1, 2),
        "layouts": st.sampled_from([(WHOLE,), (WHOLE,), (WHOLE, WINDOW)]),
    }
)
ranks = st.integers(0, 3)
actions = st.one_of(
    st.tuples(st.just("submit"), st.integers(0, 3), st.integers(40, 150)),
    st.tuples(st.just("submit"), st.integers(0, 3), st.integers(40, 150)),
    st.tuples(st.just("steps"), st.integers(1, 12), st.just(0)),
    st.tuples(st.just("run"), st.integers(1, 20), st.just(0)),
    st.tuples(st.just("hold"), ranks, st.just(0)),
    st.tuples(st.just("release"), ranks, st.just(0)),
    st.tuples(st.just("hear"), ranks, st.integers(1, 4)),
    st.tuples(st.just("deliver"), ranks, st.integers(1, 4)),
    st.tuples(st.just("pump"), st.just(0), st.just(0)),
    st.tuples(st.just("lose"), ranks, st.integers(0, 40)),
    st.tuples(st.just("abort"), st.integers(0, 3), st.just(0)),
    st.tuples(st.just("time"), st.sampled_from([0.01, 0.1, 5.0]), st.just(0)),
)


class TierScript:
    """Requests of a few sessions with common prefixes, and what happens to them."""

    def __init__(self, engine, seed):
        self.engine, self.rng = engine, random.Random(seed)
        self.heads = [[self.rng.randrange(VOCAB) for _ in range(150)] for _ in range(4)]
        self.accepted, self.tokens, self.ended = {}, {}, {}
        self.now_s, self.step_s = 0.0, 0.001

    def act(self, action, what, how):
        engine, rank = self.engine, what % self.engine.n_ranks if action != "time" else 0
        if action == "submit":
            self.submit(self.heads[what][:how] + [self.rng.randrange(VOCAB) for _ in range(self.rng.randrange(1, 20))])
        elif action in ("steps", "run"):
            for _ in range(what):
                if action == "run":
                    engine.pump()
                self.step()
        elif action == "hold":
            engine.gates[rank].close()
        elif action == "release":
            engine.gates[rank].open()
        elif action == "hear" and rank:
            engine.hear(rank, how)
        elif action == "deliver" and rank:
            engine.deliver(rank, how)
        elif action == "pump":
            engine.pump()
        elif action == "lose":
            engine.lose(rank, how)
        elif action == "abort":
            left = [id for id in self.accepted if id not in self.ended]
            if left and (delta := engine.loop.abort(left[what % len(left)])) is not None:
                self.take([delta])
        elif action == "time":
            self.now_s += what

    def submit(self, prompt):
        wanted = request(f"r{len(self.accepted)}", prompt[: self.engine.limits.context_len - 8])
        self.engine.loop.submit(wanted, self.now_s)
        self.accepted[wanted.id], self.tokens[wanted.id] = wanted, []

    def save_all(self):
        """Every session has had a turn: tiers have what the device pool has lost."""
        for head in self.heads:
            self.submit(head)
            self.finish()

    def step(self):
        self.now_s += self.step_s
        time.sleep(0.0002)  # the threads of the tiers have a turn
        self.take(self.engine.loop.step(self.now_s))

    def take(self, deltas):
        for delta in deltas:
            assert delta.id not in self.ended, "nothing follows a terminal delta"
            self.tokens[delta.id] += unpack(delta.token_ids)
            if delta.finish is not None:
                self.ended[delta.id] = delta

    def finish(self):
        """Go on until every request and every order has ended."""
        engine, progress = self.engine, Progress()
        for gate in engine.gates:
            gate.open()
        while engine.loop.busy or engine.book.open:
            progress.check((len(self.ended), engine.loop.computed_tokens, engine.book.n_named))
            engine.pump()
            self.step()

    def go_on_without(self, silent):
        """Go on for a while though a rank reports nothing: all that it may still read or write stays referenced."""
        engine = self.engine
        for _ in range(100):
            engine.pump(silent)
            self.now_s += 0.1
            self.step()
            assert all(map(engine.is_held, engine.book.blocks))
        assert engine.loop.busy or engine.cache.n_used == len(engine.book.blocks)

    def check(self):
        engine, load = self.engine, self.engine.loop.load
        assert self.ended.keys() == self.accepted.keys()
        assert (load.fetching, load.running, load.waiting, load.kv_used_blocks) == (0, 0, 0, 0)
        assert engine.cache.n_used == 0, "nothing is pinned"
        assert not engine.faults
        for id, wanted in self.accepted.items():
            ids, finish = expected(
                unpack(wanted.prompt_ids), wanted.sampling, engine.layouts, engine.limits.context_len
            )
            assert self.tokens[id] == ids[: len(self.tokens[id])]
            if self.ended[id].finish != "cancelled":
                assert (self.tokens[id], self.ended[id].finish) == (ids, finish)


@settings(max_examples=n_examples(28), deadline=None)
@given(setups, st.integers(0, 1 << 20), st.lists(actions, min_size=5, max_size=40), ranks)
def test_tiers_of_all_ranks_are_one(setup, seed, script, silent):
    with ExitStack() as closing:
        tiers = TierScript(RankEngine(closing=closing, **setup), seed)
        tiers.save_all()
        for each in script:
            tiers.act(*each)
        if silent := silent % setup["n_ranks"]:
            tiers.go_on_without(silent)
        tiers.finish()
        tiers.check()


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_blocks_after_one_that_a_rank_has_lost_count_as_recomputed(n_ranks):
    with ExitStack() as closing:
        tiers = TierScript(RankEngine(n_ranks, 20, 64, closing), 3)
        engine, (first, *_) = tiers.engine, tiers.heads
        tiers.save_all()
        assert engine.recomputed["host"] == 0
        tiers.submit(first)
        tiers.finish()
        assert (engine.book.n_wanted, engine.recomputed["host"]) == (9, 0)
        tiers.save_all()  # which evicts it from the device pool
        n_wanted = engine.book.n_wanted
        keys = list(block_hash.split(block_hash.chain(block_hash.root("fake", b""), pack(first))))
        lost = BlockId(keys[5], layout_tag(engine.slices[-1][0]))
        engine.managers[-1].all_tiers[0].remove([lost])
        tiers.submit([*first, 1])
        tiers.finish()
        tiers.check()
        if n_ranks == 1:
            assert (engine.book.n_wanted - n_wanted, engine.recomputed["host"]) == (5, 0), "rank 0 knows what it lacks"
        else:
            assert engine.book.n_wanted - n_wanted >= 9
            assert engine.recomputed["host"] >= 4


def test_nothing_is_recomputed_for_a_request_that_ends_while_it_is_fetched():
    with ExitStack() as closing:
        tiers = TierScript(RankEngine(2, 20, 64, closing), 3)
        tiers.save_all()
        tiers.engine.gates[1].close()
        tiers.submit(tiers.heads[0])
        tiers.act("run", 3, 0)
        assert tiers.engine.loop.load.fetching == 1
        tiers.act("abort", 0, 0)
        assert tiers.engine.cache.n_used > 0, "rank 1 may still write"
        tiers.finish()
        tiers.check()
        assert tiers.engine.recomputed["host"] == 0


sides = st.sampled_from(["prefill", "decode"])
transfer_actions = st.one_of(
    st.tuples(st.just("pair"), st.integers(0, 1), st.integers(20, 120)),
    st.tuples(st.just("pair"), st.integers(0, 1), st.integers(20, 120)),
    st.tuples(st.just("local"), sides, st.integers(20, 80)),
    st.tuples(st.just("run"), sides, st.integers(1, 12)),
    st.tuples(st.just("run"), st.just("both"), st.integers(1, 20)),
    st.tuples(st.just("steps"), sides, st.integers(1, 8)),
    st.tuples(st.just("deliver"), sides, ranks),
    st.tuples(st.just("hear"), sides, ranks),
    st.tuples(st.just("hold"), st.just("decode"), ranks),
    st.tuples(st.just("release"), st.just("decode"), ranks),
    st.tuples(st.just("abort"), sides, st.integers(0, 3)),
    st.tuples(st.just("time"), st.sampled_from([1.0, incoming.LEASE_S, outgoing.TIMEOUT_S]), st.just(0)),
)
deaths = st.none() | st.tuples(sides, st.permutations([0, 1, 2]))


class TransferScript:
    """Prompts that one group computes and another one continues."""

    def __init__(self, prefill, decode):
        self.engines = {"prefill": prefill, "decode": decode}
        self.divided = prefill.n_ranks > 1 or decode.n_ranks > 1
        self.accepted = {name: {} for name in self.engines}
        self.tokens, self.ended = {}, {}
        self.now_s, self.dead = 0.0, set()

    def submit(self, name, wanted):
        if name not in self.dead:
            self.engines[name].loop.submit(wanted, self.now_s)
            self.accepted[name][wanted.id], self.tokens[wanted.id] = wanted, []

    def pair(self, decode_first, n_tokens):
        id = f"r{len(self.tokens)}"
        session, endpoints = len(self.tokens) % 3, self.endpoints
        prompt = [(n * n + session * n) % VOCAB for n in range(n_tokens)] + [len(self.tokens) % VOCAB]
        push = Push(
            transfer=f"t-{id}",
            address=endpoints[0].address,
            ticket=transfer_ticket("secret", "sender"),
            ranks=endpoints if self.divided else (),
        )
        halves = [
            ("decode", msgspec.structs.replace(request(id, prompt), awaits=push.transfer)),
            (
                "prefill",
                EngineRequest(id=f"{id}-p", prompt_ids=pack(prompt), sampling=SamplingParams(), push=push, priority=1),
            ),
        ]
        for name, wanted in halves if decode_first else reversed(halves):
            self.submit(name, wanted)

    @property
    def endpoints(self):
        return tuple(self.engines["decode"].endpoints)

    def act(self, action, what, how):
        if action == "pair":
            self.pair(what, how)
        elif action == "time":
            self.now_s += what
        elif action in ("run", "steps"):
            for _ in range(how):
                for name in self.engines if what == "both" else (what,):
                    self.step(name, pump=action == "run")
        elif what in self.dead:
            return
        elif action == "local":
            self.submit(what, request(f"r{len(self.tokens)}", [1, 2, 3] * (how // 3)))
        elif action == "abort":
            left = [id for id in self.accepted[what] if id not in self.ended]
            if left and (delta := self.engines[what].loop.abort(left[how % len(left)])) is not None:
                self.take([delta])
        else:
            engine = self.engines[what]
            rank = how % engine.n_ranks
            if action in ("hold", "release"):
                (engine.gates[rank].close if action == "hold" else engine.gates[rank].open)()
            elif rank:
                (engine.deliver if action == "deliver" else engine.hear)(rank, 2)

    def step(self, name, pump):
        if name in self.dead:
            return
        if pump:
            self.engines[name].pump()
        time.sleep(0.0002)  # the threads of the connections have a turn
        self.take(self.engines[name].loop.step(self.now_s))

    def take(self, deltas):
        for delta in deltas:
            assert delta.id not in self.ended, "nothing follows a terminal delta"
            self.tokens[delta.id] += unpack(delta.token_ids)
            if delta.finish is not None:
                self.ended[delta.id] = delta
                if delta.finish == "error":
                    assert (delta.error.kind, delta.error.param) == ("unavailable", "transfer")

    def die(self, name, order):
        """A group ends, rank by rank: the other one sees its connections end in this order."""
        self.dead.add(name)
        for rank in order:
            self.engines[name].kill(rank)
            self.act("run", "both", 3)

    def finish(self, timeouts=True):
        """Go on until every request of living engines has ended. Time passes only if nothing else happens."""
        progress, jumped_s = Progress(), 0.0
        living = {name: engine for name, engine in self.engines.items() if name not in self.dead}
        for engine in self.engines.values():
            for gate in engine.gates:
                gate.open()
        while any(engine.loop.busy or engine.loop.load.kv_used_blocks for engine in living.values()):
            for name in living:
                self.step(name, pump=True)
            state = [
                (len(self.ended), load.blocks_pushed, load.blocks_received, load.quarantined, load.awaiting)
                for load in (engine.loop.load for engine in living.values())
            ]
            progress.check(state)
            if timeouts and time.monotonic() > max(progress.still_s, jumped_s) + 0.05:
                self.now_s += outgoing.TIMEOUT_S  # for requests whose counterpart never came
                jumped_s = time.monotonic()
        return living

    def check(self, living):
        for id, delta in self.ended.items():
            if f"{id}-p" in self.ended and self.ended[f"{id}-p"].finish == "stop" and not self.dead:
                assert delta.finish != "error", "what is acknowledged was received"
        for name, engine in living.items():
            load = engine.loop.load
            assert self.accepted[name].keys() <= self.ended.keys()
            assert (load.running, load.waiting, load.waiting_tokens, load.kv_used_blocks) == (0, 0, 0, 0)
            assert (load.awaiting, load.awaiting_tokens, load.pushing, load.quarantined) == (0, 0, 0, 0)
            assert not engine.faults
            for id, wanted in self.accepted[name].items():
                ids, finish = expected(
                    unpack(wanted.prompt_ids), wanted.sampling, engine.layouts, engine.limits.context_len
                )
                if wanted.push is not None:
                    assert not self.tokens[id]
                    continue
                assert self.tokens[id] == ids[: len(self.tokens[id])]
                if self.ended[id].finish not in ("cancelled", "error"):
                    assert (self.tokens[id], self.ended[id].finish) == (ids, finish)


def open_pair(n_prefill, n_decode, folder, closing, layouts=(WHOLE,)):
    prefill = RankEngine(n_prefill, 24, 0, closing, layouts=layouts)
    decode = RankEngine(n_decode, 20, 0, closing, steps_in_flight=2, layouts=layouts)
    decode.listen(Path(folder), "decode", closing)
    return TransferScript(prefill, decode)


def is_harmless(action):
    return action[0] not in ("abort", "time")


@settings(max_examples=n_examples(32), deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.lists(transfer_actions, min_size=4, max_size=25),
    deaths,
    st.sampled_from([(WHOLE,), (WHOLE,), (WHOLE, WINDOW)]),
)
def test_transfers_of_all_ranks_are_one(n_prefill, n_decode, script, death, layouts):
    with TemporaryDirectory() as folder, ExitStack() as closing:
        transfers = open_pair(n_prefill, n_decode, folder, closing, layouts)
        for n, each in enumerate(script):
            if death is not None and n == 3 * len(script) // 4:
                transfers.die(*death)
            transfers.act(*each)
        transfers.check(transfers.finish())


@settings(max_examples=n_examples(24), deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.lists(transfer_actions.filter(is_harmless), min_size=4, max_size=20))
def test_without_faults_every_transfer_of_all_ranks_succeeds(n_prefill, n_decode, script):
    with TemporaryDirectory() as folder, ExitStack() as closing:
        transfers = open_pair(n_prefill, n_decode, folder, closing)
        for each in script:
            transfers.act(*each)
        transfers.check(transfers.finish(timeouts=False))
        assert {delta.finish for delta in transfers.ended.values()} <= {"stop", "length"}


def test_a_transfer_ends_when_every_rank_has_received_its_part(tmp_path):
    with ExitStack() as closing:
        transfers = open_pair(2, 2, tmp_path, closing)
        decode, progress = transfers.engines["decode"], Progress()
        decode.gates[1].close()
        transfers.pair(True, 60)
        while decode.memories[0].n_filled < 3:
            progress.check(decode.memories[0].n_filled)
            transfers.act("run", "both", 1)
        transfers.act("run", "both", 30)
        assert not transfers.ended, "rank 1 has nothing yet"
        assert decode.loop.load.blocks_received == 0
        transfers.check(transfers.finish(timeouts=False))
        assert {id: delta.finish for id, delta in transfers.ended.items()} == {"r0-p": "stop", "r0": "length"}
