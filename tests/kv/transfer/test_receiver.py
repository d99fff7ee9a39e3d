"""What a receiver believes of what a sender says."""

import socket

import pytest

from emberline.kv.transfer.connection import PeerConnection
from emberline.kv.transfer.messages import (
    Denied,
    Grant,
    KeepAlive,
    Offer,
    OpenTransport,
    Revoke,
    RevokeAck,
    SendFailed,
    TransportOpened,
    to_sender,
)
from emberline.kv.transfer.notices import EpochReleased, LeaseRenewed, OfferReceived, SenderGaveUp, SenderLost
from emberline.kv.transfer.receiver import Receiver


class Transport:
    linger_s = 0.0

    def __init__(self, name):
        self.name = name

    def opened(self):
        return TransportOpened([self.name.encode()]), []


class Pair:
    """A receiver with its thread, and the connection of a sender that says what the test tells it to."""

    def __init__(self):
        here, there = socket.socketpair()
        there.settimeout(60)
        self.notices = []
        self.sender = PeerConnection(there)
        self.sender.set_timeout(60)
        transports = [Transport("first"), Transport("second")]
        self.receiver = Receiver(1, "p", PeerConnection(here), None, transports, self.notices.append)
        self.receiver.start()

    def grant(self, transfer, epoch):
        self.receiver.command(Grant(transfer, epoch, [{0: 5}]))
        assert self.sender.receive(to_sender).epoch == epoch

    def close(self):
        """All that the sender has said is handled."""
        self.sender.close()
        self.receiver._thread.join(60)
        assert isinstance(self.notices.pop(), SenderLost)


@pytest.fixture
def pair():
    return Pair()


def test_a_sender_ends_only_the_epoch_of_its_own_transfer(pair):
    pair.grant("a", 7)
    pair.sender.send(SendFailed("b", "gave up"))
    pair.sender.send(KeepAlive([7, 8]))
    pair.sender.send(SendFailed("a", "gave up"))
    pair.sender.send(KeepAlive([7, 8]))
    pair.close()
    assert pair.notices == [SenderGaveUp(1, "b", 0, "gave up"), LeaseRenewed(7), SenderGaveUp(1, "a", 7, "gave up")]


def test_a_sender_releases_only_epochs_that_were_revoked(pair):
    pair.grant("a", 7)
    pair.grant("b", 8)
    pair.receiver.command(Revoke(8))
    assert pair.sender.receive(to_sender) == Revoke(8)
    for epoch in (7, 8, 9):
        pair.sender.send(RevokeAck(epoch))
    pair.close()
    assert pair.notices == [EpochReleased(8, 1)]


def test_a_sender_that_cannot_use_a_transport_opens_another_until_it_offers(pair):
    def open_transport(name):
        pair.sender.send(OpenTransport(name))
        return pair.sender.receive(to_sender)

    assert open_transport("first") == TransportOpened([b"first"])
    assert isinstance(open_transport("third"), Denied)
    assert open_transport("second") == TransportOpened([b"second"])
    assert pair.receiver._transport.name == "second"
    offer = Offer("a", "f", (), (), 0, b"")
    pair.sender.send(offer)
    assert isinstance(open_transport("first"), Denied)
    assert pair.receiver._transport.name == "second"
    pair.close()
    assert pair.notices == [OfferReceived(1, offer)]
