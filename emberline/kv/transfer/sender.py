"""The sending end: a thread per engine that we push to. It dials, offers, writes what was granted, and says so."""

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from emberline.kv.transfer import messages
from emberline.kv.transfer.connection import Link, LinkLost
from emberline.kv.transfer.messages import (
    Alive,
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
from emberline.kv.transfer.notices import Delivered, Granted, Notice, Rejected, Sent
from emberline.kv.transfer.transport import Move, SendTransport, TransportClosed, host_name
from emberline.protocol import frames
from emberline.protocol.frames import EngineInfo, Hello, Refused, Welcome
from emberline.protocol.request import Push

DIAL_S = 5.0
ALIVE_S = 2.0  # between two signs of life; a chunk may take far longer to compute

_log = logging.getLogger(__name__)

# Chooses a way to the engine that `EngineInfo` describes; raises WayClosed. The link is there to ask over.
OpenOutlet = Callable[[str, Opened, Link], SendTransport]


@dataclass(slots=True)
class _Transfer:
    number: int  # of our sequence
    offer: Offer
    epoch: int = 0
    targets: list[dict[int, int]] = field(default_factory=list)  # per group, once granted
    last_s: float = 0.0  # when the last of it was there to be sent


@dataclass(slots=True)
class _Parcel:
    number: int
    blocks: Sequence[tuple[Item, int]]
    since_s: float


@dataclass(slots=True)
class _Cancelled:
    number: int
    message: str


class Sender:
    """Owns the connection to one engine. Once it is lost everything is rejected, and a new sender dials again."""

    def __init__(
        self,
        name: str,
        push: Push,
        ways: Sequence[str],
        open_outlet: OpenOutlet,
        block_bytes: Sequence[int],
        tell: Callable[[Notice], None],
    ) -> None:
        self.lost = False
        self._name, self._push = name, push
        self._ways, self._open_outlet, self._block_bytes = ways, open_outlet, block_bytes
        self._tell = tell
        self._link: Link | None = None
        self._outlet: SendTransport | None = None
        self._by_number: dict[int, _Transfer] = {}
        self._by_name: dict[str, _Transfer] = {}
        self._orders: deque[_Transfer | _Parcel | _Cancelled] = deque()
        self._cancelled: set[int] = set()  # known here before their turn in the orders
        self._lock = threading.Lock()  # guards `lost` and what is ordered
        self._stopping = False
        self._alive_s = 0.0  # when the last sign of life was given
        self._thread = threading.Thread(target=self._run, name=f"kv-to-{push.address}", daemon=True)
        self._thread.start()

    # --- called by the step loop ------------------------------------------------------------------------------------

    def offer(self, number: int, offer: Offer) -> bool:
        """False: the connection is lost, dial anew."""
        return self._order(_Transfer(number, offer))

    def send(self, number: int, blocks: Sequence[tuple[Item, int]]) -> None:
        if not self._order(_Parcel(number, blocks, time.monotonic())):
            self._tell(Sent(number, [item for item, _ in blocks]))

    def cancel(self, number: int, message: str) -> None:
        self._cancelled.add(number)
        self._order(_Cancelled(number, message))

    def stop(self) -> None:
        self._stopping = True
        if self._link is not None:
            self._link.shut()
        self._thread.join(1)

    def _order(self, order: "_Transfer | _Parcel | _Cancelled") -> bool:
        with self._lock:
            if self.lost:
                return False
            self._orders.append(order)
        if self._link is not None:
            self._link.wake()
        return True

    # --- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        why = "the sending thread failed"
        try:
            self._serve(self._dial())
        except (LinkLost, TransportClosed, OSError, msgspec.DecodeError) as error:
            why = str(error) or type(error).__name__
        except Exception:
            _log.exception("a transfer's thread failed", extra={"address": self._push.address})
        self._end(why)

    def _serve(self, link: Link) -> None:
        while not self._stopping:
            busy = bool(self._orders)
            while link.wait(block=not busy, at_most_s=ALIVE_S if self._by_number else None):
                self._hear(link, messages.to_prefill.decode(link.receive()))
                busy = True
            if self._orders:
                self._obey(link, self._orders.popleft())
            self._show_life(link)

    def _show_life(self, link: Link) -> None:
        """This thread computes nothing: it can say that the engine lives while a long step keeps it silent."""
        now_s = time.monotonic()
        granted = [transfer.epoch for transfer in self._by_number.values() if transfer.epoch]
        if granted and now_s - self._alive_s >= ALIVE_S:
            self._alive_s = now_s
            link.send(Alive(granted))

    def _end(self, why: str) -> None:
        """Nothing is written from here on: what was asked for and not done is given back."""
        if self._outlet is not None:
            self._outlet.close()
        if self._link is not None:
            self._link.close()
        with self._lock:
            self.lost = True
            orders, self._orders = self._orders, deque()
        for order in orders:
            if isinstance(order, _Parcel):
                self._tell(Sent(order.number, [item for item, _ in order.blocks]))
            elif isinstance(order, _Transfer):
                self._by_number[order.number] = order
        level = logging.WARNING if self._by_number else logging.INFO
        _log.log(level, "connection to %s ended: %s", self._push.address, why, extra={"lost": len(self._by_number)})
        for number in self._by_number:
            self._tell(Rejected(number, f"the connection to the decode engine is lost: {why}"))

    # --- the connection ---------------------------------------------------------------------------------------------

    def _dial(self) -> Link:
        link = Link(_connect(self._push.address))
        self._link = link
        link.send(Hello(self._push.token, peer=self._name))
        greeting = frames.from_engine_decoder.decode(link.receive())
        if isinstance(greeting, Refused):
            raise LinkLost(greeting.error.message)
        if not isinstance(greeting, Welcome):
            raise LinkLost(f"it answered a greeting with {type(greeting).__name__}")
        self._outlet = self._open(link, greeting.info)
        return link

    def _open(self, link: Link, info: EngineInfo) -> SendTransport:
        """The best way that both sides know."""
        common = [way for way in info.transfers if way in self._ways]
        why = f"it takes KV by {', '.join(info.transfers) or 'no way'}, we send by {', '.join(self._ways) or 'none'}"
        for way in common:
            link.send(Open(way, host_name()))
            answer = messages.to_prefill.decode(link.receive())
            if isinstance(answer, Denied):
                why = answer.message
                continue
            if not isinstance(answer, Opened):
                raise LinkLost(f"it answered Open with {type(answer).__name__}")
            outlet = self._open_outlet(way, answer, link)
            _log.info("pushing KV to %s by %s", self._push.address, way)
            return outlet
        raise TransportClosed(why)

    # --- orders -----------------------------------------------------------------------------------------------------

    def _obey(self, link: Link, order: "_Transfer | _Parcel | _Cancelled") -> None:
        if isinstance(order, _Transfer):
            self._by_number[order.number] = self._by_name[order.offer.transfer] = order
            if order.number not in self._cancelled:
                link.send(order.offer)
        elif isinstance(order, _Parcel):
            self._write(link, order)
        else:
            self._cancelled.discard(order.number)
            transfer = self._forget(order.number)
            if transfer is not None:
                link.send(Failed(transfer.offer.transfer, order.message, transfer.epoch))

    def _write(self, link: Link, parcel: _Parcel) -> None:
        """Batch by batch, and not a byte after the transfer is over."""
        assert self._outlet is not None
        n_done = 0
        try:
            for blocks in self._batches(parcel.blocks):
                while link.wait(block=False):
                    self._hear(link, messages.to_prefill.decode(link.receive()))
                transfer = self._by_number.get(parcel.number)
                if transfer is None or parcel.number in self._cancelled:
                    return
                transfer.last_s = parcel.since_s
                items = [item for item, _ in blocks]
                self._outlet.put(transfer.epoch, [Move((g, j), b, transfer.targets[g][j]) for (g, j), b in blocks])
                link.send(Landed(transfer.epoch, items))
                self._tell(Sent(parcel.number, items))
                n_done += len(items)
        finally:
            if n_done < len(parcel.blocks):
                self._tell(Sent(parcel.number, [item for item, _ in parcel.blocks[n_done:]]))

    def _batches(self, blocks: Sequence[tuple[Item, int]]) -> Iterator[Sequence[tuple[Item, int]]]:
        start = n_bytes = 0
        most = self._outlet.batch_bytes if self._outlet is not None else 0
        for at, ((group, _), _) in enumerate(blocks):
            n_bytes += self._block_bytes[group]
            if n_bytes >= most:
                yield blocks[start : at + 1]
                start, n_bytes = at + 1, 0
        if start < len(blocks):
            yield blocks[start:]

    def _forget(self, number: int) -> _Transfer | None:
        transfer = self._by_number.pop(number, None)
        if transfer is not None:
            del self._by_name[transfer.offer.transfer]
        return transfer

    # --- what the other side says -----------------------------------------------------------------------------------

    def _hear(self, link: Link, message: messages.ToPrefill) -> None:
        if isinstance(message, Grant):
            self._granted(message)
        elif isinstance(message, Denied):
            self._over(self._by_name.get(message.transfer), message.message)
        elif isinstance(message, Revoke):
            link.send(Revoked(message.epoch))  # we write in this thread alone: nothing is under way
            self._over(self._of_epoch(message.epoch), "the decode engine gave the request up")
        elif isinstance(message, Received):
            transfer = self._of_epoch(message.epoch)
            if transfer is not None:
                self._forget(transfer.number)
                self._tell(Delivered(transfer.number))
                late_ms = 1e3 * (time.monotonic() - transfer.last_s) if transfer.last_s else 0.0
                n_blocks = sum(map(len, transfer.targets))
                _log.info("pushed %d blocks", n_blocks, extra={"ms_after_compute": round(late_ms, 3)})
        else:
            raise LinkLost(f"{type(message).__name__} out of turn")

    def _granted(self, message: Grant) -> None:
        transfer = self._by_name.get(message.transfer)
        if transfer is None:
            return  # cancelled: it has been told so
        if len(message.blocks) != len(self._block_bytes):
            raise LinkLost(f"it granted blocks of {len(message.blocks)} KV groups, we have {len(self._block_bytes)}")
        transfer.epoch, transfer.targets = message.epoch, message.blocks
        self._tell(Granted(transfer.number, [set(blocks) for blocks in message.blocks]))

    def _over(self, transfer: _Transfer | None, why: str) -> None:
        if transfer is not None:
            self._forget(transfer.number)
            self._tell(Rejected(transfer.number, why))

    def _of_epoch(self, epoch: int) -> _Transfer | None:
        return next((each for each in self._by_number.values() if each.epoch == epoch), None)


def _connect(address: str) -> socket.socket:
    if address.startswith("tcp:"):
        host, _, port = address.removeprefix("tcp:").rpartition(":")
        if not host or not port.isdigit():
            raise LinkLost(f"{address!r} is not tcp:HOST:PORT")
        return socket.create_connection((host.strip("[]"), int(port)), timeout=DIAL_S)
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(DIAL_S)
    try:
        sock.connect(address.removeprefix("unix:"))
    except OSError:
        sock.close()
        raise
    return sock
