"""Transfers between rank groups of any two layouts, over real sockets: every rank gets its slice, ends are clean."""

import time
from contextlib import ExitStack

import pytest

from emberline.kv.transfer.manager import dialed
from emberline.kv.transfer.messages import Offer, Revoke
from emberline.kv.transfer.notices import (
    BlocksReceived,
    BlocksReleased,
    EpochReleased,
    OfferReceived,
    SenderGaveUp,
    SenderLost,
    SendRejected,
)
from emberline.protocol.frames import transfer_ticket
from emberline.protocol.parallel_layout import MAX_RANKS
from emberline.protocol.request import Push, RankEndpoint
from tests.kv.transfer.rank_groups import GROUP, LATENT, LAYOUTS, Group, check_received, divided, granted, pair


@pytest.fixture
def closing():
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize("shared", [True, False], ids=["shm", "tcp"])
@pytest.mark.parametrize(("whole", "senders", "receivers"), LAYOUTS)
def test_every_rank_receives_its_slices(tmp_path, closing, whole, senders, receivers, shared):
    check_received(*pair(whole, senders, receivers, tmp_path, closing, shared))


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


def test_blocks_are_released_once_no_part_reads_them(tmp_path, closing):
    leader, item = Group(GROUP, {"tp": 1}, tmp_path, "s", closing).leader, (0, 0)
    leader.order = [].append  # no rank does anything
    endpoints = tuple(RankEndpoint("", slices) for slices in divided(GROUP, tp=2))
    leader.offer(7, Push(transfer="t", address="", ranks=endpoints), 2, b"key")
    leader.send(7, [(item, 3)])
    leader.report(0, [BlocksReleased(7 * MAX_RANKS + 1, [item])])
    assert leader.notices() == []
    leader.report(0, [BlocksReleased(7 * MAX_RANKS, [item])])
    assert leader.notices() == [BlocksReleased(7, [item])]


class Receivers:
    """A decode engine of two ranks as rank 0 sees it: a test says what its ranks report, and no rank does anything."""

    def __init__(self, folder, closing):
        self.leader, self.orders = Group(GROUP, {"tp": 2}, folder, "r", closing).leader, []
        self.leader.order = self.orders.append
        senders = divided(GROUP, tp=4)  # two for each of our ranks
        self.peers = {sender: (sender // 2, 10 + sender) for sender in range(4)}  # our rank, and the connection there
        for sender, (rank, peer) in self.peers.items():
            offer = Offer("t", "fake", (senders[sender][0].tag,), (1,), 2, b"key", sender, senders)
            self.leader.report(rank, [OfferReceived(peer, offer)])
        (offered,) = self.leader.notices()
        self.peer = offered.peer
        self.leader.grant(self.peer, "t", 1, [{0: 5}])

    def stopped(self, sender):
        """A rank reports that a sender writes no more. Returns what the step loop is told."""
        rank, peer = self.peers[sender]
        self.leader.report(rank, [EpochReleased(1, peer)])
        return self.leader.notices()

    @property
    def revoked(self):
        told = [order.peers for order in self.orders if isinstance(order.message, Revoke)]
        assert len(told) == 1, "once"
        return {(rank, peer) for rank, peers in told[0].items() for peer in peers}


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2)])
def test_a_revoked_transfer_ends_when_every_part_of_every_rank_has_stopped(tmp_path, closing, order):
    receivers = Receivers(tmp_path, closing)
    receivers.leader.revoke(receivers.peer, 1)
    *first, last = order
    assert [receivers.stopped(sender) for sender in first] == [[], [], []]
    assert receivers.revoked == set(receivers.peers.values())
    assert receivers.stopped(last) == [EpochReleased(1)]
    assert receivers.stopped(last) == [], "once"


@pytest.mark.parametrize("kind", [SenderLost, SenderGaveUp])
def test_a_transfer_that_one_part_ends_has_ended_when_all_parts_have_stopped(tmp_path, closing, kind):
    receivers = Receivers(tmp_path, closing)
    rank, peer = receivers.peers[1]
    says = {SenderLost: SenderLost(peer, "why"), SenderGaveUp: SenderGaveUp(peer, "t", 1, "why")}[kind]
    receivers.leader.report(rank, [says])
    assert receivers.leader.notices() == []
    assert receivers.revoked == set(receivers.peers.values()) - {(rank, peer)}
    receivers.leader.report(0, [BlocksReceived(1, [(0, 0)])])
    assert [receivers.stopped(sender) for sender in (0, 2)] == [[], []]
    (told,) = receivers.stopped(3)
    assert isinstance(told, kind)
    assert (told.peer, told.message) == (receivers.peer, "why")


def test_a_revocation_that_crosses_the_end_of_a_part_is_answered_as_a_revocation(tmp_path, closing):
    receivers = Receivers(tmp_path, closing)
    rank, peer = receivers.peers[0]
    receivers.leader.report(rank, [SenderLost(peer, "gone")])
    assert receivers.leader.notices() == []
    receivers.leader.revoke(receivers.peer, 1)
    assert [receivers.stopped(sender) for sender in (1, 2, 3)] == [[], [], [EpochReleased(1)]]
    assert receivers.revoked == set(receivers.peers.values()) - {(rank, peer)}


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
    group.ranks[0].queue.put(OfferReceived(1, Offer("t", "fake", (), (), 2, b"k")))
    *_, offered = group.expect(OfferReceived)
    assert "this engine has several ranks" in offered.offer.tags[0]


def test_a_rank_that_listens_on_every_interface_is_dialed_at_the_host_of_its_worker():
    for everywhere in ("tcp:0.0.0.0:71", "tcp:[::]:71"):
        assert dialed(everywhere, "tcp:gpu7:7070") == "tcp:gpu7:71"
        assert dialed(everywhere, "tcp:[fd00::7]:7070") == "tcp:[fd00::7]:71"
    assert dialed("tcp:gpu8:71", "tcp:gpu7:7070") == "tcp:gpu8:71"
    assert dialed("", "tcp:gpu7:7070") == "tcp:gpu7:7070"
    assert dialed("unix:/run/w.rank1", "unix:/run/w") == "unix:/run/w.rank1"
