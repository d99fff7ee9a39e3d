"""HTTP worker processes: they accept on a listening socket of the core and ask the core for decisions."""

import asyncio
import contextlib
import logging
import os
import socket
from pathlib import Path

from emberline.supervisor.process import (
    MIN_BACKOFF_S,
    HeartbeatLimits,
    ProcessFailed,
    ProcessGroup,
    ProcessSpec,
    SupervisedProcess,
)

BACKLOG = 128
HEARTBEATS = HeartbeatLimits(silent_s=20.0)
LARGE_HEARTBEATS = HeartbeatLimits(silent_s=60.0)  # the worker for large requests decodes megabytes on its event loop

log = logging.getLogger("emberline.supervisor")


class HttpWorkers(ProcessGroup):
    """N HTTP workers; the kernel hands each new connection to one that waits in accept.

    A worker that is stopped or hangs is killed and restarted, so that its clients see their connections end and retry.
    """

    def __init__(
        self,
        n: int,
        listener: socket.socket,
        module: str,
        plan: bytes,
        heartbeats: HeartbeatLimits = HEARTBEATS,
        backoff_s: float = MIN_BACKOFF_S,
    ) -> None:
        super().__init__(_worker(f"http-{i}", listener, module, plan, heartbeats, backoff_s) for i in range(n))


class LargeRequestWorker:
    """The HTTP worker for large requests. It accepts on a Unix socket, and the first connection starts it."""

    def __init__(
        self,
        socket_path: Path,
        module: str,
        plan: bytes,
        heartbeats: HeartbeatLimits = LARGE_HEARTBEATS,
        backoff_s: float = MIN_BACKOFF_S,
    ) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.setblocking(False)
        self._listener.bind(str(socket_path))
        os.chmod(socket_path, 0o600)
        self._listener.listen(BACKLOG)
        self._module, self._plan = module, plan
        self._heartbeats, self._backoff_s = heartbeats, backoff_s
        self.process: SupervisedProcess | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Wait for the first connection, which starts the worker."""
        asyncio.get_running_loop().add_reader(self._listener, self._on_connection)

    async def stop(self, grace_s: float) -> None:
        """Stop the worker, which may drain for `grace_s`, and close the socket."""
        asyncio.get_running_loop().remove_reader(self._listener)
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self.process is not None:
            await self.process.stop(grace_s)
        self._listener.close()

    def _on_connection(self) -> None:
        """Start the worker, which does not exist yet, for the connection that waits to be accepted."""
        asyncio.get_running_loop().remove_reader(self._listener)
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        self.process = _worker(
            "http-large", self._listener, self._module, self._plan, self._heartbeats, self._backoff_s
        )
        try:
            await self.process.start()
            await self.process.wait_ready()
        except (OSError, ProcessFailed) as error:
            log.error("the process for large requests does not start: %s", error)
            self._refuse_waiting()
            self.start()

    def _refuse_waiting(self) -> None:
        """Close the connections that no worker will accept."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self._listener.accept()[0].close()


def _worker(
    name: str, listener: socket.socket, module: str, plan: bytes, heartbeats: HeartbeatLimits, backoff_s: float
) -> SupervisedProcess:
    secret = os.environ.get("EMBERLINE_SECRET")  # HTTP workers derive the same keys as the core
    return SupervisedProcess(
        ProcessSpec(
            name=name,
            module=module,
            arguments=("--fd", str(listener.fileno()), "--name", name),
            env={} if secret is None else {"EMBERLINE_SECRET": secret},
            fds=(listener.fileno(),),
            input=plan,
            heartbeats=heartbeats,
            backoff_s=backoff_s,
        )
    )
