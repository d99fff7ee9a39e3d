"""Two schedulers and a fake connection that delivers one message at a time, when the test says so.

The behavior of sender and receiver threads in pure Python: a sender goes on writing until it has read the revocation,
and a block is garbage until it is written completely.
"""

from collections import deque

from emberline.engine.core.step_loop import StepLoop
from emberline.kv.transfer.messages import Offer
from emberline.kv.transfer.notices import (
    BlocksReceived,
    BlocksReleased,
    EpochReleased,
    OfferGranted,
    OfferReceived,
    SendAcked,
    SenderGaveUp,
    SenderLost,
    SendRejected,
)
from tests.engine.fakes import LateRunner, scheduler_of


class Side:
    """One engine."""

    def __init__(self, transfers, steps_in_flight=1, **setup):
        self.scheduler, self.cache = scheduler_of(transfers=transfers, **setup)
        self.runner = LateRunner(self.cache)
        self.loop = StepLoop(self.scheduler, self.runner, steps_in_flight)
        self.transfers = transfers
        self.accepted, self.ended, self.tokens = {}, {}, {}

    @property
    def busy(self):
        return self.loop.busy or bool(self.transfers.queued)


class NoticeQueue:
    own, has_notices = None, False

    def __init__(self):
        self.queued = deque()

    def notices(self):
        taken, self.queued = list(self.queued), deque()
        return taken


class FakeSender(NoticeQueue):
    """The sender's thread, one tick at a time."""

    def __init__(self, wire):
        super().__init__()
        self.wire = wire
        self.commands = deque()
        self.open = {}  # by number: [offer, epoch, targets]
        self.cancelled = set()
        self.writing = None

    def offer(self, number, push, n_blocks, key):
        layouts = [group.layout for group in self.wire.prefill.cache.groups]
        tags, sizes = zip(*((layout.tag, layout.block_bytes) for layout in layouts))
        fingerprint = "other" if push.ticket == "other weights" else "fake"
        key = b"other" if push.ticket == "other prompt" else key
        self.commands.append(("offer", number, Offer(push.transfer, fingerprint, tags, sizes, n_blocks, key)))

    def send(self, number, items):
        for item in items:
            self.commands.append(("send", number, [item]))

    def cancel(self, number, message):
        self.cancelled.add(number)
        self.commands.append(("cancel", number, message))

    def tick(self):
        if self.writing is not None:
            return self._wrote()
        if self.wire.to_prefill:
            return self._handle(*self.wire.to_prefill.popleft())
        if self.commands:
            self._execute(*self.commands.popleft())

    def _execute(self, what, number, value):
        if what == "offer":
            self.open[number] = [value, 0, []]
            if number not in self.cancelled:
                self.wire.to_decode.append(("offer", value))
        elif what == "cancel":
            found = self.open.pop(number, None)
            if found is not None:
                self.wire.to_decode.append(("failed", found[0].transfer))
        elif number in self.open and number not in self.cancelled:
            self.writing = number, self.open[number], value
            for (g, j), _ in value:
                self.wire.decode.runner.blocks[g][self.open[number][2][g][j]] = [("garbage", 0)] * 16
        else:
            self.queued.append(BlocksReleased(number, [item for item, _ in value]))

    def _wrote(self):
        number, (_, epoch, targets), items = self.writing
        self.writing = None
        for (g, j), source in items:
            self.wire.decode.runner.blocks[g][targets[g][j]] = list(self.wire.prefill.runner.blocks[g][source])
        self.wire.to_decode.append(("landed", epoch, [item for item, _ in items]))
        self.queued.append(BlocksReleased(number, [item for item, _ in items]))

    def _handle(self, what, *rest):
        if what == "grant":
            for number, found in self.open.items():
                if found[0].transfer == rest[0]:
                    found[1:] = rest[1:]
                    self.queued.append(OfferGranted(number, [set(blocks) for blocks in rest[2]]))
        elif what == "denied":
            self._over([n for n, found in self.open.items() if found[0].transfer == rest[0]], SendRejected)
        elif what == "revoke":
            self.wire.to_decode.append(("revoked", rest[0]))
            self._over([n for n, found in self.open.items() if found[1] == rest[0]], SendRejected)
        else:
            self._over([n for n, found in self.open.items() if found[1] == rest[0]], SendAcked)

    def _over(self, numbers, kind):
        for number in numbers:
            del self.open[number]
            self.queued.append(kind(number, "over") if kind is SendRejected else kind(number))

    def lose(self):
        """The connection is lost. The block being written is completed, then nothing more is written."""
        if self.writing is not None:
            self._wrote()
        for what, number, value in self.commands:
            if what == "send":
                self.queued.append(BlocksReleased(number, [item for item, _ in value]))
            elif what == "offer":
                self.open[number] = [value, 0, []]
        self.commands.clear()
        self._over(list(self.open), SendRejected)


