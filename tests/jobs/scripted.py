"""A service that answers lines as their prompts say, and room that the test decides on."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable

from emberline.accounts.usage_ledger import UsageRow, UsageStatus
from emberline.protocol.errors import BadInput, DeadlineExceeded, EngineLost, Unavailable
from emberline.protocol.events import ChoiceDone, Completed, Started, TextDelta, TextEvent, Usage
from emberline.protocol.request import GenerateRequest, Principal, Priority
from emberline.service.request_context import JobContext

ERRORS: dict[str, Callable[[], Exception]] = {
    "bad": lambda: BadInput("not like this"),
    "busy": lambda: Unavailable("not now"),
    "late": lambda: DeadlineExceeded("too late"),
    "bug": lambda: ZeroDivisionError("oops"),
}


class ScriptedService:
    """A prompt of "kill" takes its engine along, "busy:2" fails twice, "hold" waits for the test, others are echoed."""

    def __init__(self) -> None:
        self.tries: Counter[str] = Counter()  # by request id
        self.running: dict[str, tuple[str, str]] = {}  # by request id: prompt and engine
        self.beside: list[tuple[str, frozenset[str]]] = []  # a prompt that began, and what ran on its engine then
        self.most = 0
        self.closed: list[str] = []
        self.principals: list[Principal] = []
        self.hold = asyncio.Event()

    async def generate(
        self, request: GenerateRequest, principal: Principal, job: JobContext | None = None
    ) -> AsyncGenerator[TextEvent, None]:
        assert job is not None
        assert request.priority is Priority.BATCH
        assert request.deadline_s is not None
        assert request.messages is not None
        prompt = request.messages[0].content
        self.tries[request.id] += 1
        self.principals.append(principal)
        others = frozenset(said for said, engine in self.running.values() if engine == job.engine)
        self.beside.append((prompt, others))
        self.running[request.id] = (prompt, job.engine)
        self.most = max(self.most, len(self.running))
        try:
            yield Started(Usage(prompt_tokens=3))
            await self._act(prompt, self.tries[request.id])
            yield TextDelta(0, f"said {prompt}")
            yield ChoiceDone(0, "stop")
        except GeneratorExit:
            self.closed.append(prompt)
            job.record_usage(_row(request, principal, "cancelled", 1))
            raise
        except asyncio.CancelledError:
            self.closed.append(prompt)
            job.record_usage(_row(request, principal, "cancelled", 1))
            raise
        except Exception:
            job.record_usage(_row(request, principal, "failed", 1))
            raise
        finally:
            del self.running[request.id]
        job.record_usage(_row(request, principal, "finished", 2))
        yield Completed(Usage(prompt_tokens=3, completion_tokens=2))

    async def _act(self, prompt: str, n_try: int) -> None:
        what, _, times = prompt.partition(":")
        if what == "kill":
            raise EngineLost("e")
        if what in ERRORS and (not times or n_try <= int(times)):
            raise ERRORS[what]()
        if what == "hold":
            await self.hold.wait()
        await asyncio.sleep(0)


def _row(request: GenerateRequest, principal: Principal, status: UsageStatus, n_out: int) -> UsageRow:
    now_us = time.time_ns() // 1000
    return UsageRow(
        id=request.id,
        account=principal.account,
        key_id=principal.key_id,
        model=request.model,
        model_version="v",
        priority="batch",
        input_tokens=3,
        output_tokens=n_out,
        status=status,
        created_us=now_us,
        finished_us=now_us,
    )


class Places:
    """So many on one engine; or all of it, for a line alone."""

    def __init__(self, n: int = 4) -> None:
        self.n = n
        self.taken = 0
        self.emptied = False
        self._room = asyncio.Event()

    def issue(self, model: str, most: int) -> list["Seat"]:
        free = 0 if self.emptied else max(0, self.n - self.taken)
        return [Seat(self) for _ in range(min(free, most))]

    def issue_exclusive(self, model: str) -> "Seat | None":
        if not self.n:
            return None
        self.emptied = True
        return Seat(self, alone=True) if not self.taken else None

    def cancel_exclusive(self, model: str) -> None:
        self.emptied = False
        self.notify_room()

    def notify_room(self) -> None:
        self._room.set()

    async def wait_for_room(self) -> None:
        await self._room.wait()
        self._room.clear()


class Seat:
    engine = "e"

    def __init__(self, places: Places, alone: bool = False) -> None:
        self._places = places
        self._alone = alone
        self._n = 1
        places.taken += 1

    def resize(self, n: int) -> None:
        self._places.taken += n - self._n
        self._n = n

    def release(self) -> None:
        assert self._n, "given back once"
        self._places.taken -= self._n
        self._n = 0
        if self._alone:
            self._places.emptied = False
        self._places.notify_room()
