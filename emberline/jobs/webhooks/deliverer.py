"""The deliverer: claims due deliveries, signs and posts them, and records the outcome.

Any number of processes may run a deliverer; leases in the store say which process has a delivery. A slow or dead
endpoint occupies at most MAX_PER_ENDPOINT of the MAX_IN_FLIGHT concurrent attempts, and the endpoints of one account
never all of them, so they do not block the others.
"""

import asyncio
import contextlib
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from emberline import __version__
from emberline.accounts.secret import Secret
from emberline.jobs.webhooks.deliveries import LEASE_S, ClaimedDelivery, Deliveries, DeliveryAttempt
from emberline.jobs.webhooks.events import EVENTS_CHANNEL, Event, webhook_body
from emberline.jobs.webhooks.webhook_store import signature_headers
from emberline.net.egress_policy import EgressPolicy, parse_target
from emberline.net.http_post import PostFailed, PostResponse, post
from emberline.net.periodic import stop
from emberline.protocol import trace_context
from emberline.protocol.errors import EmberlineError
from emberline.protocol.trace_context import TraceContext
from emberline.store import Database
from emberline.telemetry.tracing import DeliveryTrace

# The retry schedule: seconds before each attempt after the previous one failed; the first is made at once.
DELAYS_S = (0, 5, 5 * 60, 30 * 60, 2 * 3600, 5 * 3600, 10 * 3600, 14 * 3600, 20 * 3600, 24 * 3600)
JITTER = 0.1  # at most this share of a delay is added, to spread out what failed together
MAX_RETRY_AFTER_S = 24 * 3600.0
TIMEOUT_S = 15.0  # for one attempt, from name resolution to the response's head
MAX_IN_FLIGHT = 64
MAX_PER_ENDPOINT = 4
ACCOUNT_SHARE = 3  # attempts that an account may have in flight for each one that stays free
DISABLE_AFTER_DAYS = 5
IDLE_S = 2.0  # the longest wait between two looks for due deliveries
_RETRY_S = 1.0  # after an error of the store
_CLOSE_S = 2.0  # for running attempts to finish on close
_COUNT_INTERVAL_S = 5.0
_GONE = 410
_DAY_US = 86_400 * 1_000_000

log = logging.getLogger("emberline.webhooks")


def next_delay_s(n_attempts: int, retry_after_s: float | None, random: Callable[[], float]) -> float | None:
    """The delay after the `n_attempts`th attempt failed; None after the last.

    A receiver's Retry-After may lengthen it, up to a day, but not shorten it.
    """
    if n_attempts >= len(DELAYS_S):
        return None
    delay_s = DELAYS_S[n_attempts] * (1 + JITTER * random())
    return max(delay_s, min(retry_after_s or 0.0, MAX_RETRY_AFTER_S))


def account_room(n_in_flight: int, n_free: int) -> int:
    """Return the number of free attempts that an account with `n_in_flight` may start.

    An account without any gets at least one. Otherwise its attempts stay within ACCOUNT_SHARE times those still free.
    """
    room = (ACCOUNT_SHARE * n_free - n_in_flight) // (ACCOUNT_SHARE + 1)
    return max(room, 0 if n_in_flight else min(n_free, 1))


