"""The sender: a thread per decode engine. It connects, offers, writes the granted blocks, and reports progress."""

import logging
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from emberline.kv.transfer import messages, notices
from emberline.kv.transfer.connection import PeerConnection, PeerConnectionLost
from emberline.kv.transfer.messages import Grant, Item, Offer
from emberline.kv.transfer.notices import Notice
from emberline.kv.transfer.transport import BlockCopy, SendTransport, Target, TransportUnavailable, host_id
from emberline.protocol import frames
from emberline.protocol.frames import VERSION, Hello, Refused, Welcome
from emberline.protocol.request import Push

CONNECT_TIMEOUT_S = 5.0
GREETING_TIMEOUT_S = 30.0  # of each message until a transport is open; the receiver greets between two steps
KEEP_ALIVE_S = 2.0  # between two keep-alives; a prefill chunk may take far longer to compute

_log = logging.getLogger(__name__)

# Opens the named transport after the receiver's answer; raises TransportUnavailable.
TransportOpener = Callable[[str, messages.TransportOpened, PeerConnection, Target | None], SendTransport]


@dataclass(slots=True)
class _OfferCommand:
    """An offer, and from then on the state of its transfer."""

    number: int  # of our sequence
    offer: Offer
    epoch: int = 0
    targets: list[dict[int, int]] = field(default_factory=list)  # per group, once granted
    computed_s: float = 0.0  # when the last blocks were handed to us


@dataclass(slots=True)
class _SendCommand:
    number: int
    blocks: Sequence[tuple[Item, int]]
    computed_s: float


@dataclass(slots=True)
class _CancelCommand:
    number: int
    message: str


_Command = _OfferCommand | _SendCommand | _CancelCommand


