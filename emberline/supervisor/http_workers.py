"""More front doors: processes that accept on the core's own listening socket and ask the core for decisions."""

import asyncio
import os
import socket
from collections.abc import Sequence

from emberline.supervisor.process import Child, ChildSpec


class HttpWorkers:
    """N door processes; the system hands each new connection to one that waits for it."""

    def __init__(self, n: int, listener: socket.socket, module: str, arguments: Sequence[str]) -> None:
        fd = listener.fileno()
        secret = os.environ.get("EMBERLINE_SECRET")  # doors derive the same keys as the core
        self.children = [
            Child(
                ChildSpec(
                    name=f"door-{index}",
                    module=module,
                    arguments=("--fd", str(fd), "--name", f"door-{index}", *arguments),
                    env={} if secret is None else {"EMBERLINE_SECRET": secret},
                    fds=(fd,),
                )
            )
            for index in range(n)
        ]

    async def start(self) -> None:
        """Every process exists when this returns."""
        await asyncio.gather(*(child.start() for child in self.children))

    async def wait_ready(self) -> None:
        """Until every door answers. Raises ChildFailed when one cannot start."""
        await asyncio.gather(*(child.wait_ready() for child in self.children))

    async def stop(self, grace_s: float) -> None:
        """Lets their requests finish for `grace_s` seconds."""
        await asyncio.gather(*(child.stop(grace_s) for child in self.children))
