"""Fakes of the service and of admission for tests of the puller."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping

from emberline.accounts.usage_row import UsageRow, UsageStatus
from emberline.protocol.errors import BadInput, BudgetReserved, DeadlineExceeded, EngineLost, Unavailable
from emberline.protocol.events import ChoiceDone, Completed, Started, TextDelta, Usage
from emberline.protocol.request import GenerateRequest, Principal, Priority
from emberline.service.work import TaskEvents, Work

ERRORS: dict[str, Callable[[], Exception]] = {
    "bad": lambda: BadInput("not like this"),
    "busy": lambda: Unavailable("not now"),
    "reserved": lambda: BudgetReserved("running requests have reserved it"),
    "late": lambda: DeadlineExceeded("too late"),
    "bug": lambda: ZeroDivisionError("oops"),
}


class FakeService:
    """Acts on the prompt: "kill" loses the engine, "busy:2" fails twice, "hold" waits for the test, others echo."""

    def __init__(self) -> None:
        self.attempts: Counter[str] = Counter()  # by request id
        self.running: dict[str, tuple[str, str]] = {}  # by request id: prompt and engine
        self.neighbours: list[
            tuple[str, frozenset[str]]
        ] = []  # a prompt that started, and the prompts running on its engine then
        self.max_running = 0
        self.aborted: list[str] = []
        self.principals: list[Principal] = []
        self.hold = asyncio.Event()
        self.settled = asyncio.Event()  # a request that is cancelled then knows what was computed
        self.settled.set()

    async def run(self, work: Work) -> TaskEvents:
        request, principal, job = work.task, work.principal, work.job
        assert isinstance(request, GenerateRequest)
        assert job is not None
        assert request.priority is Priority.BATCH
        assert request.deadline_s is not None
        assert request.messages is not None
        prompt = request.messages[0].content
        self.attempts[request.id] += 1
        self.principals.append(principal)
        others = frozenset(said for said, engine in self.running.values() if engine == job.engine)
        self.neighbours.append((prompt, others))
        self.running[request.id] = (prompt, job.engine)
        self.max_running = max(self.max_running, len(self.running))
        try:
            yield Started(Usage(prompt_tokens=3))
            await self._act(prompt, self.attempts[request.id])
            yield TextDelta(0, f"said {prompt}")
            yield ChoiceDone(0, "stop")
        except GeneratorExit:
            self.aborted.append(prompt)
            job.record_usage(_row(request, principal, "cancelled", 1))
            raise
        except asyncio.CancelledError:
            self.aborted.append(prompt)
            await self.settled.wait()
            job.record_usage(_row(request, principal, "cancelled", 1))
            raise
        except Exception:
            job.record_usage(_row(request, principal, "failed", 1))
            raise
        finally:
            del self.running[request.id]
        job.record_usage(_row(request, principal, "finished", 2))
        yield Completed(Usage(prompt_tokens=3, completion_tokens=2))

    async def _act(self, prompt: str, attempt: int) -> None:
        what, _, times = prompt.partition(":")
        if what == "kill":
            raise EngineLost("e")
        if what in ERRORS and (not times or attempt <= int(times)):
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


class FakeAdmission:
    """Grants for `n` sequences on one engine, or an exclusive one."""

    def __init__(self, n: int = 4) -> None:
        self.n = n
        self.taken = 0
        self.n_asked = 0  # times that a puller asked for grants
        self.n_waits = 0  # times that it waited for room
        self.draining = False
        self.queued_s: dict[str, float] = {}
        self._room = asyncio.Event()

    def issue(self, model: str, most: int) -> list["FakeGrant"]:
        self.n_asked += 1
        free = 0 if self.draining else max(0, self.n - self.taken)
        return [FakeGrant(self) for _ in range(min(free, most))]

    def queued(self, oldest_s: Mapping[str, float]) -> None:
        self.queued_s = dict(oldest_s)

    def issue_exclusive(self, model: str) -> "FakeGrant | None":
        if not self.n:
            return None
        self.draining = True
        return FakeGrant(self, exclusive=True) if not self.taken else None

    def cancel_exclusive(self, model: str) -> None:
        self.draining = False
        self.notify_room()

    def notify_room(self) -> None:
        self._room.set()

    async def wait_for_room(self) -> None:
        self.n_waits += 1
        await self._room.wait()
        self._room.clear()


class FakeGrant:
    engine = "e"

    def __init__(self, admission: FakeAdmission, exclusive: bool = False) -> None:
        self._admission = admission
        self._exclusive = exclusive
        self._n = 1
        admission.taken += 1

    def resize(self, n: int) -> None:
        self._admission.taken += n - self._n
        self._n = n

    def release(self) -> None:
        assert self._n, "given back once"
        self._admission.taken -= self._n
        self._n = 0
        if self._exclusive:
            self._admission.draining = False
        self._admission.notify_room()
