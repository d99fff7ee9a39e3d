"""The loop of a predictor's worker: hands requests to Cog's server, a thread each, and their outputs to the clients.

It takes the place of the step loop of an engine: the worker's socket server drives it. What threads find out is picked
up by the next step, for which they wake the socket server.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

import msgspec

from emberline.engine.encoders.request_loop import RequestLoop, deadline_s
from emberline.predictor.cog_server import CogServer, PredictorCrashed
from emberline.protocol.errors import (
    BadInput,
    Cancelled,
    DeadlineExceeded,
    EmberlineError,
    Internal,
    Overloaded,
    TooLarge,
    Unavailable,
)
from emberline.protocol.events import TokenDelta, Usage
from emberline.protocol.frames import MAX_PROBLEM_CHARS, EngineLoad
from emberline.protocol.prediction import MAX_INPUT_BYTES, PIECE_BYTES, Manifest, Prediction, PredictParams
from emberline.protocol.request import EngineRequest

MAX_WAITING = 256
BEGIN_S = 0.05  # of a prediction that has not ended, after which the core is told that it runs
PROGRESS_S = 1.0  # between two steps while predictions run: a step tells the core that the worker is alive
POLL_S = 0.001  # between two looks at a slot: Cog's server frees it after its reply
LATE_S = 5.0  # for a thread to see that its prediction's time is over; then the step ends it
EXPECTED_S = 1.0  # of a prediction, until one has ended
MEAN_SHARE = 0.2  # of the latest prediction in the mean of their seconds
CANCEL_S = 10.0  # for a prediction to end once it was cancelled; then the server is killed
# The model's card shows the latest failure as long as one of the last OF_LAST predictions failed.
OF_LAST = 20

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Waiting:
    """A prediction that has not ended."""

    request: EngineRequest
    params: PredictParams
    deadline_s: float | None  # monotonic
    is_started: bool = False  # a thread has it
    began_s: float = 0.0  # monotonic; 0: it waits for a slot
    ended_s: float = 0.0
    is_told: bool = False  # the core knows that it runs
    is_over: bool = False  # its thread has the result

    @property
    def running(self) -> bool:
        return self.began_s > 0

    @property
    def _compute_ms(self) -> int:
        return int(1000 * ((self.ended_s or time.monotonic()) - self.began_s)) if self.began_s else 0

    def usage(self) -> Usage:
        return Usage(predictions=1, compute_ms=self._compute_ms)

    def partial_usage(self) -> Usage:
        return Usage(predictions=1 if self.running else 0, compute_ms=self._compute_ms, partial=True)


class PredictionLoop(RequestLoop[_Waiting]):
    def __init__(self, manifest: Manifest, server: CogServer, on_crash: Callable[[str], None]) -> None:
        """`on_crash` is called, in the socket server's thread, when the server cannot go on."""
        super().__init__(MAX_WAITING)
        self._manifest = manifest
        self._server = server
        self._on_crash = on_crash
        self._threads: list[threading.Thread] = []  # one for each slot that was needed yet
        self._n_busy = 0  # those of them that have a prediction
        self._handed: SimpleQueue[_Waiting | None] = SimpleQueue()  # to them; None: end
        self._found: deque[tuple[_Waiting, TokenDelta | None, bool]] = deque()  # by them; True: the thread is free
        self._crash = ""
        self._full = ""  # why the server starts again once no prediction runs; empty: it need not
        self._cancelled: dict[str, float] = {}  # predictions that clients have given up, and since when
        self._mean_s = 0.0  # of a prediction, the latest ones counting most; 0: none has ended
        self._problems: deque[str] = deque(maxlen=OF_LAST)  # of the last predictions, one each; empty: it did well
        self._lock = threading.Lock()
        self.wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    # --- requests ----------------------------------------------------------------------------------------------------

    def submit(self, request: EngineRequest, now_s: float) -> None:
        params = request.predict
        if params is None:
            raise BadInput("this model makes predictions from inputs, and does nothing else: use `run`")
        if params.stream and not self._manifest.streams:
            raise BadInput("this model does not stream: leave `stream` out", param="stream")
        if len(params.input) > MAX_INPUT_BYTES:
            raise TooLarge(f"an input has at most {MAX_INPUT_BYTES >> 20} MiB")
        self._check_room(request)
        self._add(_Waiting(request, params, deadline_s(request, now_s)))
        self._start_next()

    def _start_next(self) -> None:
        """Hand waiting predictions, in order, to the threads that are free. No prediction waits in the threads' queue,
        which would keep the inputs of those that were aborted."""
        while self._n_busy < self._manifest.slots and not self._full:
            item = next((each for each in self._requests.values() if not each.is_started), None)
            if item is None:
                return
            item.is_started = True
            if self._n_busy == len(self._threads):
                thread = threading.Thread(target=self._run_all, name="prediction", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._n_busy += 1
            self._handed.put(item)

    def abort(self, request_id: str) -> TokenDelta | None:
        item = self._requests.get(request_id)
        ended = super().abort(request_id)
        if item is not None:  # after its removal: a thread that begins with it now finds it gone
            self._give_up(item)
        return ended

    def _give_up(self, item: _Waiting) -> None:
        """Cancel a prediction at the server, in a thread: it may take a while."""
        name = item.request.id
        with self._lock:
            is_computed = item.running and not item.is_over
            if is_computed:
                self._cancelled[name] = time.monotonic()
        if is_computed:
            threading.Thread(target=self._server.cancel, args=(name,), daemon=True).start()

    @property
    def load(self) -> EngineLoad:
        """The worker's load. A prediction counts as one prompt token, so that the planner scales predictors by their
        queue and slots: the rate is of as many predictions at once as there are slots."""
        rate = self._manifest.slots / (self._mean_s or EXPECTED_S)
        with self._lock:
            problem = next(filter(None, reversed(self._problems)), "")
        return msgspec.structs.replace(super().load, prefill_rate=round(rate, 6), problem=problem)

    # --- steps -------------------------------------------------------------------------------------------------------

    @property
    def wake_s(self) -> float:  # type: ignore[override]
        """When the next step is due, if nothing wakes the socket server before."""
        now_s = time.monotonic()
        begins = [
            (item.began_s or now_s) + BEGIN_S
            for item in self._requests.values()
            if item.is_started and not item.is_told and not item.is_over
        ]
        return min([now_s + PROGRESS_S, *begins])

    @property
    def blocked(self) -> bool:  # type: ignore[override]
        """True if the socket server can sleep although the loop is busy: threads wake it."""
        return not self._found

    @property
    def busy(self) -> bool:
        return bool(self._requests or self._found or self._crash)

    def clear_wakeup(self) -> None:
        """Make the next step wait for the next wake-up."""
        os.eventfd_read(self.wakeup)

    def step(self, now_s: float) -> list[TokenDelta]:
        limit_s = self._manifest.resources.predict_s + LATE_S
        for item in self._requests.values():
            # A server that sends just enough keeps the thread beyond its own limit.
            if item.running and not item.is_over and now_s > item.began_s + limit_s:
                item.deadline_s = item.began_s + limit_s
                self._note(item, f"the prediction did not end within {self._manifest.resources.predict_s:g} s")
            if item.deadline_s is not None and now_s > item.deadline_s:
                self._give_up(item)
        deltas, n_bytes = self._fail_late(now_s), 0
        while self._found and n_bytes < PIECE_BYTES:  # one piece in a frame, so that the core reads others in between
            item, delta, is_free = self._found.popleft()
            self._n_busy -= is_free
            n_bytes += 0 if delta is None else len(delta.values)
            if delta is not None and self._requests.get(item.request.id) is item:
                deltas.append(delta)
                if delta.finish is not None:
                    del self._requests[item.request.id]
        for item in self._requests.values():
            if item.running and not item.is_told and not item.is_over and now_s >= item.began_s + BEGIN_S:
                item.is_told = True
                deltas.append(TokenDelta(item.request.id, usage=item.usage()))
        self._start_next()
        self._steps += 1
        self.computed_tokens += 1
        with self._lock:
            stuck = [name for name, since_s in self._cancelled.items() if now_s > since_s + CANCEL_S]
        if self._full and not any(item.is_started for item in self._requests.values()):
            self._crash = self._crash or self._full
        if stuck and not self._crash:
            self._crash = "a prediction that was cancelled goes on"
        if self._crash:
            for item in list(self._requests.values()):
                deltas.append(self._failed(item, _crash_error(self._crash, item.running)))
            self._on_crash(self._crash)
        return deltas

    def close(self) -> None:
        """End the server and the threads, whose predictions fail."""
        self._server.kill()
        for _ in self._threads:
            self._handed.put(None)
        for thread in self._threads:
            thread.join()

    # --- threads -----------------------------------------------------------------------------------------------------

    def _run_all(self) -> None:
        while (item := self._handed.get()) is not None:
            try:
                delta = self._run(item)
            except Exception:  # the thread goes on: there is one for each slot
                _log.exception("a prediction failed", extra={"request_id": item.request.id})
                info = Internal("the prediction failed; the worker's log says why").info()
                delta = TokenDelta(item.request.id, finish="error", usage=item.partial_usage(), error=info)
            self._tell(item, delta, is_free=True)
            del item, delta

    def _run(self, item: _Waiting) -> TokenDelta | None:
        """Compute a prediction. Returns its end; None if it was aborted while it waited."""
        request = item.request
        item.began_s = time.monotonic()
        on_output = None
        if item.params.stream:

            def on_output(chunk: bytes) -> None:
                item.is_told = True
                self._tell(item, TokenDelta(request.id, values=chunk))

        try:
            if self._requests.get(request.id) is not item or self._crash:
                return None
            limit_s = self._manifest.resources.predict_s
            prediction = self._predict(item, limit_s, on_output)
            item.ended_s = time.monotonic()
            took_s = item.ended_s - item.began_s
            self._mean_s = took_s if not self._mean_s else self._mean_s + MEAN_SHARE * (took_s - self._mean_s)
            self._ended(prediction.warning)
            if item.params.takes_pieces and len(output := memoryview(prediction.output)) > PIECE_BYTES:
                for at in range(0, len(output), PIECE_BYTES):
                    piece = TokenDelta(request.id, values=bytes(output[at : at + PIECE_BYTES]))
                    self._found.append((item, piece, False))
                prediction = msgspec.structs.replace(prediction, output=msgspec.Raw(b"null"))
            values = msgspec.json.encode(prediction)
            delta = TokenDelta(request.id, finish="stop", usage=item.usage(), values=values)
        except EmberlineError as error:
            item.ended_s = time.monotonic()
            if isinstance(error, PredictorCrashed):
                self._crash = error.message
            elif self._server.scratch_is_full:  # files of earlier predictions stay there
                self._full = f"{error.message}; its scratch space is full, and is emptied"
            self._note(item, error.message, is_own=not isinstance(error, BadInput | Cancelled | Overloaded))
            delta = TokenDelta(request.id, finish="error", usage=item.partial_usage(), error=error.info())
        finally:
            with self._lock:
                item.is_over = True
                self._cancelled.pop(request.id, None)
        if delta.error is not None and delta.error.kind == DeadlineExceeded.kind and not self._frees_slot(request.id):
            self._tell(item, delta)
            self._crash = "a prediction that was ended by its limit of time goes on"
        return delta

    def _predict(self, item: _Waiting, limit_s: float, on_output: Callable[[bytes], None] | None) -> Prediction:
        """Compute a prediction. Waits for a slot that a cancelled prediction has not left yet."""
        if not item.params.input:
            return self._server.check()
        end_s = time.monotonic() + CANCEL_S
        name, params = item.request.id, item.params
        while True:
            try:
                return self._server.predict(name, params.input, limit_s, on_output, params.context)
            except Overloaded:
                if time.monotonic() > end_s:
                    raise
                time.sleep(POLL_S)
                item.began_s = time.monotonic()  # a wait is not computing

    def _note(self, item: _Waiting, problem: str, *, is_own: bool = True) -> None:
        """Record why a prediction failed: in the predictor's log and, if the fault is its own, for the model's card."""
        self._server.log.add(f"prediction {item.request.id} failed: {problem}")
        if is_own:
            self._ended(problem)

    def _ended(self, problem: str) -> None:
        """Count a prediction that has ended. `problem` is empty if the predictor did well."""
        with self._lock:
            self._problems.append(problem[:MAX_PROBLEM_CHARS])

    def _frees_slot(self, name: str) -> bool:
        """Cancel a prediction whose time is over. Returns False if it goes on nevertheless."""
        end_s = time.monotonic() + CANCEL_S
        while self._server.cancel(name):
            if time.monotonic() > end_s:
                return False
            time.sleep(POLL_S)
        return True

    def _tell(self, item: _Waiting, delta: TokenDelta | None, is_free: bool = False) -> None:
        self._found.append((item, delta, is_free))
        os.eventfd_write(self.wakeup, 1)


def _crash_error(why: str, was_running: bool) -> EmberlineError:
    """A prediction that ran may be what crashed the predictor; one that waited is computed elsewhere, or later."""
    return PredictorCrashed(why) if was_running else Unavailable(f"{why}; it is started again", retry_after_s=1)
