"""Slices of blocks: what one rank has of another's, for any two layouts of one model."""

from itertools import product

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberline.kv.slices import SliceMismatch, block_runs, routes, runs
from emberline.protocol.block_hash import KVGroup
from tests.kv.transfer.rank_groups import GROUP, LATENT, divided, part, whole_block


def layouts(latent):
    if latent:
        return st.sampled_from([{"tp": t, "pp": p, "dcp": d} for t in (1, 2, 4) for p in (1, 2) for d in (1, t)])
    return st.sampled_from([{"tp": t, "pp": p} for t in (1, 2, 4, 8) for p in (1, 2, 4)])


@given(st.booleans(), st.data())
def test_every_byte_of_every_rank_is_sent_once(latent, data):
    whole = LATENT if latent else GROUP
    senders, receivers = (divided(whole, **data.draw(layouts(latent))) for _ in range(2))
    block = whole_block(whole)
    written = [np.zeros(each[0].block_bytes, np.uint8) for each in receivers]
    times = [np.zeros(each[0].block_bytes, int) for each in receivers]
    for sender, receiver in routes(senders, receivers):
        ours = part(block, senders[sender][0], whole).view(np.uint8).reshape(-1)
        for run in runs(senders[sender][0], receivers[receiver][0]):
            target = slice(run.target, run.target + run.n_bytes)
            written[receiver][target] = ours[run.source : run.source + run.n_bytes]
            times[receiver][target] += 1
    for receiver, (got, n) in enumerate(zip(written, times)):
        assert (n == 1).all()
        assert got.tobytes() == part(block, receivers[receiver][0], whole).tobytes()


class UnevenPlanes(KVGroup, frozen=True):
    """Keys of six bytes and values of two."""

    @property
    def row_bytes(self):
        return 6, 2


@given(st.sampled_from([(1, 2), (2, 1), (2, 2)]), st.sampled_from([(0, 16), (4, 12)]))
def test_planes_of_different_width_are_sent_as_they_lie(heads, tokens):
    """A model of two layers and two heads; both ranks know the same bytes by layer, plane, head and token."""

    def named(group):
        for layer, plane, head in product(group.layers, range(2), range(group.kv_heads)):
            for token, byte in product(range(*group.tokens), range(group.row_bytes[plane])):
                yield layer, plane, group.first_head + head, token, byte

    source = UnevenPlanes("full", (0, 1), heads[0], 1, "float16", first_head=0)
    target = UnevenPlanes("full", (1,), heads[1], 1, "float16", first_head=2 - heads[1], tokens=tokens)
    ours, theirs = list(named(source)), list(named(target))
    assert (len(ours), len(theirs)) == (source.block_bytes, target.block_bytes)
    sent = [(run.source + n, run.target + n) for run in runs(source, target) for n in range(run.n_bytes)]
    assert all(ours[at] == theirs[to] for at, to in sent)
    assert len(set(sent)) == len(sent) == len(set(ours) & set(theirs))


def test_ranks_that_are_divided_alike_send_whole_blocks_to_each_other():
    alike = divided(GROUP, tp=2, pp=2)
    assert routes(alike, alike) == ((0, 0), (1, 1), (2, 2), (3, 3))
    assert block_runs(alike[1], alike[1]) is None


@pytest.mark.parametrize("dcp", [1, 2, 4])
def test_of_ranks_that_hold_the_same_the_one_of_the_same_number_sends(dcp):
    """On GPUs no other reaches the receiver's."""
    same = tuple((rank, rank) for rank in range(4))
    assert routes(divided(LATENT, tp=4, dcp=dcp), divided(LATENT, tp=4, dcp=dcp)) == same
    assert routes(divided(LATENT, tp=4), divided(LATENT, tp=4, dcp=dcp)) == same


def test_of_ranks_that_hold_the_same_each_sends_to_another():
    assert routes(divided(LATENT, tp=4), divided(LATENT, tp=2)) == ((0, 0), (1, 1))


def test_ranks_that_hold_the_same_of_one_group_only_all_send_it():
    """Each rank has a draft model whole, and a part of the divided target."""
    drafter = msgspec.structs.replace(LATENT, name="draft")
    both = tuple((*slices, drafter) for slices in divided(GROUP, tp=2))
    assert set(routes(both, both)) == {(0, 0), (0, 1), (1, 0), (1, 1)}
    with pytest.raises(SliceMismatch, match=f"{GROUP.block_bytes // 2} of the {GROUP.block_bytes} bytes"):
        routes(both[:1], ((GROUP, drafter),))


def test_what_cannot_be_made_is_refused_with_the_reason():
    with pytest.raises(SliceMismatch, match="head_dim 2 there, 4 here"):
        routes(divided(GROUP), divided(msgspec.structs.replace(GROUP, head_dim=4)))
    with pytest.raises(SliceMismatch, match="512 of the 1024 bytes of full"):
        routes(divided(GROUP, pp=2)[:1], divided(GROUP, tp=2))
    turned = msgspec.structs.replace(LATENT, keys="channel")
    with pytest.raises(SliceMismatch, match="stored by channel"):
        routes(divided(turned, tp=2), divided(turned, tp=2, dcp=2))
    with pytest.raises(SliceMismatch, match="1 KV groups there, 2 here"):
        routes(divided(GROUP), (divided(GROUP)[0] * 2,))
