"""Transfers between rank groups of any two layouts, over real sockets: every rank gets its slice, ends are clean."""

import time
from contextlib import ExitStack

import msgspec
import pytest

from emberline.engine.parallel.follower_kv import FollowerKV, KVListener
from emberline.engine.parallel.messages import KVCommand, KVReport
from emberline.kv.host_memory import HostMemory, private_pages, shared_pages
from emberline.kv.transfer.host_transfers import host_transfers
from emberline.kv.transfer.messages import Offer
from emberline.kv.transfer.notices import (
    BlocksReceived,
    BlocksReleased,
    EpochReleased,
    OfferGranted,
    OfferReceived,
    SendAcked,
    SenderGaveUp,
    SenderLost,
    SendRejected,
)
from emberline.kv.transfer.rank_commands import dialed
from emberline.protocol.frames import EngineInfo, transfer_ticket
from emberline.protocol.request import Push, RankEndpoint
from tests.kv.transfer.test_slices import GROUP, LATENT, divided, part, whole_block

N_BLOCKS = 8


class Member:
    """What a follower knows of its group."""

    def __init__(self, rank, slices, leader):
        self.rank, self.slices, self._leader = rank, slices, leader

    def send(self, report):
        encoded = msgspec.msgpack.encode(report)  # as it reaches rank 0
        self._leader.report(self.rank, msgspec.msgpack.decode(encoded, type=KVReport).transfers)


class Group:
    """A rank group whose ranks are threads of this process: rank 0 tells the others directly what to do."""

    def __init__(self, whole, layout, folder, name, closing, shared=False):
        self.whole, self.slices = whole, divided(whole, **layout)
        self.pools, self.ranks, self.endpoints = [], [], []
        for rank, slices in enumerate(self.slices):
            pages = [(shared_pages if shared else private_pages)(N_BLOCKS * group.block_bytes) for group in slices]
            descriptors = [page.descriptor for page in pages] if shared else []
            views = [memoryview(page.buffer) for page in pages]
            memory = HostMemory(views, [group.block_bytes for group in slices], descriptors)
            manager = host_transfers("fake", slices, memory)
            listener = KVListener(str(folder / f"{name}{rank}"), closing)
            info = EngineInfo(
                model="m", fingerprint="fake", context_len=1, vocab_size=1, eos_ids=(), transfers=manager.receives_by
            )
            listener.serve(manager, info, "secret")
            self.pools.append(memory)
            self.ranks.append(manager)
            self.endpoints.append(RankEndpoint(listener.address, slices))
            if rank == 0:
                closing.callback(manager.close)
        self.leader = self.ranks[0]
        self.followers = [
            FollowerKV(Member(rank, self.slices, self.leader), manager, None, self.slices[rank])
            for rank, manager in enumerate(self.ranks[1:], 1)
        ]
        for follower in self.followers:
            closing.callback(follower.close)
        if self.followers:
            self.leader.form(self.slices, self._tell)

    def _tell(self, command):
        encoded = msgspec.msgpack.encode(KVCommand(0, command))
        for follower in self.followers:
            follower.execute(msgspec.msgpack.decode(encoded, type=KVCommand).command)

    def expect(self, kind):
        """All notices until there is one of a kind: that one is moved to the end."""
        found, until_s = [], time.monotonic() + 60
        while not any(isinstance(each, kind) for each in found):
            assert time.monotonic() < until_s, f"no {kind} among {found}"
            found += self.leader.notices()
            time.sleep(0.001)
        return sorted(found, key=lambda each: isinstance(each, kind))

    def fill(self, block, content):
        for memory, (group,) in zip(self.pools, self.slices):
            memory.block(0, block)[:] = part(content, group, self.whole).tobytes()

    def has(self, block, content):
        return all(
            bytes(memory.block(0, block)) == part(content, group, self.whole).tobytes()
            for memory, (group,) in zip(self.pools, self.slices)
        )


@pytest.fixture
def closing():
    with ExitStack() as stack:
        yield stack


