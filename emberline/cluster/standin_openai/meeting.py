"""Where prefill's and decode's stand-ins meet: what NIXL, Mooncake and SGLang's bootstrap server do for the real ones.

Prefill keeps what it computed under a name until decode has fetched it or the lease has ended; a name is used once.
"""

import asyncio
import time


class Meetings:
    def __init__(self, lease_s: float, meet_s: float) -> None:
        self.lease_s = lease_s
        self.meet_s = meet_s
        self._held: dict[str, tuple[float, int]] = {}  # name → (end of lease, prompt tokens)
        self._arrivals: dict[str, asyncio.Event] = {}
        self.fetched: list[str] = []
        self.reused: list[str] = []  # names that came twice

    @property
    def leased(self) -> list[str]:
        now_s = time.monotonic()
        return [name for name, (end_s, _) in self._held.items() if end_s > now_s]

    def hold(self, name: str, n_tokens: int) -> None:
        if name in self._held or name in self.fetched:
            self.reused.append(name)
        self._held[name] = (time.monotonic() + self.lease_s, n_tokens)
        self._arrivals.setdefault(name, asyncio.Event()).set()

    def fetch(self, name: str) -> int | None:
        """The prompt's tokens, once; None where there is nothing under that name."""
        end_s, n_tokens = self._held.pop(name, (0.0, 0))
        if end_s <= time.monotonic():
            return None
        self.fetched.append(name)
        return n_tokens

    async def wait(self, name: str) -> int | None:
        """As `fetch`, but prefill may come later."""
        try:
            async with asyncio.timeout(self.meet_s):
                await self._arrivals.setdefault(name, asyncio.Event()).wait()
        except TimeoutError:
            return None
        return self.fetch(name)

    async def fetched_by(self, name: str) -> bool:
        """Prefill's side: wait until decode has it."""
        end_s = time.monotonic() + self.meet_s
        while time.monotonic() < end_s:
            if name in self.fetched:
                return True
            await asyncio.sleep(0.002)
        return False
