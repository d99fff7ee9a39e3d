"""Wake-ups within a process: who listens to a channel hears what is said on it."""

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncIterator

_MAX_HELD = 1024  # payloads a slow listener has waiting; beyond, it is told to look for itself


class _Ear:
    """One listener's mailbox."""

    def __init__(self) -> None:
        self.heard: dict[str, None] = {}  # a set that keeps its order: saying it twice is hearing it once
        self.stirred = asyncio.Event()

    def hear(self, payload: str) -> None:
        if len(self.heard) >= _MAX_HELD:
            self.heard.clear()
            payload = ""
        self.heard[payload] = None
        self.stirred.set()


class Signals:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._ears: defaultdict[str, set[_Ear]] = defaultdict(set)

    def say(self, channel: str, payload: str = "") -> None:
        for ear in self._ears.get(channel, ()):
            ear.hear(payload)

    def stir(self) -> None:
        """Something may have been missed on every channel."""
        for channel in self._ears:
            self.say(channel)

    async def listen(self, channel: str, poll_s: float) -> AsyncIterator[str]:
        ear = _Ear()
        self._ears[channel].add(ear)
        try:
            while True:
                try:
                    # Not `wait_for`: in Python 3.11 it loses a cancellation that comes with the wake-up.
                    async with asyncio.timeout(poll_s * random.uniform(0.5, 1.5)):
                        await ear.stirred.wait()
                except TimeoutError:
                    ear.heard[""] = None
                heard, ear.heard = ear.heard, {}
                ear.stirred.clear()
                for payload in heard:
                    yield payload
        finally:
            self._ears[channel].discard(ear)
