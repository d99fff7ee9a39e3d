"""The receiving end of one connection: a thread that hears what a sender says and keeps book of what it may write."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from emberline.kv.transfer import messages
from emberline.kv.transfer import transport as tcp
from emberline.kv.transfer.connection import Link, LinkLost
from emberline.kv.transfer.messages import (
    Alive,
    Data,
    Denied,
    Failed,
    Grant,
    Item,
    Landed,
    Offer,
    Open,
    Opened,
    Received,
    Revoke,
    Revoked,
)
from emberline.kv.transfer.notices import Arrived, GivenUp, Notice, Offered, PeerLost, Released, Renewed
from emberline.kv.transfer.transport import Memory, ReceiveTransport

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Epoch:
    transfer: str
    targets: dict[Item, int]  # still to come, and where they go
    written: set[Item]  # their bytes came over the connection and are not landed yet


class Receiver:
    """Owns a connection on which another engine pushes. Its epochs are in `_live` while writes are accepted."""

    def __init__(
        self,
        number: int,
        name: str,
        link: Link,
        memory: Memory | None,
        inlets: Sequence[ReceiveTransport],
        tell: Callable[[Notice], None],
    ) -> None:
        self.number = number
        self.name = name
        self._link = link
        self._memory = memory
        self._inlets = {inlet.name: inlet for inlet in inlets}
        self._inlet: ReceiveTransport | None = None
        self._tell = tell
        self._live: dict[int, _Epoch] = {}
        self._revoking: set[int] = set()
        self._orders: deque[Grant | Denied | Revoke] = deque()
        self._scratch = memoryview(bytearray(1 << 20))
        self._thread = threading.Thread(target=self._run, name=f"kv-from-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def order(self, message: Grant | Denied | Revoke) -> None:
        """From the step loop: said to the sender in this order."""
        self._orders.append(message)
        self._link.wake()

    def stop(self) -> None:
        self._link.shut()
        self._thread.join(5)

    def _run(self) -> None:
        try:
            while True:
                while self._orders:
                    self._obey(self._orders.popleft())
                if self._link.wait():
                    self._hear(messages.to_decode.decode(self._link.receive()))
        except (LinkLost, msgspec.DecodeError) as error:
            self._lost(str(error))
        except Exception:
            _log.exception("a transfer's thread failed", extra={"peer": self.name})
            self._lost("the receiving thread failed")

    def _lost(self, why: str) -> None:
        _log.info("transfer connection lost: %s", why, extra={"peer": self.name, "epochs": len(self._live)})
        self._link.close()
        if self._inlet is not None and self._inlet.linger_s and (self._live or self._revoking):
            time.sleep(self._inlet.linger_s)
        self._tell(PeerLost(self.number, why))

    # --- the step loop's orders -------------------------------------------------------------------------------------

    def _obey(self, order: Grant | Denied | Revoke) -> None:
        if isinstance(order, Grant):
            targets = {(g, j): block for g, blocks in enumerate(order.blocks) for j, block in blocks.items()}
            self._live[order.epoch] = _Epoch(order.transfer, targets, set())
            self._link.send(order)
            self._finish(order.epoch)
        elif isinstance(order, Revoke):
            if self._live.pop(order.epoch, None) is None:  # over already
                self._tell(Released(order.epoch))
                return
            self._revoking.add(order.epoch)
            self._link.send(order)
        else:
            self._link.send(order)

    def _finish(self, epoch: int) -> None:
        if epoch in self._live and not self._live[epoch].targets:
            del self._live[epoch]
            self._link.send(Received(epoch))

    # --- what the sender says ---------------------------------------------------------------------------------------

    def _hear(self, message: messages.ToDecode) -> None:
        if isinstance(message, Landed):
            self._landed(message)
        elif isinstance(message, Data):
            self._read(message)
        elif isinstance(message, Offer):
            self._tell(Offered(self.number, message))
        elif isinstance(message, Open):
            self._open(message)
        elif isinstance(message, Alive):
            for epoch in self._live.keys() & set(message.epochs):
                self._tell(Renewed(epoch))
        elif isinstance(message, Failed):
            self._live.pop(message.epoch, None)
            self._tell(GivenUp(self.number, message.transfer, message.epoch, message.message))
        else:
            assert isinstance(message, Revoked)
            if message.epoch in self._revoking:
                self._revoking.remove(message.epoch)
                self._tell(Released(message.epoch))

    def _open(self, message: Open) -> None:
        inlet = self._inlets.get(message.way)
        handles, descriptors = inlet.handles() if inlet is not None else ([], [])
        if inlet is None or self._inlet is not None or (descriptors and not self._link.local):
            self._link.send(Denied("", f"this engine takes no KV by {message.way!r} on this connection"))
            return
        self._inlet = inlet
        self._link.send(Opened(handles, len(descriptors)), descriptors)

    def _landed(self, message: Landed) -> None:
        epoch = self._live.get(message.epoch)
        if epoch is None:
            return  # revoked meanwhile: nobody may read what lies there
        items = [(g, j) for g, j in message.items]
        for item in items:
            if item not in epoch.targets or (self._in_band and item not in epoch.written):
                raise LinkLost(f"it says that block {item} has landed, which it was not to write")
            del epoch.targets[item]
            epoch.written.discard(item)
        self._tell(Arrived(message.epoch, items))
        self._finish(message.epoch)

    def _read(self, message: Data) -> None:
        """The bytes behind the message: into our blocks as long as the epoch lives, else nowhere."""
        if not self._in_band or self._memory is None:
            raise LinkLost("bytes on a connection that was not opened for them")
        epoch = self._live.get(message.epoch)
        for g, j in message.items:
            if not 0 <= g < self._memory.n_groups:
                raise LinkLost(f"there is no KV group {g}")
            if epoch is None:
                self._skip(len(self._memory.block(g, 0)))
            elif (g, j) not in epoch.targets:
                raise LinkLost(f"it sends block {(g, j)}, which it was not to write")
            else:
                self._link.read_into(self._memory.block(g, epoch.targets[g, j]))
                epoch.written.add((g, j))

    @property
    def _in_band(self) -> bool:
        return self._inlet is not None and self._inlet.name == tcp.NAME

    def _skip(self, left: int) -> None:
        while left:
            n = min(left, len(self._scratch))
            self._link.read_into(self._scratch[:n])
            left -= n