def pair(whole, senders, receivers, folder, closing, shared=False):
    sender = Group(whole, senders, folder, "s", closing)
    receiver = Group(whole, receivers, folder, "r", closing, shared)
    divided_push = len(sender.ranks) > 1 or len(receiver.ranks) > 1
    push = Push(
        transfer="t",
        address=receiver.endpoints[0].address,
        ticket=transfer_ticket("secret", "sender"),
        ranks=tuple(receiver.endpoints) if divided_push else (),
    )
    return sender, receiver, push


def granted(sender, receiver, push, blocks, epoch=1):
    """Offer and grant; the peer as the receiver's step loop knows it."""
    sender.leader.offer(7, push, 2, b"key")
    *_, offered = receiver.expect(OfferReceived)
    assert offered.offer.tags == tuple(group.tag for group in receiver.slices[0])
    receiver.leader.grant(offered.peer, "t", epoch, [blocks])
    *_, told = sender.expect(OfferGranted)
    assert told.wanted == [set(blocks)]
    return offered.peer


LAYOUTS = [
    (GROUP, {"tp": 1}, {"tp": 1}),
    (GROUP, {"tp": 2}, {"tp": 2}),
    (GROUP, {"tp": 2}, {"tp": 1}),
    (GROUP, {"tp": 1}, {"tp": 2}),
    (GROUP, {"tp": 8}, {"tp": 2}),
    (GROUP, {"pp": 2}, {"tp": 2}),
    (GROUP, {"tp": 2, "pp": 2}, {"tp": 4}),
    (LATENT, {"tp": 2}, {"tp": 2, "dcp": 2}),
    (LATENT, {"tp": 4, "dcp": 4}, {"tp": 2, "pp": 2, "dcp": 2}),
]


@pytest.mark.parametrize("shared", [True, False], ids=["shm", "tcp"])
@pytest.mark.parametrize(("whole", "senders", "receivers"), LAYOUTS)
def test_every_rank_receives_its_slices(tmp_path, closing, whole, senders, receivers, shared):
    sender, receiver, push = pair(whole, senders, receivers, tmp_path, closing, shared)
    contents = [whole_block(whole, seed) for seed in (1, 2)]
    sender.fill(3, contents[0])
    sender.fill(1, contents[1])
    granted(sender, receiver, push, {0: 5, 1: 2})
    sender.leader.send(7, [((0, 0), 3)])
    sender.leader.send(7, [((0, 1), 1)])
    received = []
    while len(received) < 2:
        said = [each for each in receiver.expect(BlocksReceived) if isinstance(each, BlocksReceived)]
        received += [item for each in said for item in each.items]
    assert sorted(received) == [(0, 0), (0, 1)]
    assert receiver.has(5, contents[0])
    assert receiver.has(2, contents[1])
    said = sender.expect(SendAcked)
    released = [item for each in said if isinstance(each, BlocksReleased) for item in each.items]
    assert sorted(released) == [(0, 0), (0, 1)]
    assert not sender.leader._outgoing
    assert not receiver.leader._incoming


@pytest.mark.parametrize(("senders", "receivers"), [({"tp": 2}, {"tp": 1}), ({"tp": 2}, {"tp": 2})])
def test_a_lost_rank_of_the_sender_ends_the_transfer_once(tmp_path, closing, senders, receivers):
    sender, receiver, push = pair(GROUP, senders, receivers, tmp_path, closing)
    peer = granted(sender, receiver, push, {0: 5, 1: 2})
    sender.leader.send(7, [((0, 0), 3)])
    receiver.expect(BlocksReceived)
    for each in sender.ranks[1]._senders.values():
        each.stop()
    lost = [each for each in receiver.expect(SenderLost) if isinstance(each, SenderLost) and each.peer == peer]
    while not lost:
        lost += [each for each in receiver.expect(SenderLost) if isinstance(each, SenderLost) and each.peer == peer]
    assert [each.peer for each in lost] == [peer]
    assert not receiver.leader._incoming
    rejected = sender.expect(SendRejected)
    assert rejected[-1].number == 7
    sender.leader.cancel(7, "over")  # as the step loop does
    end_s = time.monotonic() + 60
    while sender.leader._outgoing:  # until every rank has said that it reads its blocks no more
        assert time.monotonic() < end_s
        sender.leader.notices()
        time.sleep(0.001)


