"""HTTP worker processes: they accept on the core's listening socket and ask the core for decisions."""

import os
import socket
from collections.abc import Sequence

from emberline.supervisor.process import ProcessGroup, ProcessSpec, SupervisedProcess


class HttpWorkers(ProcessGroup):
    """N HTTP workers; the kernel hands each new connection to one that waits in accept."""

    def __init__(self, n: int, listener: socket.socket, module: str, arguments: Sequence[str]) -> None:
        fd = listener.fileno()
        secret = os.environ.get("EMBERLINE_SECRET")  # HTTP workers derive the same keys as the core
        super().__init__(
            SupervisedProcess(
                ProcessSpec(
                    name=f"http-{index}",
                    module=module,
                    arguments=("--fd", str(fd), "--name", f"http-{index}", *arguments),
                    env={} if secret is None else {"EMBERLINE_SECRET": secret},
                    fds=(fd,),
                )
            )
            for index in range(n)
        )