class Sender:
    """Owns the connection to one decode engine. Once it is lost all transfers are rejected; a new sender reconnects."""

    def __init__(
        self,
        push: Push,
        transports: Sequence[str],
        open_transport: TransportOpener,
        block_bytes: Sequence[int],
        notify: Callable[[Notice], None],
        tls: ssl.SSLContext | None = None,
        target: Target | None = None,
    ) -> None:
        self._target = target
        self.lost = False
        self.why_lost = ""
        self._tls = tls  # with this engine's certificate
        self._push = push
        self._transports, self._open_transport, self._block_bytes = transports, open_transport, block_bytes
        self._notify = notify
        self._connection: PeerConnection | None = None
        self._transport: SendTransport | None = None
        self._by_number: dict[int, _OfferCommand] = {}
        self._by_transfer: dict[str, _OfferCommand] = {}
        self._commands: deque[_Command] = deque()
        self._cancelled: set[int] = set()  # takes effect before its command is executed
        self._lock = threading.Lock()  # guards `lost` and `_commands`
        self._stopping = False
        self._keep_alive_s = 0.0  # when the last keep-alive was sent
        self._thread = threading.Thread(target=self._run, name=f"kv-to-{push.address}", daemon=True)
        self._thread.start()

    # --- called by the step loop ------------------------------------------------------------------------------------

    def offer(self, number: int, offer: Offer) -> bool:
        """False: the connection is lost, a new sender is needed."""
        return self._enqueue(_OfferCommand(number, offer))

    def send(self, number: int, blocks: Sequence[tuple[Item, int]]) -> None:
        if not self._enqueue(_SendCommand(number, blocks, time.monotonic())):
            self._notify(notices.BlocksReleased(number, [item for item, _ in blocks]))

    def cancel(self, number: int, message: str) -> None:
        self._cancelled.add(number)
        self._enqueue(_CancelCommand(number, message))

    def stop(self) -> None:
        self._stopping = True
        if self._connection is not None:
            self._connection.shutdown()
        self._thread.join(1)

    def _enqueue(self, command: _Command) -> bool:
        with self._lock:
            if self.lost:
                return False
            self._commands.append(command)
        if self._connection is not None:
            self._connection.wake()
        return True

    # --- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        why = "the sending thread failed"
        try:
            self._serve(self._connect())
        except (PeerConnectionLost, TransportUnavailable, OSError) as error:
            why = str(error) or type(error).__name__
        except Exception:
            _log.exception("the thread of a KV sender failed", extra={"address": self._push.address})
        self._end(why)

    def _serve(self, connection: PeerConnection) -> None:
        while not self._stopping:
            busy = bool(self._commands)
            while connection.wait(block=not busy, timeout_s=KEEP_ALIVE_S if self._by_number else None):
                self._handle(connection, connection.receive(messages.to_sender))
                busy = True
            if self._commands:
                self._execute(connection, self._commands.popleft())
            self._keep_alive(connection)

    def _keep_alive(self, connection: PeerConnection) -> None:
        """Report that the engine is alive. The thread computes nothing, so it does during a long step, too."""
        now_s = time.monotonic()
        granted = [transfer.epoch for transfer in self._by_number.values() if transfer.epoch]
        if granted and now_s - self._keep_alive_s >= KEEP_ALIVE_S:
            self._keep_alive_s = now_s
            connection.send(messages.KeepAlive(granted))

    def _end(self, why: str) -> None:
        """End the connection: nothing is written from here on; release all blocks and reject all transfers."""
        if self._transport is not None:
            self._transport.close()
        if self._connection is not None:
            self._connection.close()
        with self._lock:
            self.lost, self.why_lost = True, str(why)
            commands, self._commands = self._commands, deque()
        for command in commands:
            if isinstance(command, _SendCommand):
                self._notify(notices.BlocksReleased(command.number, [item for item, _ in command.blocks]))
            elif isinstance(command, _OfferCommand):
                self._by_number[command.number] = command
        level = logging.WARNING if self._by_number else logging.INFO
        extra = {"lost": len(self._by_number)}
        _log.log(level, "transfer connection to %s ended: %s", self._push.address, why, extra=extra)
        for number in self._by_number:
            self._notify(notices.SendRejected(number, f"the connection to the decode engine is lost: {why}"))

    # --- the connection ---------------------------------------------------------------------------------------------

    def _connect(self) -> PeerConnection:
        connection = self._connection = PeerConnection(self._dial())
        connection.set_timeout(GREETING_TIMEOUT_S)
        connection.send(Hello(self._push.ticket, min(VERSION, self._push.version), peer=self._push.sender))
        greeting = connection.receive(frames.from_engine_decoder)
        if isinstance(greeting, Refused):
            raise PeerConnectionLost(greeting.error.message)
        if not isinstance(greeting, Welcome):
            raise PeerConnectionLost(f"it answered Hello with {type(greeting).__name__}")
        self._transport = self._open(connection, greeting.info.transfers)
        connection.set_timeout(None)
        return connection

    def _dial(self) -> socket.socket:
        sock = _dial(self._push.address)
        if not self._push.tls_host:
            return sock
        if self._tls is None:
            sock.close()
            raise PeerConnectionLost("the decode engine uses TLS, and this engine has no certificate")
        try:
            return self._tls.wrap_socket(sock, server_hostname=self._push.tls_host)
        except OSError:
            sock.close()
            raise

    def _open(self, connection: PeerConnection, accepted: Sequence[str]) -> SendTransport:
        """The first transport of the receiver's list that both sides support and that reaches its blocks."""
        ours = ", ".join(self._transports) or "none"
        failed, level = list[str](), logging.INFO
        for name in [name for name in accepted if name in self._transports]:
            connection.send(messages.OpenTransport(name, host_id()))
            answer = connection.receive(messages.to_sender)
            if isinstance(answer, messages.Denied):
                failed.append(answer.message)
                continue
            if not isinstance(answer, messages.TransportOpened):
                raise PeerConnectionLost(f"it answered OpenTransport with {type(answer).__name__}")
            try:
                transport = self._open_transport(name, answer, connection, self._target)
            except TransportUnavailable as error:
                failed.append(f"{name}: {error}")
                level = logging.WARNING
                continue
            because = f", not by {'; '.join(failed)}" if level > logging.INFO else ""
            _log.log(level, "sending KV to %s by %s%s", self._push.address, name, because)
            return transport
        why = f"it receives KV by {', '.join(accepted) or 'no transport'}, we send by {ours}"
        raise TransportUnavailable("; ".join(failed) or why)

    # --- commands ---------------------------------------------------------------------------------------------------

    def _execute(self, connection: PeerConnection, command: _Command) -> None:
        if isinstance(command, _OfferCommand):
            self._by_number[command.number] = self._by_transfer[command.offer.transfer] = command
            if command.number not in self._cancelled:
                connection.send(command.offer)
        elif isinstance(command, _SendCommand):
            self._write(connection, command)
        else:
            self._cancelled.discard(command.number)
            transfer = self._forget(command.number)
            if transfer is not None:
                connection.send(messages.SendFailed(transfer.offer.transfer, command.message))

    def _write(self, connection: PeerConnection, command: _SendCommand) -> None:
        """Write blocks in batches, and nothing after the transfer has ended."""
        assert self._transport is not None
        n_done = 0
        try:
            for blocks in self._batches(command.blocks, self._transport.batch_bytes):
                while connection.wait(block=False):
                    self._handle(connection, connection.receive(messages.to_sender))
                transfer = self._by_number.get(command.number)
                if transfer is None or command.number in self._cancelled:
                    return
                transfer.computed_s = command.computed_s
                items = [item for item, _ in blocks]
                copies = [BlockCopy((g, j), block, transfer.targets[g][j]) for (g, j), block in blocks]
                self._transport.write(transfer.epoch, copies)
                connection.send(messages.BlocksWritten(transfer.epoch, items))
                self._notify(notices.BlocksReleased(command.number, items))
                n_done += len(items)
        finally:
            if n_done < len(command.blocks):
                self._notify(notices.BlocksReleased(command.number, [item for item, _ in command.blocks[n_done:]]))

    def _batches(self, blocks: Sequence[tuple[Item, int]], most: int) -> Iterator[Sequence[tuple[Item, int]]]:
        start = n_bytes = 0
        for at, ((group, _), _) in enumerate(blocks):
            n_bytes += self._block_bytes[group]
            if n_bytes >= most:
                yield blocks[start : at + 1]
                start, n_bytes = at + 1, 0
        if start < len(blocks):
            yield blocks[start:]

    def _forget(self, number: int) -> _OfferCommand | None:
        transfer = self._by_number.pop(number, None)
        if transfer is not None:
            del self._by_transfer[transfer.offer.transfer]
        return transfer

    # --- messages of the receiver -----------------------------------------------------------------------------------

    def _handle(self, connection: PeerConnection, message: messages.ToSender) -> None:
        if isinstance(message, Grant):
            self._on_grant(message)
        elif isinstance(message, messages.Denied):
            self._reject(self._by_transfer.get(message.transfer), message.message)
        elif isinstance(message, messages.Revoke):
            connection.send(messages.RevokeAck(message.epoch))  # only this thread writes: no write is in progress
            self._reject(self._of_epoch(message.epoch), "the decode engine gave up the request")
        elif isinstance(message, messages.Ack):
            transfer = self._of_epoch(message.epoch)
            if transfer is not None:
                self._forget(transfer.number)
                self._notify(notices.SendAcked(transfer.number))
                late_ms = 1e3 * (time.monotonic() - transfer.computed_s) if transfer.computed_s else 0.0
                n_blocks = sum(map(len, transfer.targets))
                _log.info("sent %d KV blocks", n_blocks, extra={"ms_after_compute": round(late_ms, 3)})
        else:
            raise PeerConnectionLost(f"unexpected {type(message).__name__}")

    def _on_grant(self, message: Grant) -> None:
        transfer = self._by_transfer.get(message.transfer)
        if transfer is None:
            return  # cancelled; the receiver will learn it
        if len(message.blocks) != len(self._block_bytes):
            n_groups = len(self._block_bytes)
            raise PeerConnectionLost(f"it granted blocks of {len(message.blocks)} KV groups, we have {n_groups}")
        transfer.epoch, transfer.targets = message.epoch, message.blocks
        self._notify(notices.OfferGranted(transfer.number, [set(blocks) for blocks in message.blocks]))

    def _reject(self, transfer: _OfferCommand | None, why: str) -> None:
        if transfer is not None:
            self._forget(transfer.number)
            self._notify(notices.SendRejected(transfer.number, why))

    def _of_epoch(self, epoch: int) -> _OfferCommand | None:
        return next((each for each in self._by_number.values() if each.epoch == epoch), None)


def _dial(address: str) -> socket.socket:
    if address.startswith("tcp:"):
        host, _, port = address.removeprefix("tcp:").rpartition(":")
        if not host or not port.isdigit():
            raise PeerConnectionLost(f"{address!r} is not tcp:HOST:PORT")
        return socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S)
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(CONNECT_TIMEOUT_S)
    try:
        sock.connect(address.removeprefix("unix:"))
    except OSError:
        sock.close()
        raise
    return sock
