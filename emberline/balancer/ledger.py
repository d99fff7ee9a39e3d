"""What we have sent where and what of it is still to be done: charged at dispatch, released when it is over."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from emberline.balancer.worker import Worker


class Account:
    """One endpoint's side. Work is in whole microseconds at the cost's own figures, so that sums return to zero."""

    __slots__ = (
        "active",
        "batch_active",
        "decode_tokens",
        "flex_active",
        "pending",
        "prefill_tokens",
        "pushes",
        "work_us",
    )

    def __init__(self) -> None:
        self.pending: dict[str, Charge] = {}  # prompts not yet computed, in the order in which they were sent
        self.prefill_tokens = 0  # of them, uncached
        self.work_us = 0  # of those that are not queued work, which makes room for all others
        self.pushes = 0  # of them, those computed for another endpoint
        self.active = 0  # sequences
        self.batch_active = 0  # of them, queued work
        self.flex_active = 0  # of the others, those of the flex class
        self.decode_tokens = 0  # prompts and what was emitted

    @property
    def sync_active(self) -> int:
        return self.active - self.batch_active

    @property
    def empty(self) -> bool:
        return not any(getattr(self, name) for name in self.__slots__)


class Charge:
    """One request's side: which endpoints compute its prompt and draw its tokens, and what it cost them."""

    __slots__ = (
        "at_s",
        "batch",
        "began_s",
        "decode",
        "emitted",
        "flex",
        "incarnations",
        "n",
        "prefill",
        "request_id",
        "seen_s",
        "total_tokens",
        "uncached_tokens",
        "work_us",
    )

    def __init__(
        self, request_id: str, decode: "Worker", prefill: "Worker", uncached_tokens: int, total_tokens: int, n: int
    ) -> None:
        self.request_id = request_id
        self.decode = decode
        self.prefill = prefill  # the same as `decode` where that one computes the prompt
        self.uncached_tokens = uncached_tokens
        self.total_tokens = total_tokens
        self.n = n
        self.work_us = 0
        self.batch = self.flex = False
        self.emitted = 0
        self.at_s = self.seen_s = 0.0
        self.began_s: float | None = None
        self.incarnations = (decode.incarnation, prefill.incarnation)


class InFlightLedger:
    """Every open charge. What an endpoint is charged is the sum over those that are still on it."""

    def __init__(self) -> None:
        self._open: dict[str, Charge] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    def __len__(self) -> int:
        return len(self._open)

    def get(self, request_id: str) -> Charge | None:
        return self._open.get(request_id)

    def ids(self) -> set[str]:
        return set(self._open)

    def charge(self, charge: Charge, work_us: int, batch: bool, now_s: float) -> None:
        assert charge.request_id not in self._open, f"{charge.request_id} is charged already"
        self._open[charge.request_id] = charge
        charge.work_us, charge.batch, charge.at_s, charge.seen_s = work_us, batch, now_s, now_s
        prefill, decode = charge.prefill.account, charge.decode.account
        prefill.pending[charge.request_id] = charge
        prefill.prefill_tokens += charge.uncached_tokens
        prefill.work_us += 0 if batch else work_us
        prefill.pushes += prefill is not decode
        decode.active += charge.n
        decode.batch_active += charge.n if batch else 0
        decode.flex_active += charge.n if charge.flex else 0
        decode.decode_tokens += charge.total_tokens * charge.n

    def prefilled(self, charge: Charge) -> bool:
        """The prompt is computed. Whether that is news."""
        account = charge.prefill.account
        if account.pending.pop(charge.request_id, None) is None:
            return False
        account.prefill_tokens -= charge.uncached_tokens
        account.work_us -= 0 if charge.batch else charge.work_us
        account.pushes -= charge.prefill is not charge.decode
        return True

    def emitted(self, charge: Charge, n_tokens: int) -> None:
        charge.emitted += n_tokens
        if charge.incarnations[0] == charge.decode.incarnation:
            charge.decode.account.decode_tokens += n_tokens

    def release(self, request_id: str) -> Charge | None:
        """All of it. None: there was nothing, or no more."""
        charge = self._open.pop(request_id, None)
        if charge is None:
            return None
        self.prefilled(charge)
        if charge.incarnations[0] == charge.decode.incarnation:
            account = charge.decode.account
            account.active -= charge.n
            account.batch_active -= charge.n if charge.batch else 0
            account.flex_active -= charge.n if charge.flex else 0
            account.decode_tokens -= charge.total_tokens * charge.n + charge.emitted
        return charge

    def void(self, worker: "Worker") -> None:
        """The endpoint is gone with all that was on it. Its charges stay open until each request ends or moves."""
        worker.incarnation += 1
        worker.account = Account()

    def overdue(self, waiting_s: float, running_s: float) -> list[str]:
        """Requests that gave no sign of life since before `waiting_s`, or, once they had begun, `running_s`."""
        return [
            request_id
            for request_id, charge in self._open.items()
            if charge.seen_s < (waiting_s if charge.began_s is None else running_s)
        ]
