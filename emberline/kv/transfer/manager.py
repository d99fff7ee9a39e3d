"""The KV transfers of one rank: its connections to other engines, and a queue of what happens on them."""

import logging
import socket
import ssl
import threading
from collections.abc import Sequence

import msgspec

from emberline.kv.notice_queue import NoticeQueue
from emberline.kv.slices import Slices, block_runs
from emberline.kv.transfer.connection import PeerConnection
from emberline.kv.transfer.messages import Item, Offer
from emberline.kv.transfer.notices import BlocksReleased, Notice, SendAcked, SenderLost, SendRejected
from emberline.kv.transfer.orders import (
    CancelParts,
    OfferParts,
    SendParts,
    TellSenders,
    TransferOrder,
    parts,
)
from emberline.kv.transfer.receiver import Receiver
from emberline.kv.transfer.sender import Sender, TransportOpener
from emberline.kv.transfer.transport import BlockSink, ReceiveTransport, Target
from emberline.protocol.block_hash import KVGroup
from emberline.protocol.parallel_layout import MAX_RANKS

_EVERY_INTERFACE = ("0.0.0.0", "[::]", "::")

_log = logging.getLogger(__name__)


class TransferManager:
    """Does this rank's part of orders. Threads of senders and receivers start when they are needed."""

    def __init__(
        self,
        fingerprint: str,
        layouts: Sequence[KVGroup],
        memory: BlockSink | None,  # for bytes that come over a connection
        receive_transports: Sequence[ReceiveTransport],
        send_transports: Sequence[str],
        open_transport: TransportOpener,
    ) -> None:
        self._fingerprint = fingerprint
        self._layouts = tuple(layouts)
        self._rank = 0
        self.ranks: tuple[Slices, ...] = (self._layouts,)  # slices that each rank of the group has of a block
        self._memory, self._receive_transports = memory, receive_transports
        self._send_transports, self._open_transport = send_transports, open_transport
        self.queue: NoticeQueue[Notice] = NoticeQueue()
        self._lock = threading.Lock()  # guards what follows: a follower's reports have a thread of their own
        self._senders: dict[tuple[str, str, str, bool], Sender] = {}  # by address, our name and ticket there, and parts
        self._by_number: dict[int, Sender] = {}  # by part
        self._receivers: dict[int, Receiver] = {}
        self._n_peers = 0
        self.tls: ssl.SSLContext | None = None  # with this engine's certificate, to send KV to other machines

    def join(self, rank: int, ranks: tuple[Slices, ...]) -> None:
        """Be a rank of a group from now on."""
        self._rank, self.ranks = rank, ranks

    @property
    def receives_by(self) -> tuple[str, ...]:
        """Names of the transports by which others may send KV to us, best first."""
        return tuple(transport.name for transport in self._receive_transports)

    def execute(self, orders: Sequence[TransferOrder]) -> None:
        """Begin this rank's part of orders; threads do it, and `reports` tells what has become of it."""
        with self._lock:
            for order in orders:
                if isinstance(order, TellSenders):
                    for peer in order.peers.get(self._rank, ()):
                        if (receiver := self._receivers.get(peer)) is not None:  # else `SenderLost` is reported
                            receiver.command(order.message)
                    continue
                for rank, to in parts(order.push, self.ranks):
                    if rank == self._rank:
                        self._execute(order.number * MAX_RANKS + to, order, to)

    def _execute(self, number: int, order: OfferParts | SendParts | CancelParts, to: int) -> None:
        """Do the part of an order that concerns one rank of the receiver, under a number of its own."""
        if isinstance(order, OfferParts):
            self._offer(number, order, to)
        elif isinstance(order, SendParts):
            self._send(number, order.blocks)
        elif (sender := self._by_number.pop(number, None)) is not None:
            sender.cancel(number, order.message)

    def reports(self) -> list[Notice]:
        """Take what has happened since the last call, in order."""
        with self._lock:
            taken = self.queue.take()
            for notice in taken:
                if isinstance(notice, SendAcked | SendRejected):
                    self._by_number.pop(notice.number, None)
                elif isinstance(notice, SenderLost):
                    self._receivers.pop(notice.peer, None)
        return taken

    def close(self) -> None:
        """Close all connections; transfers in progress are lost."""
        for sender in self._senders.values():
            sender.stop()
        for receiver in list(self._receivers.values()):
            receiver.stop()
        self.queue.close()

    # --- sending ----------------------------------------------------------------------------------------------------

    def _offer(self, number: int, order: OfferParts, to: int) -> None:
        """Offer what this rank has of each block to one rank of the receiver."""
        push, target = order.push, None
        ranks = self.ranks if push.ranks else ()
        if push.ranks:
            endpoint = push.ranks[to]
            push = msgspec.structs.replace(push, address=dialed(endpoint.address, push.address), ranks=())
            runs = block_runs(self._layouts, endpoint.kv_groups)
            target = None if runs is None else Target(runs, [layout.block_bytes for layout in endpoint.kv_groups])
        tags, block_bytes = zip(*((layout.tag, layout.block_bytes) for layout in self._layouts))
        offer = Offer(push.transfer, self._fingerprint, tags, block_bytes, order.n_blocks, order.key, self._rank, ranks)
        connection = (push.address, push.sender, push.ticket, bool(ranks))
        why = ""
        for _ in range(2):  # reconnect once
            sender = self._senders.get(connection)
            if sender is None or sender.lost:
                self._senders = {other: each for other, each in self._senders.items() if not each.lost}
                sender = self._senders[connection] = Sender(
                    push, self._send_transports, self._open_transport, block_bytes, self.queue.put, self.tls, target
                )
            if sender.offer(number, offer):
                self._by_number[number] = sender
                return
            why = sender.why_lost
        self.queue.put(SendRejected(number, f"no connection to {push.address}: {why}"))

    def _send(self, number: int, blocks: Sequence[tuple[Item, int]]) -> None:
        sender = self._by_number.get(number)
        if sender is None:
            self.queue.put(BlocksReleased(number, [item for item, _ in blocks]))
        else:
            sender.send(number, blocks)

    # --- receiving --------------------------------------------------------------------------------------------------

    def accept(self, sock: socket.socket | PeerConnection, name: str) -> None:
        """Take over the connection of an engine that was greeted and will send KV, from any thread."""
        connection = sock if isinstance(sock, PeerConnection) else PeerConnection(sock)
        with self._lock:
            self._n_peers += 1
            receiver = Receiver(
                self._n_peers, name, connection, self._memory, self._receive_transports, self.queue.put, self._layouts
            )
            self._receivers[receiver.number] = receiver
        _log.info("a sender of KV has connected", extra={"peer": name})
        receiver.start()


def dialed(address: str, worker: str) -> str:
    """Return where a rank of the worker at this address is reached: one that listens on every interface is on the
    worker's machine."""
    host, _, port = address.removeprefix("tcp:").rpartition(":")
    if host in _EVERY_INTERFACE and worker.startswith("tcp:"):
        return f"{worker.rpartition(':')[0]}:{port}"
    return address or worker
