"""All transfers of an engine: its connections to others, and one queue of notices for the step loop."""

import contextlib
import hashlib
import logging
import socket
import threading
from collections import deque
from collections.abc import Sequence

from emberline.kv.host_memory import HostMemory
from emberline.kv.transfer import mooncake, shared_memory
from emberline.kv.transfer import transport as tcp
from emberline.kv.transfer.connection import Link
from emberline.kv.transfer.messages import Denied, Grant, Item, Offer, Opened, Revoke
from emberline.kv.transfer.mooncake import MooncakeInlet, MooncakeOutlet
from emberline.kv.transfer.notices import Delivered, Notice, PeerLost, Rejected, Sent
from emberline.kv.transfer.receiver import Receiver
from emberline.kv.transfer.sender import OpenOutlet, Sender
from emberline.kv.transfer.shared_memory import SharedInlet, SharedOutlet
from emberline.kv.transfer.transport import (
    Memory,
    ReceiveTransport,
    SendTransport,
    SocketInlet,
    SocketOutlet,
    TransportClosed,
)
from emberline.protocol.block_hash import KVGroup
from emberline.protocol.request import Push

_log = logging.getLogger(__name__)


class TransferManager:
    """What the step loop holds of its transfers (`notices.Transfers`). Threads start with the first that needs one."""

    def __init__(
        self,
        name: str,
        fingerprint: str,
        layouts: Sequence[KVGroup],
        memory: Memory | None,
        inlets: Sequence[ReceiveTransport],
        ways: Sequence[str],
        open_outlet: OpenOutlet,
    ) -> None:
        self._name = name
        self._fingerprint = fingerprint
        self._layouts = tuple(layouts)
        self._memory, self._inlets = memory, inlets
        self._ways, self._open_outlet = ways, open_outlet
        self._notices: deque[Notice] = deque()
        self._senders: dict[str, Sender] = {}  # by address and token
        self._by_number: dict[int, Sender] = {}
        self._receivers: dict[int, Receiver] = {}
        self._n_peers = 0
        self.wake, self._waker = socket.socketpair()  # `wake` is readable when there are notices
        self.wake.setblocking(False)
        self._waker.setblocking(False)
        self._told = threading.Event()

    @property
    def takes_by(self) -> tuple[str, ...]:
        """Ways in which others may push KV to us, best first."""
        return tuple(inlet.name for inlet in self._inlets)

    @property
    def has_notices(self) -> bool:
        return bool(self._notices)

    def notices(self) -> list[Notice]:
        """In the order in which they were told. The wake-up is swallowed first: none is missed."""
        self.swallow()
        self._told.clear()
        taken = []
        while self._notices:
            notice = self._notices.popleft()
            if isinstance(notice, Delivered | Rejected):
                self._by_number.pop(notice.number, None)
            elif isinstance(notice, PeerLost):
                self._receivers.pop(notice.peer, None)
            taken.append(notice)
        return taken

    def swallow(self) -> None:
        """The wake-up has served its purpose: `has_notices` tells the rest."""
        with contextlib.suppress(BlockingIOError):
            while self.wake.recv(4096):
                pass

    def close(self) -> None:
        """Hang up on everyone; what was under way is lost."""
        for sender in self._senders.values():
            sender.stop()
        for receiver in self._receivers.values():
            receiver.stop()
        self.wake.close()
        self._waker.close()

    def _tell(self, notice: Notice) -> None:
        """From any thread. The first of many wakes the step loop."""
        self._notices.append(notice)
        if not self._told.is_set():
            self._told.set()
            with contextlib.suppress(OSError):  # full: it is awake; closed: nobody listens
                self._waker.send(b"\0")

    # --- pushes -----------------------------------------------------------------------------------------------------

    def offer(self, number: int, push: Push, n_blocks: int) -> None:
        tags, sizes = zip(*((layout.tag, layout.block_bytes) for layout in self._layouts))
        offer = Offer(push.transfer, self._fingerprint, tags, sizes, n_blocks)
        where = f"{push.address} {hashlib.blake2b(push.token.encode(), digest_size=8).hexdigest()}"
        for _ in range(2):  # a connection that was lost is dialled anew, once
            sender = self._senders.get(where)
            if sender is None or sender.lost:
                self._senders = {key: each for key, each in self._senders.items() if not each.lost}
                sender = self._senders[where] = Sender(
                    self._name,
                    push,
                    self._ways,
                    self._open_outlet,
                    [layout.block_bytes for layout in self._layouts],
                    self._tell,
                )
            if sender.offer(number, offer):
                self._by_number[number] = sender
                return
        self._tell(Rejected(number, f"no connection to {push.address}"))

    def send(self, number: int, items: Sequence[tuple[Item, int]]) -> None:
        sender = self._by_number.get(number)
        if sender is None:
            self._tell(Sent(number, [item for item, _ in items]))
        else:
            sender.send(number, items)

    def cancel(self, number: int, message: str) -> None:
        sender = self._by_number.pop(number, None)
        if sender is not None:
            sender.cancel(number, message)

    # --- arrivals ---------------------------------------------------------------------------------------------------

    def adopt(self, sock: socket.socket, name: str) -> None:
        """An engine has greeted us on this connection; from now on it is its transfers'."""
        self._n_peers += 1
        receiver = Receiver(self._n_peers, name, Link(sock), self._memory, self._inlets, self._tell)
        self._receivers[receiver.number] = receiver
        _log.info("another engine comes to push KV", extra={"peer": name})
        receiver.start()

    def grant(self, peer: int, transfer: str, epoch: int, blocks: list[dict[int, int]]) -> None:
        self._order(peer, Grant(transfer, epoch, blocks))

    def deny(self, peer: int, transfer: str, message: str) -> None:
        self._order(peer, Denied(transfer, message))

    def revoke(self, peer: int, epoch: int) -> None:
        self._order(peer, Revoke(epoch))

    def _order(self, peer: int, order: Grant | Denied | Revoke) -> None:
        receiver = self._receivers.get(peer)
        if receiver is not None:  # else its loss is among the notices that are being taken
            receiver.order(order)


def host_hub(
    name: str, fingerprint: str, layouts: Sequence[KVGroup], memory: HostMemory, engine: mooncake.Engine | None = None
) -> TransferManager:
    """It sends by all ways; it can be written through shared memory if its pools are shared."""

    def open_outlet(way: str, opened: Opened, link: Link) -> SendTransport:
        if way == shared_memory.NAME:
            return SharedOutlet(memory, link.take_descriptors(opened.n_descriptors))
        if way == tcp.NAME:
            return SocketOutlet(memory, link)
        if way == mooncake.NAME and engine is not None:
            return MooncakeOutlet(engine, opened)
        raise TransportClosed(f"no way is called {way!r} here")

    inlets: list[ReceiveTransport] = [SocketInlet()]
    ways = [shared_memory.NAME, tcp.NAME]
    if engine is not None:
        inlets.insert(0, MooncakeInlet(engine))
        ways.append(mooncake.NAME)
    if memory.descriptors:
        inlets.insert(0, SharedInlet(memory))
    return TransferManager(name, fingerprint, layouts, memory, inlets, ways, open_outlet)
