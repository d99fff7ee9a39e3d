"""Clients that send the next request when they have their answer, at all cores of a cluster in turn."""

import asyncio
import time
from collections.abc import Callable

from tests.machines.deployment import Deployment
from tests.machines.streams import stream
from tests.soak.streams_client import StreamRecord


class ClientLoad:
    def __init__(self, deployment: Deployment, patience_s: float) -> None:
        self._deployment = deployment
        self._patience_s = patience_s
        self._n_asked = 0
        self.answers: list[StreamRecord] = []  # of all that were asked

    @property
    def problems(self) -> list[str]:
        return [answer.problem for answer in self.answers if answer.problem]

    async def run(
        self,
        n_clients: int,
        until: Callable[[], bool],
        what: str,
        *,
        n_words: int = 200,
        n_tokens: int = 8,
        pause_s: float = 0.0,
    ) -> float:
        """Until it is so, and everything is answered. The prompts are of so many words, no two of them the same.
        Returns the seconds until it was so; `what` is said of it where it never is."""
        is_over = asyncio.Event()

        async def client(number: int) -> None:
            cores = list(self._deployment.cores.values())
            while not is_over.is_set():
                self._n_asked += 1
                words = " ".join(f"{self._n_asked} {word}" for word in range(n_words // 2))
                messages = [{"role": "user", "content": words}]
                core = cores[number % len(cores)]
                self.answers.append(await stream(core, self._deployment.model, n_tokens, messages=messages))
                await asyncio.sleep(pause_s)

        began_s = time.monotonic()
        clients = [asyncio.create_task(client(number)) for number in range(n_clients)]
        try:
            while not await asyncio.to_thread(until):
                assert time.monotonic() - began_s < self._patience_s, what
                await asyncio.sleep(0.5)
            return time.monotonic() - began_s
        finally:
            is_over.set()
            await asyncio.gather(*clients)