class Deliverer:
    """Sends due deliveries from `start` until `close`."""

    def __init__(
        self,
        db: Database,
        secret: Secret,
        egress: EgressPolicy,
        *,
        poll_s: float,
        timeout_s: float = TIMEOUT_S,
        disable_after_days: float = DISABLE_AFTER_DAYS,
        max_in_flight: int = MAX_IN_FLIGHT,
    ) -> None:
        assert timeout_s < LEASE_S
        self.counts: Counter[str] = Counter()  # delivered, failed attempts, exhausted, disabled
        self.n_pending = 0  # of all processes; updated every _COUNT_INTERVAL_S
        self._counted_s = -_COUNT_INTERVAL_S  # on the monotonic clock
        self._db = db
        self._deliveries = Deliveries(db)
        self._secret = secret
        self._egress = egress
        self._wakeups = db.listen(EVENTS_CHANNEL, poll_s)  # also woken when an attempt ends
        self._timeout_s = timeout_s
        self._disable_after_us = int(disable_after_days * _DAY_US)
        self._max_in_flight = max_in_flight
        self._attempts: set[asyncio.Task[None]] = set()
        self._by_endpoint: Counter[str] = Counter()  # attempts in flight, by the endpoint's id
        self._by_account: Counter[str] = Counter()
        self._loop_task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._loop_task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Let attempts finish for a moment; one that is cancelled is repeated elsewhere when its lease ends."""
        await stop(self._loop_task)
        if self._attempts:
            _, late = await asyncio.wait(self._attempts, timeout=_CLOSE_S)
            await stop(*late)

    async def _run(self) -> None:
        while True:
            try:
                began_us = self._db.now_us()
                await self._start_due()
                wait_s = await self._idle_s(began_us)
                await self._count_pending()
            except EmberlineError as error:
                log.error("deliveries are delayed: %s", error.message)
                wait_s = _RETRY_S
            except Exception:
                log.exception("deliveries are delayed")
                wait_s = _RETRY_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await anext(self._wakeups)

    async def _start_due(self) -> None:
        """Start due deliveries, the endpoint that has waited longest first, within the limits."""
        full = {endpoint_id for endpoint_id, n in self._by_endpoint.items() if n >= MAX_PER_ENDPOINT}
        while n_free := self._max_in_flight - len(self._attempts):
            accounts = [account for account, n in self._by_account.items() if not account_room(n, n_free)]
            due = await self._deliveries.next_endpoint(sorted(full), sorted(accounts))
            if due is None:
                return
            endpoint_id, account = due
            of_account = account_room(self._by_account[account], n_free)
            room = min(MAX_PER_ENDPOINT - self._by_endpoint[endpoint_id], of_account)
            for claimed in await self._deliveries.claim(endpoint_id, room):
                self._launch(claimed)
            full.add(endpoint_id)  # more of it when one of these has ended, or in the next round

    async def _idle_s(self, began_us: int) -> float:
        """Seconds until the next delivery is due; with jitter, so that processes do not look at the same moment.

        A delivery that was due at `began_us` and has not started waits for an attempt to end, which wakes the loop.
        """
        ready_us = await self._deliveries.next_ready_us(began_us)
        longest_s = IDLE_S * random.uniform(0.8, 1.2)
        if ready_us is None:
            return longest_s
        return min(max((ready_us - self._db.now_us()) / 1e6, 0.05), longest_s)

    async def _count_pending(self) -> None:
        if time.monotonic() - self._counted_s >= _COUNT_INTERVAL_S:
            self.n_pending, self._counted_s = await self._deliveries.count_pending(), time.monotonic()

    def _launch(self, claimed: ClaimedDelivery) -> None:
        """Start an attempt and count it until it ends."""
        held = ((self._by_endpoint, claimed.endpoint.id), (self._by_account, claimed.delivery.account))
        for counter, key in held:
            counter[key] += 1
        task = asyncio.create_task(self._deliver(claimed))
        self._attempts.add(task)

        def on_done(_: "asyncio.Task[None]") -> None:
            self._attempts.discard(task)
            for counter, key in held:
                counter[key] -= 1
                if not counter[key]:
                    del counter[key]
            self._wakeups.put()

        task.add_done_callback(on_done)

    async def _deliver(self, claimed: ClaimedDelivery) -> None:
        try:
            if claimed.event is None or not claimed.endpoint.enabled:
                problem = "the endpoint was disabled" if claimed.event else "the event is no longer kept"
                attempt = DeliveryAttempt(number=claimed.delivery.attempts, problem=problem)
                await self._deliveries.failed(claimed, attempt, None)
                return
            attempt, retry_after_s = await self._attempt(claimed, claimed.event)
            await self._record(claimed, attempt, retry_after_s)
        except EmberlineError as error:  # of the store: the lease ends and the delivery is repeated
            log.error("the outcome of a delivery was not recorded: %s", error.message, extra=_log_fields(claimed))
        except Exception:
            log.exception("a delivery failed", extra=_log_fields(claimed))

    async def _attempt(self, claimed: ClaimedDelivery, event: Event) -> tuple[DeliveryAttempt, float | None]:
        """The attempt for the log, and the receiver's Retry-After."""
        started_us, began_s = self._db.now_us(), time.monotonic()
        status, problem, retry_after_s = None, "", None
        trace = DeliveryTrace(trace_context.parse(claimed.traceparent))
        try:
            async with asyncio.timeout(self._timeout_s):
                status, retry_after_s = await self._send(claimed, event, trace.context)
            if 300 <= status < 400:
                problem = "redirects are not followed"
        except TimeoutError:
            problem = f"no answer within {self._timeout_s:g} s"
        except PostFailed as failed:
            problem = str(failed)
        except EmberlineError as refused:  # by the egress policy
            problem = refused.message
        trace.end(claimed.delivery.id, event.type, status, problem)
        attempt = DeliveryAttempt(
            number=claimed.delivery.attempts,
            started_us=started_us,
            took_us=int((time.monotonic() - began_s) * 1e6),
            status=status,
            problem=problem,
        )
        return attempt, retry_after_s

    async def _send(self, claimed: ClaimedDelivery, event: Event, trace: TraceContext | None) -> PostResponse:
        """The address is resolved and checked anew at every attempt."""
        target = parse_target(claimed.endpoint.url)
        addresses = await self._egress.addresses(target)
        body = webhook_body(event, claimed.endpoint.id)
        keys = claimed.endpoint.keys(self._secret, self._db.now_us())
        headers = {
            "content-type": "application/json",
            "user-agent": f"Emberline/{__version__}",
            **signature_headers(keys, event.id, int(time.time()), body),
            **({} if trace is None else {"traceparent": trace.traceparent}),
        }
        return await post(target, addresses, headers, body)

    async def _record(self, claimed: ClaimedDelivery, attempt: DeliveryAttempt, retry_after_s: float | None) -> None:
        if attempt.succeeded:
            await self._deliveries.succeeded(claimed, attempt)
            self.counts["delivered"] += 1
            return
        n_attempts = claimed.delivery.attempts - claimed.delivery.base
        delay_s = next_delay_s(n_attempts, retry_after_s, random.random)
        exhausted = await self._deliveries.failed(claimed, attempt, delay_s)
        self.counts["failed"] += 1
        self.counts["exhausted"] += exhausted
        log.info("a delivery failed: %s", attempt.problem or f"status {attempt.status}", extra=_log_fields(claimed))
        await self._disable_if_failing(claimed, attempt)

    async def _disable_if_failing(self, claimed: ClaimedDelivery, attempt: DeliveryAttempt) -> None:
        since_us, now_us = claimed.endpoint.failing_since_us, self._db.now_us()
        if attempt.status == _GONE:
            reason = "it answered 410 Gone"
            disabled = await self._deliveries.disable(claimed, reason)
        elif since_us is not None and now_us - since_us >= self._disable_after_us:
            reason = f"every delivery has failed for {self._disable_after_us / _DAY_US:g} days"
            disabled = await self._deliveries.disable(claimed, reason, since_us)
        else:
            return
        self.counts["disabled"] += disabled
        if disabled:
            log.warning("a webhook endpoint was disabled: %s", reason, extra=_log_fields(claimed))


def _log_fields(claimed: ClaimedDelivery) -> dict[str, object]:
    return {"delivery": claimed.delivery.id, "endpoint": claimed.endpoint.id, "attempt": claimed.delivery.attempts}


class DeliveryMetrics(Collector):
    def __init__(self, deliverer: Deliverer) -> None:
        self._deliverer = deliverer

    def collect(self) -> Iterator[Metric]:
        counts = self._deliverer.counts
        attempts = CounterMetricFamily(
            "emberline_webhook_deliveries",
            "Delivery attempts that succeeded or failed, and deliveries given up after the last attempt.",
            labels=["outcome"],
        )
        for outcome in ("delivered", "failed", "exhausted"):
            attempts.add_metric([outcome], counts[outcome])
        yield attempts
        yield CounterMetricFamily(
            "emberline_webhook_endpoints_disabled", "Endpoints disabled after failures.", value=counts["disabled"]
        )
        yield GaugeMetricFamily(
            "emberline_webhook_deliveries_pending", "Pending deliveries.", value=self._deliverer.n_pending
        )
