"""Long work on the event loop, in steps small enough for those who stream beside it."""

import asyncio

_STEP_BYTES = 48 << 10  # of JSON; about a millisecond of work


class Steps:
    def __init__(self) -> None:
        self._n_bytes = 0

    async def took(self, n_bytes: int) -> None:
        """So much was done; let the others go first now and then."""
        self._n_bytes += n_bytes
        if self._n_bytes >= _STEP_BYTES:
            self._n_bytes = 0
            await asyncio.sleep(0)
