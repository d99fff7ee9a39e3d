"""A pool of confined processes that decode images.

A file that takes too long or too much memory costs its process, which is started anew, and its request an error.
"""

import asyncio
import logging
import os
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import msgspec

from emberline.images.decode_job import DecodedImage, DecodeJob
from emberline.protocol.errors import Overloaded, Unavailable
from emberline.text.template_processes import ConfinedProcess, StartProcess

MODULE = "emberline.images.decode_process"
MEMORY_BYTES = 1 << 30  # of a process: 50 million pixels with alpha take half of it
CPU_S = 10.0  # of one image
MAX_WAITING = 1024  # images
MAX_WAITING_BYTES = 512 << 20  # of their files; they wait also when their requests are gone
MAX_PROCESSES = 8

log = logging.getLogger("emberline.images")
_decoded = msgspec.msgpack.Decoder(DecodedImage)


def default_processes() -> int:
    """Number of decoding processes on this machine: half of its processors, at most MAX_PROCESSES."""
    return min(MAX_PROCESSES, max(1, len(os.sched_getaffinity(0)) // 2))


class ImageDecoders:
    """Decodes images in at most `n_processes` processes, which are started when they are needed and then kept."""

    def __init__(
        self,
        start: StartProcess,
        n_processes: int | None = None,
        cpu_s: float = CPU_S,
        max_waiting: int = MAX_WAITING,
        max_waiting_bytes: int = MAX_WAITING_BYTES,
    ) -> None:
        self._start, self._cpu_s, self._max_waiting = start, cpu_s, max_waiting
        self._threads = ThreadPoolExecutor(n_processes or default_processes(), "emberline-images")
        self._idle: list[ConfinedProcess] = []  # a stack: few images keep few processes busy
        self._lock = threading.Lock()
        self._is_closed = False
        self._n_waiting = 0
        self._n_bytes = 0  # of the files that wait
        self._max_bytes = max_waiting_bytes
        weakref.finalize(self, _kill_all, self._idle)

    async def decode(self, job: DecodeJob) -> DecodedImage:
        """Decode one image. Raises Overloaded if too many wait, and Unavailable if no process can be started."""
        n_bytes = len(job.data)
        if self._n_waiting >= self._max_waiting or self._n_bytes + n_bytes > self._max_bytes:
            raise Overloaded("too many images wait to be decoded", retry_after_s=5)
        self._n_waiting, self._n_bytes = self._n_waiting + 1, self._n_bytes + n_bytes
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._decode, job)
        finally:
            self._n_waiting, self._n_bytes = self._n_waiting - 1, self._n_bytes - n_bytes

    async def warm_up(self) -> None:
        """Start a process, so that the first image need not wait for it."""
        await asyncio.get_running_loop().run_in_executor(self._threads, lambda: self._keep(self._process()))

    def close(self) -> None:
        """End the processes. Images that are being decoded fail."""
        with self._lock:
            self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        _kill_all(self._idle)

    def _decode(self, job: DecodeJob) -> DecodedImage:
        process = self._process()
        try:
            decoded = _decoded.decode(process.exchange(msgspec.msgpack.encode(job), self._cpu_s))
        except TimeoutError:
            return self._ended(f"decoding it takes more than {self._cpu_s:g} seconds")
        except EOFError:
            return self._ended("decoding it takes too much memory or time")
        self._keep(process)
        return decoded

    def _ended(self, why: str) -> DecodedImage:
        log.warning("a process that decodes images was ended: %s", why)
        return DecodedImage(why)

    def _process(self) -> ConfinedProcess:
        while True:
            with self._lock:
                process = self._idle.pop() if self._idle else None
            if process is None:
                break
            if process.is_alive:
                return process
            process.kill()
        try:
            return self._start(MODULE)
        except (OSError, RuntimeError) as error:
            raise Unavailable(f"no process for images can be started: {error}", retry_after_s=5) from None

    def _keep(self, process: ConfinedProcess) -> None:
        with self._lock:
            if not self._is_closed:
                return self._idle.append(process)
        process.kill()


def _kill_all(processes: list[ConfinedProcess]) -> None:
    while processes:
        processes.pop().kill()
