"""The receiver of one connection: a thread that reads what a sender says and checks what it may write."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from emberline.kv.slices import ByteRun, SliceMismatch, block_runs
from emberline.kv.transfer import messages, notices
from emberline.kv.transfer.connection import PeerConnection, PeerConnectionLost
from emberline.kv.transfer.messages import Denied, Grant, Item, Revoke
from emberline.kv.transfer.notices import Notice
from emberline.kv.transfer.transport import TCP, BlockSink, ReceiveTransport
from emberline.protocol.block_hash import KVGroup

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Epoch:
    transfer: str
    targets: dict[Item, int]  # blocks that are still missing, and where they go
    read: set[Item] = field(default_factory=set)  # their bytes came over the connection, `BlocksWritten` did not yet


class Receiver:
    """Owns the connection of one sender. An epoch is in `_live` while writes are accepted."""

    def __init__(
        self,
        number: int,
        name: str,
        connection: PeerConnection,
        memory: BlockSink | None,
        transports: Sequence[ReceiveTransport],
        notify: Callable[[Notice], None],
        layouts: Sequence[KVGroup] = (),
    ) -> None:
        self.number = number
        self._layouts = tuple(layouts)
        self._runs: Sequence[Sequence[ByteRun]] | None = None  # what this sender has of each block; None: all of it
        self.name = name
        self._connection = connection
        self._memory = memory
        self._transports = {transport.name: transport for transport in transports}
        self._transport: ReceiveTransport | None = None  # that the sender has opened last
        self._offered = False  # by that transport: it stays
        self._notify = notify
        self._live: dict[int, _Epoch] = {}
        self._revoking: set[int] = set()
        self._commands: deque[Grant | Denied | Revoke] = deque()
        self._scratch = memoryview(bytearray(1 << 20))
        self._thread = threading.Thread(target=self._run, name=f"kv-from-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def command(self, message: Grant | Denied | Revoke) -> None:
        """From the step loop: sent in this order."""
        self._commands.append(message)
        self._connection.wake()

    def stop(self) -> None:
        self._connection.shutdown()
        if self._thread.is_alive():  # else it has ended, or ends as soon as it is started
            self._thread.join(5)

    def _run(self) -> None:
        try:
            while True:
                while self._commands:
                    self._execute(self._commands.popleft())
                if self._connection.wait():
                    self._handle(self._connection.receive(messages.to_receiver))
        except PeerConnectionLost as error:
            self._lost(str(error))
        except Exception:
            _log.exception("the thread of a KV receiver failed", extra={"peer": self.name})
            self._lost("the receiving thread failed")

    def _lost(self, why: str) -> None:
        _log.info("transfer connection lost: %s", why, extra={"peer": self.name, "epochs": len(self._live)})
        self._connection.close()
        if self._transport is not None and self._transport.linger_s and (self._live or self._revoking):
            time.sleep(self._transport.linger_s)
        self._notify(notices.SenderLost(self.number, why))

    def _execute(self, command: Grant | Denied | Revoke) -> None:
        if isinstance(command, Grant):
            targets = {(g, j): block for g, blocks in enumerate(command.blocks) for j, block in blocks.items()}
            self._live[command.epoch] = _Epoch(command.transfer, targets)
            self._connection.send(command)
            self._ack_if_complete(command.epoch)
        elif isinstance(command, Revoke):
            if self._live.pop(command.epoch, None) is None:  # it is complete or has failed
                self._notify(notices.EpochReleased(command.epoch, self.number))
                return
            self._revoking.add(command.epoch)
            self._connection.send(command)
        else:
            self._connection.send(command)

    def _ack_if_complete(self, epoch: int) -> None:
        if epoch in self._live and not self._live[epoch].targets:
            del self._live[epoch]
            self._connection.send(messages.Ack(epoch))

    # --- messages of the sender -------------------------------------------------------------------------------------

    def _handle(self, message: messages.ToReceiver) -> None:
        if isinstance(message, messages.BlocksWritten):
            self._on_written(message)
        elif isinstance(message, messages.BlockData):
            self._read_blocks(message)
        elif isinstance(message, messages.Offer):
            self._offered = True
            if message.ranks:
                self._runs = self._runs_of(message)
            self._notify(notices.OfferReceived(self.number, message))
        elif isinstance(message, messages.OpenTransport):
            self._open(message)
        elif isinstance(message, messages.KeepAlive):
            for epoch in self._live.keys() & set(message.epochs):
                self._notify(notices.LeaseRenewed(epoch))
        elif isinstance(message, messages.SendFailed):
            self._on_failed(message)
        else:
            assert isinstance(message, messages.RevokeAck)
            if message.epoch in self._revoking:
                self._revoking.remove(message.epoch)
                self._notify(notices.EpochReleased(message.epoch, self.number))

    def _runs_of(self, offer: messages.Offer) -> Sequence[Sequence[ByteRun]] | None:
        """Byte runs for a sender among several ranks. A connection is of one rank, so all its offers say the same."""
        if not 0 <= offer.rank < len(offer.ranks):
            raise PeerConnectionLost(f"there is no rank {offer.rank} of {len(offer.ranks)}")
        try:
            return block_runs(offer.ranks[offer.rank], self._layouts)
        except SliceMismatch:
            return [()] * len(self._layouts)  # it is not granted

    def _on_failed(self, message: messages.SendFailed) -> None:
        """The epoch that ends is the one granted to this transfer on this connection, by our own record."""
        ended = next((number for number, epoch in self._live.items() if epoch.transfer == message.transfer), 0)
        self._live.pop(ended, None)
        self._notify(notices.SenderGaveUp(self.number, message.transfer, ended, message.message))

    def _open(self, message: messages.OpenTransport) -> None:
        transport = self._transports.get(message.name)
        if transport is not None and not self._offered:
            opened, descriptors = transport.opened()
            if not descriptors or self._connection.local:
                self._transport = transport
                self._connection.send(opened, descriptors)
                return
        reason = f"this engine does not receive KV by {message.name!r} on this connection"
        self._connection.send(Denied("", reason))

    def _on_written(self, message: messages.BlocksWritten) -> None:
        epoch = self._live.get(message.epoch)
        if epoch is None:
            return  # revoked meanwhile: the content must not be used
        items = [(g, j) for g, j in message.items]
        for item in items:
            if item not in epoch.targets or (self._in_band and item not in epoch.read):
                raise PeerConnectionLost(f"the sender claims to have written block {item}, which was not granted")
            del epoch.targets[item]
            epoch.read.discard(item)
        self._notify(notices.BlocksReceived(message.epoch, items))
        self._ack_if_complete(message.epoch)

    def _read_blocks(self, message: messages.BlockData) -> None:
        """The bytes after the message: into our blocks while the epoch is live, else discarded."""
        if not self._in_band or self._memory is None:
            raise PeerConnectionLost("block data on a connection that was not opened for it")
        epoch = self._live.get(message.epoch)
        for g, j in message.items:
            if not 0 <= g < len(self._memory.block_bytes):
                raise PeerConnectionLost(f"there is no KV group {g}")
            runs = None if self._runs is None else self._runs[g]
            if epoch is None:
                n_bytes = self._memory.block_bytes[g] if runs is None else sum(run.n_bytes for run in runs)
                self._discard(n_bytes)
            elif (g, j) not in epoch.targets:
                raise PeerConnectionLost(f"the sender sends block {(g, j)}, which was not granted")
            else:
                self._memory.fill(g, epoch.targets[g, j], runs, self._connection.read_into)
                epoch.read.add((g, j))

    @property
    def _in_band(self) -> bool:
        return self._transport is not None and self._transport.name == TCP

    def _discard(self, n_bytes: int) -> None:
        while n_bytes:
            n = min(n_bytes, len(self._scratch))
            self._connection.read_into(self._scratch[:n])
            n_bytes -= n
