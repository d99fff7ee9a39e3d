"""Drafts that only the device knows: rows are planned before it is known how many tokens the ones before them give."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emberline.protocol.block_hash import BLOCK_TOKENS
from emberline.protocol.token_ids import unpack
from tests.engine.core.test_scheduler_properties import InvariantChecker, arrivals, play, setups
from tests.engine.fakes import FULL, expected, request
from tests.engine.speculation.standin import DeviceSpeculation, DraftingRunner
from tests.examples import n_examples

DEPTH = 4


class PublishChecker(InvariantChecker):
    """Also checks that what joins the prefix index is full, and computed by then: it may be saved or sent at once."""

    def __init__(self, setup, steps_in_flight, speculation, runner):
        super().__init__(setup, steps_in_flight, speculation, runner)
        self.speculation = speculation
        self.n_published = 0
        publish = self.cache.publish

        def check_and_publish(parts):
            for table, keys, n_blocks in parts:
                held = tuple(tuple(each.blocks) for each in table.groups)
                (seq,) = (seq for seq in self.scheduler.snapshot() if seq.state == "running" and seq.blocks == held)
                assert len(keys) >= n_blocks <= len(seq.ids) // 4 // BLOCK_TOKENS
                ids = unpack(seq.ids)
                for g, held in enumerate(table.groups):
                    for j in range(max(table.n_published, held.n_passed), n_blocks):
                        content = self.runner.blocks[g][held.blocks[j]]
                        assert [entry and entry[0] for entry in content] == ids[BLOCK_TOKENS * j :][:BLOCK_TOKENS]
                self.n_published = n_blocks
            publish(parts)

        self.cache.publish = check_and_publish


def device_checker(setup, steps_in_flight, wrong, depth=DEPTH):
    speculation = DeviceSpeculation(depth)
    return PublishChecker(setup, steps_in_flight, speculation, lambda cache: DraftingRunner(cache, wrong))


@settings(max_examples=n_examples(100), deadline=None)
@given(st.lists(arrivals, min_size=1, max_size=7), setups, st.integers(1, 3), st.sampled_from([0, 1, 2, 5]))
def test_every_request_ends_once_with_the_right_tokens(crowd, setup, steps_in_flight, wrong):
    play(device_checker(setup, steps_in_flight, wrong), crowd)


@settings(max_examples=n_examples(40), deadline=None)
@given(st.lists(arrivals, min_size=1, max_size=7), setups, st.integers(1, 3), st.sets(st.integers(0, 80), max_size=8))
def test_the_same_while_steps_fail_now_and_then(crowd, setup, steps_in_flight, failing):
    play(device_checker(setup, steps_in_flight, 5), crowd, failing)


def prompt_ending_at(n_output, length):
    """A prompt of `length` tokens, and a stop token that the reply to it has first at its n_output-th place."""
    for start in range(500):
        prompt = [(start // 7**place + place) % 7 for place in range(length)]
        ids, _ = expected(prompt, request("a", prompt, max_tokens=n_output).sampling, (FULL,), 512)
        if ids[-1] not in ids[:-1]:
            return prompt, ids
    raise AssertionError("none is known")


@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
@pytest.mark.parametrize("total", range(2 * BLOCK_TOKENS - 3, 2 * BLOCK_TOKENS + 4))
def test_a_reply_that_ends_within_accepted_drafts_publishes_no_more_than_its_blocks(total, steps_in_flight):
    n_accepted = 0
    for n_output in range(3, 11):  # at each place of a run, behind rows in flight or not
        prompt, ids = prompt_ending_at(n_output, total - n_output)
        checker = device_checker({"token_budget": 64}, steps_in_flight, 0)
        for id in ("first", "again"):  # this one finds what was published
            checker.scheduler.submit(request(id, prompt, max_tokens=40, stop_ids=(ids[-1],)), 0.0)
            deltas = []
            while checker.loop.busy:
                deltas += checker.loop.step(0.0)
            assert [token for delta in deltas for token in unpack(delta.token_ids)] == ids
            assert deltas[-1].finish == "stop"
            assert checker.n_published in (total // BLOCK_TOKENS, (total - 1) // BLOCK_TOKENS)
            assert checker.cache.n_used == 0
        n_accepted += checker.speculation.n_accepted
    assert n_accepted > 20
