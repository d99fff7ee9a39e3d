"""Renders the chat templates of models that are not of our catalog in confined processes.

A template is code of a stranger. The sandbox (`template_sandbox`) bounds most of what it may do, and the process bounds
the rest: memory, time, files and network. A process serves one template, so no template sees what others render.
"""

import json
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from emberline.protocol.errors import BadInput, Overloaded, Unavailable
from emberline.text.template_renderer import BadTemplate, RefusedTurns, TemplateRenderer, Turn, stopped

MODULE = "emberline.text.template_process"
N_PROCESSES = 2  # of one template; the second is started when both are needed
MAX_WAITING = 32  # renderings of one template
CPU_S = 2.5  # of one rendering: the sandbox stops most templates after 2 s

log = logging.getLogger("emberline.text")


class ConfinedProcess(Protocol):
    """A confined process, as the supervisor's launcher starts it."""

    @property
    def is_alive(self) -> bool: ...

    def exchange(self, data: bytes, cpu_s: float) -> bytes:
        """The reply to `data`. TimeoutError: it took too long; EOFError: it ended. It is dead after an exception."""

    def kill(self) -> None: ...


# Starts a process that answers by the `handle` of a module. Raises RuntimeError if it cannot.
StartProcess = Callable[[str], ConfinedProcess]


class ConfinedTemplates:
    """Makes renderers whose templates run in confined processes."""

    def __init__(self, start: StartProcess, cpu_s: float = CPU_S) -> None:
        self._start, self._cpu_s = start, cpu_s

    def __call__(self, source: str) -> TemplateRenderer:
        return ConfinedRenderer(source, self._start, self._cpu_s)


class ConfinedRenderer:
    """One template and its processes, which end with it. Threads may share it."""

    blocks = True

    def __init__(self, source: str, start: StartProcess, cpu_s: float) -> None:
        """Compile the template in the first process, which is warm from then on. Raises BadTemplate."""
        self._start, self._cpu_s = start, cpu_s
        self._source = json.dumps({"source": source}).encode()
        self._slots = threading.BoundedSemaphore(N_PROCESSES)
        self._waiting = threading.BoundedSemaphore(N_PROCESSES + MAX_WAITING)
        self._idle: list[ConfinedProcess] = []  # a stack: one process serves most of the load
        weakref.finalize(self, _kill_all, self._idle)
        process, self.variables = self._started()
        self._idle.append(process)

    def render(self, turns: list[Turn], values: dict[str, Any]) -> str:
        """The rendered text. Blocks: call it in a thread.

        Raises RefusedTurns; BadInput if the template was stopped; Overloaded if too many renderings of it wait."""
        if not self._waiting.acquire(blocking=False):
            raise Overloaded("too many conversations wait for this model's chat template", retry_after_s=5)
        try:
            with self._slots:
                return self._render(json.dumps({"turns": turns, "values": values}).encode())
        finally:
            self._waiting.release()

    def _render(self, data: bytes) -> str:
        process = self._idle.pop() if self._idle else self._started()[0]
        if not process.is_alive:
            process.kill()
            process = self._started()[0]
        try:
            answer = json.loads(self._exchange(process, data))
        except BadInput as error:
            log.warning("%s: its process was ended", error.message)
            raise
        self._idle.append(process)
        if (text := answer.get("text")) is not None:
            return str(text)
        message = str(answer["error"])
        raise RefusedTurns(message) if answer["refused"] else BadInput(message, param="messages")

    def _started(self) -> tuple[ConfinedProcess, frozenset[str]]:
        try:
            process = self._start(MODULE)
        except (OSError, RuntimeError) as error:
            raise Unavailable(f"no process for chat templates can be started: {error}", retry_after_s=5) from None
        try:
            answer = json.loads(self._exchange(process, self._source))
        except BadInput as error:
            raise BadTemplate(f"the chat template does not compile: {error.message}") from None
        if "error" in answer:
            process.kill()
            raise BadTemplate(answer["error"])
        return process, frozenset(answer["variables"])

    def _exchange(self, process: ConfinedProcess, data: bytes) -> bytes:
        try:
            return process.exchange(data, self._cpu_s)
        except TimeoutError:
            raise stopped(f"it ran for more than {self._cpu_s:g} seconds") from None
        except EOFError:
            raise stopped("its process ended, as it does when it uses too much memory or goes too deep") from None


def _kill_all(processes: list[ConfinedProcess]) -> None:
    for process in processes:
        process.kill()
