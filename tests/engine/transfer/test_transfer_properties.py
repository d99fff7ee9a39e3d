"""KV transfer under random aborts, lost connections and delays: right tokens, one end per request, no leaks."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emberline.engine.transfer import incoming, outgoing
from emberline.engine.transfer.handover import Handover
from emberline.kv.block_pool import NULL_BLOCK
from emberline.protocol.request import EngineRequest, Push, SamplingParams
from emberline.protocol.token_ids import pack, unpack
from tests.engine.fakes import FULL, VOCAB, expected, request, window_group
from tests.engine.transfer.fake_wire import Wire
from tests.examples import n_examples

prompts = st.builds(
    lambda start, n, tail: [(start + i) % VOCAB for i in range(n)] + tail,
    st.integers(0, 1),
    st.sampled_from([0, 16, 31, 33, 48, 80]),
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20),
)
setups = st.fixed_dictionaries(
    {
        "n_blocks": st.integers(8, 24),
        "max_running": st.integers(1, 4),
        "token_budget": st.integers(5, 64),
        "steps_in_flight": st.integers(1, 3),
    }
)
layouts = st.sampled_from([(FULL,), (FULL, window_group(20)), (window_group(37), FULL)])
actions = st.one_of(
    st.tuples(
        st.just("pair"),
        prompts,
        st.tuples(st.integers(0, 2), st.booleans(), st.sampled_from(["", "", "", "other weights", "other prompt"])),
    ),
    st.tuples(st.just("local"), prompts, st.booleans()),
    st.tuples(st.just("abort"), st.booleans(), st.integers(0, 5)),
    st.tuples(st.just("ticks"), st.sampled_from(["prefill", "decode", "both"]), st.integers(1, 12)),
    st.tuples(st.just("steps"), st.sampled_from(["prefill", "decode", "both"]), st.integers(1, 6)),
    st.tuples(st.just("cut"), st.none(), st.none()),
    st.tuples(st.just("time"), st.sampled_from([1.0, incoming.LEASE_S, outgoing.TIMEOUT_S]), st.none()),
)


class TransferChecker:
    def __init__(self, layouts, prefill, decode):
        common = {"layouts": layouts, "context_len": 128}
        self.wire = Wire({**common, **prefill}, {**common, **decode})
        self.wire.decode.runner.meanwhile = self.wire.tick
        self.layouts = layouts
        self.now_s = 0.0
        self.ids = []

    def side(self, name):
        return self.wire.prefill if name == "prefill" else self.wire.decode

    def submit(self, side, wanted):
        if len(wanted.prompt_ids) // 4 >= side.scheduler.limits.context_len:
            return
        side.scheduler.submit(wanted, self.now_s)
        side.accepted[wanted.id] = wanted
        side.tokens[wanted.id] = []
        self.ids.append((side, wanted.id))

    def pair(self, prompt, how, **sampling):
        priority, decode_first, mismatch = how
        id = f"r{len(self.ids)}"
        push = Push(transfer=f"t-{id}", address="", ticket=mismatch)
        halves = [
            (
                self.wire.decode,
                msgspec.structs.replace(request(id, prompt, priority, **sampling), awaits=push.transfer),
            ),
            (
                self.wire.prefill,
                EngineRequest(
                    id=f"{id}-p", prompt_ids=pack(prompt), sampling=SamplingParams(), push=push, priority=priority
                ),
            ),
        ]
        fits = min(side.scheduler.limits.context_len for side, _ in halves)
        if len(prompt) < fits:
            for side, wanted in halves if decode_first else reversed(halves):
                self.submit(side, wanted)

    def step(self, side):
        if side.busy:
            self.take(side, side.loop.step(self.now_s))
        self.check_blocks()

    def take(self, side, deltas):
        for delta in deltas:
            assert delta.id not in side.ended, "nothing follows a terminal delta"
            side.tokens[delta.id] += unpack(delta.token_ids)
            if delta.finish is not None:
                side.ended[delta.id] = delta
                if delta.finish == "error":
                    assert (delta.error.kind, delta.error.param) == ("unavailable", "transfer")

    def check_blocks(self):
        """Each reference belongs to a running sequence, an incoming transfer, the quarantine or a pin."""
        for side in (self.wire.prefill, self.wire.decode):
            held = side.scheduler.feature(Handover).references()
            for seq in side.scheduler.snapshot():
                held.update((g, block) for g, blocks in enumerate(seq.blocks) for block in blocks)
            for g, group in enumerate(side.cache.groups):
                refs = {block: n for (number, block), n in held.items() if number == g and block != NULL_BLOCK}
                assert {b: n for b, n in enumerate(group.pool.refs) if n} == refs
                assert len(refs) + group.pool.n_free == group.pool.n_total

    def act(self, action, what, how):
        if action == "pair":
            self.pair(what, how)
        elif action == "local":
            side = self.wire.prefill if how else self.wire.decode
            self.submit(side, request(f"r{len(self.ids)}", what))
        elif action == "abort" and self.ids:
            side, id = self.ids[-1 - how % len(self.ids)]
            delta = side.scheduler.abort(id)
            self.take(side, [] if delta is None else [delta])
            self.check_blocks()
        elif action == "ticks":
            for _ in range(how):
                for side in ("prefill", "decode") if what == "both" else (what,):
                    self.side(side).transfers.tick()
        elif action == "steps":
            for _ in range(how):
                for side in ("prefill", "decode") if what == "both" else (what,):
                    self.step(self.side(side))
        elif action == "cut":
            self.wire.cut()
        elif action == "time":
            self.now_s += what

    def finish(self):
        for _ in range(3000):
            if self.wire.quiet and not self.wire.prefill.busy and not self.wire.decode.busy:
                return
            self.wire.tick()
            self.step(self.wire.prefill)
            self.step(self.wire.decode)
            sides = (self.wire.prefill, self.wire.decode)
            if self.wire.quiet and not any(side.scheduler.load().running or side.transfers.queued for side in sides):
                self.now_s += 5.0  # for requests whose counterpart never came
        raise AssertionError("the transfers never end")

    def check(self):
        for side in (self.wire.prefill, self.wire.decode):
            assert side.ended.keys() == side.accepted.keys()
            load = side.loop.load
            assert (load.running, load.waiting, load.waiting_tokens, load.kv_used_blocks) == (0, 0, 0, 0)
            assert (load.awaiting, load.awaiting_tokens, load.pushing, load.quarantined) == (0, 0, 0, 0)
            for id, wanted in side.accepted.items():
                ids, finish = expected(unpack(wanted.prompt_ids), wanted.sampling, self.layouts, 128)
                if wanted.push is not None:
                    assert not side.tokens[id]
                    continue
                assert side.tokens[id] == ids[: len(side.tokens[id])]
                if side.ended[id].finish not in ("cancelled", "error"):
                    assert (side.tokens[id], side.ended[id].finish) == (ids, finish)


@settings(max_examples=n_examples(150), deadline=None)
@given(layouts, setups, setups, st.lists(actions, min_size=2, max_size=25))
def test_transfers_are_safe_under_random_faults(layouts, prefill, decode, script):
    checker = TransferChecker(layouts, prefill, decode)
    for each in script:
        checker.act(*each)
    checker.finish()
    checker.check()


@settings(max_examples=n_examples(50), deadline=None)
@given(layouts, setups, setups, st.lists(prompts, min_size=1, max_size=6))
def test_without_faults_every_transfer_succeeds(layouts, prefill, decode, wanted):
    checker = TransferChecker(layouts, prefill, decode)
    for n, prompt in enumerate(wanted):
        checker.pair(prompt, (n % 3, n % 2 == 0, ""))
    checker.finish()
    checker.check()
    for side in (checker.wire.prefill, checker.wire.decode):
        assert {delta.finish for delta in side.ended.values()} <= {"stop", "length"}


@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
@pytest.mark.parametrize("how", ["abort", "stop"])
def test_a_block_is_granted_after_the_last_step_that_may_write_it(how, steps_in_flight):
    """The decode worker has room for the transfer in the blocks of a sequence only, whose steps are in flight."""
    decode = {"n_blocks": 9, "max_running": 2, "token_budget": 64, "steps_in_flight": steps_in_flight}
    checker = TransferChecker((FULL,), {"n_blocks": 24}, decode)
    wire = checker.wire
    stop_ids = (1, 2, 3, 4) if how == "stop" else ()
    checker.submit(wire.decode, request("local", [5, 6] * 22, max_tokens=60, min_tokens=9, stop_ids=stop_ids))
    while len(wire.decode.tokens["local"]) < 8:
        checker.step(wire.decode)
    checker.pair([1, 2, 3, 4] * 24, (1, True, ""))
    while not any(message[0] == "offer" for message in wire.to_decode):
        wire.prefill.transfers.tick()
        checker.step(wire.prefill)
    wire.decode.transfers.tick()  # the offer has arrived
    if how == "abort":
        checker.take(wire.decode, [wire.decode.scheduler.abort("local")])

    def send():
        """The sender writes as soon as it may, long before a step of the decode worker is done."""
        for _ in range(30):
            wire.tick()
            checker.step(wire.prefill)

    wire.decode.runner.meanwhile = send
    checker.finish()
    checker.check()
    assert wire.decode.ended["r1"].finish == "length"


@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
@pytest.mark.parametrize("how", ["abort", "stop"])
def test_an_engine_does_not_sleep_before_it_has_granted_the_blocks_that_became_free(how, steps_in_flight):
    """Its server calls no step while it is blocked."""
    decode = {"n_blocks": 9, "max_running": 2, "token_budget": 64, "steps_in_flight": steps_in_flight}
    checker = TransferChecker((FULL,), {"n_blocks": 24}, decode)
    wire, loop = checker.wire, checker.wire.decode.loop
    checker.submit(wire.decode, request("local", [5, 6] * 22, max_tokens=12))
    while len(wire.decode.tokens["local"]) < 8:
        checker.step(wire.decode)
    checker.pair([1, 2, 3, 4] * 24, (1, True, ""))
    while not any(message[0] == "offer" for message in wire.to_decode):
        wire.prefill.transfers.tick()
        checker.step(wire.prefill)
    wire.decode.runner.meanwhile = lambda: None
    wire.decode.transfers.tick()  # the offer has arrived
    checker.step(wire.decode)
    if how == "abort":
        checker.take(wire.decode, [wire.decode.scheduler.abort("local")])
        checker.step(wire.decode)  # a message of a client wakes it
    for _ in range(20):
        if not loop.blocked or loop.wake_s <= checker.now_s:
            checker.step(wire.decode)
    assert wire.decode.transfers.commands[0][0] == "grant"


@pytest.mark.parametrize("how", ["abort", "lease"])
def test_quarantined_blocks_are_not_reused(how):
    checker = TransferChecker((FULL,), {"n_blocks": 24}, {"n_blocks": 10, "max_running": 4, "token_budget": 64})
    wire = checker.wire
    checker.pair([1, 2, 3, 4] * 25, (1, True, ""))
    while not any(command[0] == "send" for command in wire.prefill.transfers.commands):
        wire.tick()
        checker.step(wire.prefill)
        checker.step(wire.decode)
    if how == "abort":
        checker.act("abort", None, 1)
    else:
        for _ in range(2):
            checker.act("time", incoming.LEASE_S + incoming.GRACE_S, None)
            checker.step(wire.decode)
    assert wire.decode.loop.load.quarantined >= 5
    checker.submit(wire.decode, request("local", [5, 6] * 50, max_tokens=12))
    for _ in range(3):
        checker.step(wire.decode)
    assert wire.decode.loop.load.running == 0, "there is no room for it but in quarantined blocks"
    for _ in range(20):
        wire.prefill.transfers.tick()  # it has not read the revocation yet: it writes all
    checker.finish()
    checker.check()
    assert wire.decode.ended["local"].finish == "length"


def test_a_grant_that_crosses_the_end_of_its_sender_is_revoked():
    """Until the sender has acknowledged that, its blocks are quarantined."""
    checker = TransferChecker((FULL,), {"n_blocks": 24}, {"n_blocks": 10, "max_running": 4, "token_budget": 64})
    wire = checker.wire
    checker.pair([1, 2, 3, 4] * 25, (1, True, ""))
    while not any(message[0] == "offer" for message in wire.to_decode):
        wire.prefill.transfers.tick()
        checker.step(wire.prefill)
    wire.decode.transfers.tick()
    checker.take(wire.prefill, [wire.prefill.scheduler.abort("r0-p")])
    while not any(message[0] == "failed" for message in wire.to_decode):
        wire.prefill.transfers.tick()
    checker.step(wire.decode)  # grants
    assert wire.decode.transfers.commands[0][0] == "grant"
    wire.decode.transfers._handle(*wire.to_decode.popleft())  # the receiver reads before it sends the grant
    checker.step(wire.decode)
    assert is_failed(wire.decode.ended["r0"])
    assert wire.decode.loop.load.quarantined == 6
    checker.finish()
    checker.check()


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("how", ["grows", "arrives"])
def test_the_first_in_rank_advances_though_received_prompts_hold_the_blocks(how, steps_in_flight):
    """They wait for the only slot, after a sequence that needs blocks of theirs: it grows, or is of a better class."""
    decode = {"n_blocks": 10, "max_running": 1, "token_budget": 64, "steps_in_flight": steps_in_flight}
    checker = TransferChecker((FULL,), {"n_blocks": 24}, decode)
    wire = checker.wire
    n_output = 90 if how == "grows" else 30
    checker.submit(wire.decode, request("local", [5, 6] * 4, max_tokens=n_output))
    checker.step(wire.decode)
    for n in range(3):
        checker.pair([1, 2, 3, 4 + n] * 9, (1, True, ""))
    while wire.decode.loop.load.waiting < 3:
        wire.tick()
        checker.step(wire.prefill)
        wire.decode.transfers.tick()
        if wire.decode.transfers.queued:
            checker.step(wire.decode)
    if how == "arrives":
        checker.submit(wire.decode, request("better", [3, 1] * 50, priority=0, max_tokens=8))
    checker.finish()
    checker.check()
    assert {delta.finish for delta in wire.decode.ended.values()} <= {"stop", "length"}


def is_failed(delta):
    return delta.finish == "error" and "gave up" in delta.error.message
