"""All KV transfers of an engine: its connections to other engines, and one queue of notices for the step loop."""

import logging
import socket
import ssl
from collections.abc import Sequence
from typing import Any

from emberline.kv.notice_queue import NoticeQueue
from emberline.kv.slices import Slices, block_runs
from emberline.kv.transfer.connection import PeerConnection
from emberline.kv.transfer.messages import Denied, Grant, Item, Offer, Revoke
from emberline.kv.transfer.notices import BlocksReleased, Notice, SendAcked, SenderLost, SendRejected
from emberline.kv.transfer.receiver import Receiver
from emberline.kv.transfer.sender import Sender, TransportOpener
from emberline.kv.transfer.transport import BlockSink, ReceiveTransport, Target
from emberline.protocol.block_hash import KVGroup
from emberline.protocol.request import Push

_log = logging.getLogger(__name__)


class TransferManager:
    """A `notices.TransferPort` over senders and receivers, whose threads start when they are needed."""

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
        self._memory, self._receive_transports = memory, receive_transports
        self._send_transports, self._open_transport = send_transports, open_transport
        self._notices: NoticeQueue[Any] = NoticeQueue()  # `Notice`; in rank 0 also `RankNotice`
        self.wakeup, self.clear_wakeup = self._notices.wakeup, self._notices.clear_wakeup
        self._senders: dict[tuple[str, str, str, bool], Sender] = {}  # by address, our name and ticket there, and parts
        self._by_number: dict[int, Sender] = {}
        self._receivers: dict[int, Receiver] = {}
        self._n_peers = 0
        self.tls: ssl.SSLContext | None = None  # with this engine's certificate, to send KV to other machines

    @property
    def receives_by(self) -> tuple[str, ...]:
        """Names of the transports by which others may send KV to us, best first."""
        return tuple(transport.name for transport in self._receive_transports)

    @property
    def has_notices(self) -> bool:
        return bool(self._notices)

    def notices(self) -> list[Notice]:
        """In order."""
        taken = self._notices.take()
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
        self._notices.close()

    # --- sending ----------------------------------------------------------------------------------------------------

    def offer(self, number: int, push: Push, n_blocks: int, key: bytes) -> None:
        self._offer(number, push, n_blocks, key)

    def offer_part(
        self, number: int, push: Push, n_blocks: int, key: bytes, rank: int, ranks: tuple[Slices, ...], to: Slices
    ) -> None:
        """What this rank of several has of each block, to a rank at the push's address that has the slices `to`."""
        runs = block_runs(self._layouts, to)
        target = None if runs is None else Target(runs, [layout.block_bytes for layout in to])
        self._offer(number, push, n_blocks, key, rank, ranks, target)

    def _offer(
        self,
        number: int,
        push: Push,
        n_blocks: int,
        key: bytes,
        rank: int = 0,
        ranks: tuple[Slices, ...] = (),
        target: Target | None = None,
    ) -> None:
        tags, block_bytes = zip(*((layout.tag, layout.block_bytes) for layout in self._layouts))
        offer = Offer(push.transfer, self._fingerprint, tags, block_bytes, n_blocks, key, rank, ranks)
        to = (push.address, push.sender, push.ticket, bool(ranks))
        why = ""
        for _ in range(2):  # reconnect once
            sender = self._senders.get(to)
            if sender is None or sender.lost:
                self._senders = {other: each for other, each in self._senders.items() if not each.lost}
                sender = self._senders[to] = Sender(
                    push, self._send_transports, self._open_transport, block_bytes, self._notices.put, self.tls, target
                )
            if sender.offer(number, offer):
                self._by_number[number] = sender
                return
            why = sender.why_lost
        self._notices.put(SendRejected(number, f"no connection to {push.address}: {why}"))

    def send(self, number: int, items: Sequence[tuple[Item, int]]) -> None:
        sender = self._by_number.get(number)
        if sender is None:
            self._notices.put(BlocksReleased(number, [item for item, _ in items]))
        else:
            sender.send(number, items)

    def cancel(self, number: int, message: str) -> None:
        sender = self._by_number.pop(number, None)
        if sender is not None:
            sender.cancel(number, message)

    # --- receiving --------------------------------------------------------------------------------------------------

    def accept(self, sock: socket.socket | PeerConnection, name: str) -> None:
        """Take over the connection of an engine that was greeted and will send KV."""
        self._n_peers += 1
        connection = sock if isinstance(sock, PeerConnection) else PeerConnection(sock)
        receiver = Receiver(
            self._n_peers, name, connection, self._memory, self._receive_transports, self._notices.put, self._layouts
        )
        self._receivers[receiver.number] = receiver
        _log.info("a sender of KV has connected", extra={"peer": name})
        receiver.start()

    def grant(self, peer: int, transfer: str, epoch: int, blocks: list[dict[int, int]]) -> None:
        self._command(peer, Grant(transfer, epoch, blocks))

    def deny(self, peer: int, transfer: str, message: str) -> None:
        self._command(peer, Denied(transfer, message))

    def revoke(self, peer: int, epoch: int) -> None:
        self._command(peer, Revoke(epoch))

    def _command(self, peer: int, command: Grant | Denied | Revoke) -> None:
        receiver = self._receivers.get(peer)
        if receiver is not None:  # else `SenderLost` is among the notices that are being handled
            receiver.command(command)
