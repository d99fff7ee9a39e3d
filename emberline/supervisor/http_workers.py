"""HTTP worker processes: they accept on a listening socket of the core and ask the core for decisions."""

import asyncio
import contextlib
import logging
import os
import socket
from pathlib import Path

from emberline.supervisor.process import ProcessFailed, ProcessGroup, ProcessSpec, SupervisedProcess

BACKLOG = 128
PING_INTERVAL_S = 10.0
PING_TIMEOUT_S = 60.0  # without an answer the worker for large requests is killed and starts anew
_PING = b"GET /favicon.ico HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"

log = logging.getLogger("emberline.supervisor")


class HttpWorkers(ProcessGroup):
    """N HTTP workers; the kernel hands each new connection to one that waits in accept."""

    def __init__(self, n: int, listener: socket.socket, module: str, plan: bytes) -> None:
        super().__init__(_worker(f"http-{index}", listener, module, plan) for index in range(n))


class LargeRequestWorker:
    """The HTTP worker for large requests. It accepts on a Unix socket, and the first connection starts it."""

    def __init__(self, socket_path: Path, module: str, plan: bytes) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.setblocking(False)
        self._listener.bind(str(socket_path))
        os.chmod(socket_path, 0o600)
        self._listener.listen(BACKLOG)
        self._path = str(socket_path)
        self._module, self._plan = module, plan
        self.process: SupervisedProcess | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        asyncio.get_running_loop().add_reader(self._listener, self._on_connection)

    async def stop(self, grace_s: float) -> None:
        asyncio.get_running_loop().remove_reader(self._listener)
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self.process is not None:
            await self.process.stop(grace_s)
        self._listener.close()

    def _on_connection(self) -> None:
        """A connection waits to be accepted by the worker, which does not exist yet."""
        asyncio.get_running_loop().remove_reader(self._listener)
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        self.process = _worker("http-large", self._listener, self._module, self._plan)
        try:
            await self.process.start()
            await self.process.wait_ready()
        except (OSError, ProcessFailed) as error:
            log.error("the process for large requests does not start: %s", error)
            self._refuse_waiting()
            self.start()
            return
        while True:
            await asyncio.sleep(PING_INTERVAL_S)
            if self.process.pid is not None and not await self._answers():
                self.process.kill(f"it does not answer for {PING_TIMEOUT_S:.0f} s")

    async def _answers(self) -> bool:
        try:
            async with asyncio.timeout(PING_TIMEOUT_S):
                reader, writer = await asyncio.open_unix_connection(self._path)
                try:
                    writer.write(_PING)
                    await reader.read(1)
                finally:
                    writer.close()
        except TimeoutError:
            return False
        except OSError:  # it is gone, and will be restarted
            pass
        return True

    def _refuse_waiting(self) -> None:
        """Close the connections that no worker will accept."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self._listener.accept()[0].close()


def _worker(name: str, listener: socket.socket, module: str, plan: bytes) -> SupervisedProcess:
    secret = os.environ.get("EMBERLINE_SECRET")  # HTTP workers derive the same keys as the core
    return SupervisedProcess(
        ProcessSpec(
            name=name,
            module=module,
            arguments=("--fd", str(listener.fileno()), "--name", name),
            env={} if secret is None else {"EMBERLINE_SECRET": secret},
            fds=(listener.fileno(),),
            input=plan,
        )
    )