class FakeReceiver(NoticeQueue):
    """The receiver's thread."""

    def __init__(self, wire):
        super().__init__()
        self.wire = wire
        self.commands = deque()
        self.live, self.revoking = {}, set()
        self.transfers = {}  # epochs by transfer

    def grant(self, peer, transfer, epoch, blocks):
        self._command(peer, ("grant", transfer, epoch, blocks))

    def deny(self, peer, transfer, message):
        self._command(peer, ("denied", transfer))

    def revoke(self, peer, epoch):
        self._command(peer, ("revoke", epoch))

    def _command(self, peer, command):
        if peer == self.wire.peer:
            self.commands.append(command)

    def tick(self):
        if self.commands:
            self._execute(self.commands.popleft())
        elif self.wire.to_decode:
            self._handle(*self.wire.to_decode.popleft())

    def _execute(self, command):
        if command[0] == "grant":
            self.live[command[2]] = {(g, j) for g, blocks in enumerate(command[3]) for j in blocks}
            self.transfers[command[1]] = command[2]
            self.wire.to_prefill.append(command)
            self._finish(command[2])
        elif command[0] == "revoke":
            if self.live.pop(command[1], None) is None:
                self.queued.append(EpochReleased(command[1]))
            else:
                self.revoking.add(command[1])
                self.wire.to_prefill.append(command)
        else:
            self.wire.to_prefill.append(command)

    def _finish(self, epoch):
        if epoch in self.live and not self.live[epoch]:
            del self.live[epoch]
            self.wire.to_prefill.append(("received", epoch))

    def _handle(self, what, *rest):
        if what == "offer":
            self.queued.append(OfferReceived(self.wire.peer, rest[0]))
        elif what == "landed":
            if rest[0] in self.live:
                self.live[rest[0]] -= set(rest[1])
                self.queued.append(BlocksReceived(rest[0], rest[1]))
                self._finish(rest[0])
        elif what == "failed":
            epoch = self.transfers.get(rest[0], 0)
            ended = epoch if self.live.pop(epoch, None) is not None else 0
            self.queued.append(SenderGaveUp(self.wire.peer, rest[0], ended, "gave up"))
        elif rest[0] in self.revoking:
            self.revoking.remove(rest[0])
            self.queued.append(EpochReleased(rest[0]))

    def lose(self):
        self.commands.clear()
        self.live.clear()
        self.revoking.clear()
        self.queued.append(SenderLost(self.wire.peer, "cut"))


class Wire:
    def __init__(self, prefill=None, decode=None):
        self.to_prefill, self.to_decode = deque(), deque()
        self.peer = 1
        self.prefill = Side(FakeSender(self), **(prefill or {}))
        self.decode = Side(FakeReceiver(self), **(decode or {}))

    def cut(self):
        """The connection is lost; the next message uses a new one."""
        self.prefill.transfers.lose()
        self.decode.transfers.lose()
        self.to_prefill.clear()
        self.to_decode.clear()
        self.peer += 1

    def tick(self):
        self.prefill.transfers.tick()
        self.decode.transfers.tick()

    @property
    def quiet(self):
        busy = (self.to_prefill, self.to_decode, self.prefill.transfers.commands, self.decode.transfers.commands)
        return not any(busy) and self.prefill.transfers.writing is None