def test_a_transfer_that_not_all_ranks_have_offered_ends_with_the_first_that_is_lost(tmp_path, closing):
    sender, receiver, push = pair(GROUP, {"tp": 2}, {"tp": 1}, tmp_path, closing)
    sender.followers.clear()  # rank 1 hangs
    sender.leader.offer(7, push, 2, b"key")
    while not receiver.leader._incoming:
        assert not [each for each in receiver.leader.notices() if isinstance(each, OfferReceived)]
    sender.leader.close()
    gave_up = next(each for each in receiver.expect(SenderGaveUp) if isinstance(each, SenderGaveUp))
    assert (gave_up.transfer, gave_up.epoch) == ("t", 0)
    assert not receiver.leader._incoming


def test_a_sender_that_gives_up_writes_no_more(tmp_path, closing):
    sender, receiver, push = pair(GROUP, {"tp": 2}, {"tp": 2}, tmp_path, closing)
    peer = granted(sender, receiver, push, {0: 5})
    sender.leader.cancel(7, "the client has gone")
    gave_up = next(each for each in receiver.expect(SenderGaveUp) if isinstance(each, SenderGaveUp))
    assert (gave_up.peer, gave_up.transfer, gave_up.epoch) == (peer, "t", 1)
    assert "the client has gone" in gave_up.message
    assert not receiver.leader._incoming


def test_a_revoked_transfer_is_released_when_no_rank_is_written(tmp_path, closing):
    sender, receiver, push = pair(GROUP, {"tp": 4}, {"tp": 2}, tmp_path, closing)
    peer = granted(sender, receiver, push, {0: 5})
    receiver.leader.revoke(peer, 1)
    said = receiver.expect(EpochReleased)
    assert [each.epoch for each in said if isinstance(each, EpochReleased)] == [1]
    assert not receiver.leader._incoming
    assert sender.expect(SendRejected)[-1].number == 7


def test_layouts_that_do_not_fit_are_refused_on_either_side(tmp_path, closing):
    sender, _, push = pair(GROUP, {"tp": 2}, {"tp": 1}, tmp_path, closing)
    other = RankEndpoint("", divided(LATENT)[0])
    sender.leader.offer(1, Push(transfer="a", address=push.address, ranks=(other,)), 2, b"k")
    assert "another KV layout: head_dim 2 there, 6 here" in sender.expect(SendRejected)[-1].message
    sender.leader.offer(2, Push(transfer="b", address=push.address), 2, b"k")
    assert "which slices" in sender.expect(SendRejected)[-1].message
    alone = Group(GROUP, {"tp": 1}, tmp_path, "alone", closing)
    group = Group(GROUP, {"tp": 2}, tmp_path, "group", closing)
    ticket = transfer_ticket("secret", "sender")
    alone.leader.offer(3, Push(transfer="c", address=group.endpoints[0].address, ticket=ticket), 2, b"k")
    *_, offered = group.expect(OfferReceived)
    assert "this engine has several ranks" in offered.offer.tags[0]
    group.leader.deny(offered.peer, "c", "no")
    assert alone.expect(SendRejected)[-1].message == "no"


def test_an_offer_of_no_kv_groups_is_refused(tmp_path, closing):
    group = Group(GROUP, {"tp": 2}, tmp_path, "group", closing)
    group.leader._notices.put(OfferReceived(1, Offer("t", "fake", (), (), 2, b"k")))
    *_, offered = group.expect(OfferReceived)
    assert "this engine has several ranks" in offered.offer.tags[0]


def test_a_rank_that_listens_on_every_interface_is_dialed_at_the_host_of_its_worker():
    for everywhere in ("tcp:0.0.0.0:71", "tcp:[::]:71"):
        assert dialed(everywhere, "tcp:gpu7:7070") == "tcp:gpu7:71"
        assert dialed(everywhere, "tcp:[fd00::7]:7070") == "tcp:[fd00::7]:71"
    assert dialed("tcp:gpu8:71", "tcp:gpu7:7070") == "tcp:gpu8:71"
    assert dialed("", "tcp:gpu7:7070") == "tcp:gpu7:7070"
    assert dialed("unix:/run/w.rank1", "unix:/run/w") == "unix:/run/w.rank1"
