"""All KV transfers of an engine: its connections to other engines, and one queue of notices for the step loop."""

import contextlib
import logging
import socket
import threading
from collections import deque
from collections.abc import Sequence

from emberline.kv.host_memory import HostMemory
from emberline.kv.transfer.connection import PeerConnection
from emberline.kv.transfer.messages import Denied, Grant, Item, Offer, Revoke, TransportOpened
from emberline.kv.transfer.mooncake import MOONCAKE, MooncakeEngine, MooncakeReceiveTransport, MooncakeSendTransport
from emberline.kv.transfer.notices import BlocksReleased, Notice, SendAcked, SenderLost, SendRejected
from emberline.kv.transfer.receiver import Receiver
from emberline.kv.transfer.sender import Sender, TransportOpener
from emberline.kv.transfer.transport import (
    SHARED_MEMORY,
    TCP,
    ReceiveTransport,
    SendTransport,
    SharedMemoryReceiveTransport,
    SharedMemorySendTransport,
    TcpReceiveTransport,
    TcpSendTransport,
    TransportUnavailable,
)
from emberline.protocol.block_hash import KVGroup
from emberline.protocol.request import Push

_log = logging.getLogger(__name__)


class TransferManager:
    """A `notices.TransferPort` over senders and receivers, whose threads start when they are needed."""

    def __init__(
        self,
        fingerprint: str,
        layouts: Sequence[KVGroup],
        memory: HostMemory | None,
        receive_transports: Sequence[ReceiveTransport],
        send_transports: Sequence[str],
        open_transport: TransportOpener,
    ) -> None:
        self._fingerprint = fingerprint
        self._layouts = tuple(layouts)
        self._memory, self._receive_transports = memory, receive_transports
        self._send_transports, self._open_transport = send_transports, open_transport
        self._notices: deque[Notice] = deque()
        self._senders: dict[tuple[str, str, str], Sender] = {}  # by address, our name and ticket there
        self._by_number: dict[int, Sender] = {}
        self._receivers: dict[int, Receiver] = {}
        self._n_peers = 0
        self.wakeup, self._wakeup_writer = socket.socketpair()  # `wakeup` is readable when there are notices
        self.wakeup.setblocking(False)
        self._wakeup_writer.setblocking(False)
        self._notified = threading.Event()

    @property
    def receives_by(self) -> tuple[str, ...]:
        """Names of the transports by which others may send KV to us, best first."""
        return tuple(transport.name for transport in self._receive_transports)

    @property
    def has_notices(self) -> bool:
        return bool(self._notices)

    def notices(self) -> list[Notice]:
        """In order. The wake-up is cleared first, so that none is missed."""
        self.clear_wakeup()
        self._notified.clear()
        taken = []
        while self._notices:
            notice = self._notices.popleft()
            if isinstance(notice, SendAcked | SendRejected):
                self._by_number.pop(notice.number, None)
            elif isinstance(notice, SenderLost):
                self._receivers.pop(notice.peer, None)
            taken.append(notice)
        return taken

    def clear_wakeup(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self.wakeup.recv(4096):
                pass

    def close(self) -> None:
        """Close all connections; transfers in progress are lost."""
        for sender in self._senders.values():
            sender.stop()
        for receiver in self._receivers.values():
            receiver.stop()
        self.wakeup.close()
        self._wakeup_writer.close()

    def _notify(self, notice: Notice) -> None:
        """From any thread. The first of many wakes the step loop."""
        self._notices.append(notice)
        if not self._notified.is_set():
            self._notified.set()
            with contextlib.suppress(OSError):  # full: it is awake; closed: the engine ends
                self._wakeup_writer.send(b"\0")

    # --- sending ----------------------------------------------------------------------------------------------------

    def offer(self, number: int, push: Push, n_blocks: int, key: bytes) -> None:
        tags, block_bytes = zip(*((layout.tag, layout.block_bytes) for layout in self._layouts))
        offer = Offer(push.transfer, self._fingerprint, tags, block_bytes, n_blocks, key)
        to = (push.address, push.sender, push.ticket)
        for _ in range(2):  # reconnect once
            sender = self._senders.get(to)
            if sender is None or sender.lost:
                self._senders = {other: each for other, each in self._senders.items() if not each.lost}
                sender = self._senders[to] = Sender(
                    push, self._send_transports, self._open_transport, block_bytes, self._notify
                )
            if sender.offer(number, offer):
                self._by_number[number] = sender
                return
        self._notify(SendRejected(number, f"no connection to {push.address}"))

    def send(self, number: int, items: Sequence[tuple[Item, int]]) -> None:
        sender = self._by_number.get(number)
        if sender is None:
            self._notify(BlocksReleased(number, [item for item, _ in items]))
        else:
            sender.send(number, items)

    def cancel(self, number: int, message: str) -> None:
        sender = self._by_number.pop(number, None)
        if sender is not None:
            sender.cancel(number, message)

    # --- receiving --------------------------------------------------------------------------------------------------

    def accept(self, sock: socket.socket, name: str) -> None:
        """Take over the connection of an engine that was greeted and will send KV."""
        self._n_peers += 1
        connection = PeerConnection(sock)
        receiver = Receiver(self._n_peers, name, connection, self._memory, self._receive_transports, self._notify)
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


def host_transfers(
    fingerprint: str, layouts: Sequence[KVGroup], memory: HostMemory, mooncake: MooncakeEngine | None = None
) -> TransferManager:
    """For pools in host memory: sends by all transports; receives by shared memory if its pools are shared."""

    def open_transport(transport: str, opened: TransportOpened, connection: PeerConnection) -> SendTransport:
        if transport == SHARED_MEMORY:
            return SharedMemorySendTransport(memory, connection.take_descriptors(opened.n_descriptors))
        if transport == TCP:
            return TcpSendTransport(memory, connection)
        if transport == MOONCAKE and mooncake is not None:
            return MooncakeSendTransport(mooncake, opened)
        raise TransportUnavailable(f"unknown transport {transport!r}")

    receive_transports: list[ReceiveTransport] = [TcpReceiveTransport()]
    send_transports = [SHARED_MEMORY, TCP]
    if mooncake is not None:
        receive_transports.insert(0, MooncakeReceiveTransport(mooncake))
        send_transports.append(MOONCAKE)
    if memory.descriptors:
        receive_transports.insert(0, SharedMemoryReceiveTransport(memory))
    return TransferManager(fingerprint, layouts, memory, receive_transports, send_transports, open_transport)
