"""Notices of other threads for the step loop: a queue, and a socket that wakes it."""

import contextlib
import socket
import threading
from collections import deque
from typing import Generic, TypeVar

Notice = TypeVar("Notice")


class NoticeQueue(Generic[Notice]):
    def __init__(self) -> None:
        self._notices: deque[Notice] = deque()
        self.wakeup, self._wakeup_writer = socket.socketpair()  # `wakeup` is readable when there are notices
        self.wakeup.setblocking(False)
        self._wakeup_writer.setblocking(False)
        self._notified = threading.Event()

    def __bool__(self) -> bool:
        return bool(self._notices)

    def put(self, notice: Notice) -> None:
        """Add a notice, from any thread. The first of many wakes the step loop."""
        self._notices.append(notice)
        self.wake()

    def wake(self) -> None:
        """Wake the step loop, from any thread."""
        if not self._notified.is_set():
            self._notified.set()
            with contextlib.suppress(OSError):  # full: it is awake; closed: the engine ends
                self._wakeup_writer.send(b"\0")

    def take(self) -> list[Notice]:
        """Return the notices in order. The wake-up is cleared first, so that none is missed."""
        if not self._notices:
            return []
        self.clear_wakeup()
        taken = []
        while self._notices:
            taken.append(self._notices.popleft())
        return taken

    def clear_wakeup(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self.wakeup.recv(4096):
                pass
        self._notified.clear()  # not before: a notice that comes meanwhile is in the queue, which is looked at next

    def close(self) -> None:
        self.wakeup.close()
        self._wakeup_writer.close()
