"""Sending what is due: takes deliveries, signs and posts them, and writes down what came of it.

Any number of processes may run one; the store's rows say whose a delivery is. An endpoint that is slow or gone holds at
most MAX_PER_ENDPOINT of the places, so the others' deliveries go on.
"""

import asyncio
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
from emberline.jobs.webhooks.egress_policy import EgressPolicy, parse_target
from emberline.jobs.webhooks.endpoints import signed_headers
from emberline.jobs.webhooks.event_feed import ChannelListener
from emberline.jobs.webhooks.events import Event, webhook_body
from emberline.jobs.webhooks.http_post import PostFailed, PostResponse, post
from emberline.protocol.errors import EmberlineError
from emberline.store import Database

# Seconds before each attempt, after the one before it failed; the first is made at once.
DELAYS_S = (0, 5, 5 * 60, 30 * 60, 2 * 3600, 5 * 3600, 10 * 3600, 14 * 3600, 20 * 3600, 24 * 3600)
JITTER = 0.1  # at most this part of a delay is added, so that what failed together does not come back together
MAX_RETRY_AFTER_S = 24 * 3600.0


def next_delay_s(n_made: int, retry_after_s: float | None, random: Callable[[], float]) -> float | None:
    """How long to wait after attempt number `n_made` (1 is the first) failed; None: it was the last.

    A receiver that asks for more time gets it, up to a day; asking for less changes nothing.
    """
    if n_made >= len(DELAYS_S):
        return None
    delay_s = DELAYS_S[n_made] * (1 + JITTER * random())
    return max(delay_s, min(retry_after_s or 0.0, MAX_RETRY_AFTER_S))


TIMEOUT_S = 15.0  # for one attempt, from the name's resolution to the answer's head
MAX_IN_FLIGHT = 64
MAX_PER_ENDPOINT = 4
DISABLE_AFTER_DAYS = 5
POLL_S = 2.0
_RETRY_S = 1.0  # after trouble with the store
_CLOSE_S = 2.0  # for attempts that run when we close
_COUNT_INTERVAL_S = 5.0
_GONE = 410
_DAY_US = 86_400 * 1_000_000

log = logging.getLogger("emberline.webhooks")


class Deliverer:
    def __init__(
        self,
        db: Database,
        secret: Secret,
        reach: EgressPolicy,
        bell: ChannelListener,
        *,
        timeout_s: float = TIMEOUT_S,
        disable_after_days: float = DISABLE_AFTER_DAYS,
    ) -> None:
        assert timeout_s < LEASE_S
        self.counts: Counter[str] = Counter()  # delivered, failed attempts, exhausted, disabled
        self.n_pending = 0  # all that wait, whoever will deliver them; counted now and then
        self._counted_s = -_COUNT_INTERVAL_S  # on the monotonic clock
        self._db = db
        self._deliveries = Deliveries(db)
        self._secret = secret
        self._reach = reach
        self._bell = bell
        self._timeout_s = timeout_s
        self._patience_us = int(disable_after_days * _DAY_US)
        self._running: set[asyncio.Task[None]] = set()
        self._busy: Counter[str] = Counter()  # attempts in flight, by endpoint
        self._loop_task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._loop_task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Attempts that run may end soon; one that is cut off is made again elsewhere when its lease ends."""
        if self._loop_task is not None:
            self._loop_task.cancel()
            await asyncio.gather(self._loop_task, return_exceptions=True)
        if self._running:
            _, late = await asyncio.wait(self._running, timeout=_CLOSE_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            watch = self._bell.watch()
            try:
                await self._start_due()
                wait_s = await self._idle_s()
                await self._count()
            except EmberlineError as error:
                log.error("deliveries wait: %s", error.message)
                wait_s = _RETRY_S
            except Exception:
                log.exception("deliveries wait")
                wait_s = _RETRY_S
            await watch.wait(wait_s)

    async def _start_due(self) -> None:
        """Take what is due, the endpoint that waited longest first, as far as there is room."""
        full = {endpoint_id for endpoint_id, n in self._busy.items() if n >= MAX_PER_ENDPOINT}
        while len(self._running) < MAX_IN_FLIGHT:
            endpoint_id = await self._deliveries.next_endpoint(sorted(full))
            if endpoint_id is None:
                return
            room = min(MAX_PER_ENDPOINT - self._busy[endpoint_id], MAX_IN_FLIGHT - len(self._running))
            taken = await self._deliveries.take(endpoint_id, room)
            for errand in taken:
                self._launch(errand)
            full.add(endpoint_id)  # its next ones when one of these has ended, or at the next round

    async def _idle_s(self) -> float:
        """Until the next delivery is due; jittered, so that several cores do not look at the same moment."""
        ready_us = await self._deliveries.next_ready_us()
        longest_s = POLL_S * random.uniform(0.8, 1.2)
        if ready_us is None:
            return longest_s
        return min(max((ready_us - self._db.now_us()) / 1e6, 0.05), longest_s)

    async def _count(self) -> None:
        if time.monotonic() - self._counted_s >= _COUNT_INTERVAL_S:
            self.n_pending, self._counted_s = await self._deliveries.count_pending(), time.monotonic()

    def _launch(self, errand: ClaimedDelivery) -> None:
        endpoint_id = errand.endpoint.id
        self._busy[endpoint_id] += 1
        task = asyncio.create_task(self._deliver(errand))
        self._running.add(task)

        def ended(_: "asyncio.Task[None]") -> None:
            self._running.discard(task)
            self._busy[endpoint_id] -= 1
            if not self._busy[endpoint_id]:
                del self._busy[endpoint_id]
            self._bell.ring()

        task.add_done_callback(ended)

    async def _deliver(self, errand: ClaimedDelivery) -> None:
        try:
            if errand.event is None or not errand.endpoint.enabled:
                why = "the endpoint was disabled" if errand.event else "the event is no longer kept"
                await self._deliveries.failed(
                    errand, DeliveryAttempt(number=errand.delivery.attempts, problem=why), None
                )
                return
            attempt, answer = await self._attempt(errand, errand.event)
            await self._settle(errand, attempt, answer)
        except EmberlineError as error:  # the store is in trouble: the lease ends and the delivery comes again
            log.error("what came of a delivery was not written: %s", error.message, extra=_about(errand))
        except Exception:
            log.exception("a delivery failed", extra=_about(errand))

    async def _attempt(self, errand: ClaimedDelivery, event: Event) -> tuple[DeliveryAttempt, PostResponse | None]:
        started_us, began_s = self._db.now_us(), time.monotonic()
        status, problem, answer = None, "", None
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await self._send(errand, event)
            status = answer.status
            if 300 <= status < 400:
                problem = "redirects are not followed"
        except TimeoutError:
            problem = f"no answer within {self._timeout_s:g} s"
        except PostFailed as failed:
            problem = str(failed)
        except EmberlineError as refused:  # the URL may not be reached any more
            problem = refused.message
        took_us = int((time.monotonic() - began_s) * 1e6)
        number = errand.delivery.attempts
        return DeliveryAttempt(
            number=number, started_us=started_us, took_us=took_us, status=status, problem=problem
        ), answer

    async def _send(self, errand: ClaimedDelivery, event: Event) -> PostResponse:
        """The address is resolved and checked anew at every attempt."""
        target = parse_target(errand.endpoint.url)
        addresses = await self._reach.addresses(target)
        body = webhook_body(event, errand.endpoint.id)
        keys = errand.endpoint.keys(self._secret, self._db.now_us())
        headers = {
            "content-type": "application/json",
            "user-agent": f"Emberline/{__version__}",
            **signed_headers(keys, event.id, int(time.time()), body),
        }
        return await post(target, addresses, headers, body)

    async def _settle(self, errand: ClaimedDelivery, attempt: DeliveryAttempt, answer: PostResponse | None) -> None:
        if attempt.succeeded:
            await self._deliveries.succeeded(errand, attempt)
            self.counts["delivered"] += 1
            return
        retry_after_s = answer.retry_after_s if answer is not None else None
        delay_s = next_delay_s(errand.delivery.n_made, retry_after_s, random.random)
        exhausted = await self._deliveries.failed(errand, attempt, delay_s)
        self.counts["failed"] += 1
        self.counts["exhausted"] += exhausted
        log.info("a delivery failed: %s", attempt.problem or f"status {attempt.status}", extra=_about(errand))
        await self._perhaps_disable(errand, attempt)

    async def _perhaps_disable(self, errand: ClaimedDelivery, attempt: DeliveryAttempt) -> None:
        since_us, now_us = errand.endpoint.failing_since_us, self._db.now_us()
        if attempt.status == _GONE:
            reason = "it answered 410 Gone"
            disabled = await self._deliveries.disable(errand, reason)
        elif since_us is not None and now_us - since_us >= self._patience_us:
            reason = f"every delivery has failed for {self._patience_us / _DAY_US:g} days"
            disabled = await self._deliveries.disable(errand, reason, since_us)
        else:
            return
        self.counts["disabled"] += disabled
        if disabled:
            log.warning("a webhook endpoint was disabled: %s", reason, extra=_about(errand))


def _about(errand: ClaimedDelivery) -> dict[str, object]:
    return {"delivery": errand.delivery.id, "endpoint": errand.endpoint.id, "attempt": errand.delivery.attempts}


OUTCOMES = ("delivered", "failed", "exhausted")


class DeliveryMetrics(Collector):
    def __init__(self, deliverer: Deliverer) -> None:
        self._deliverer = deliverer

    def collect(self) -> Iterator[Metric]:
        counts = self._deliverer.counts
        attempts = CounterMetricFamily(
            "emberline_webhook_deliveries",
            "Attempts that delivered or failed, and deliveries given up after the last.",
            labels=["outcome"],
        )
        for outcome in OUTCOMES:
            attempts.add_metric([outcome], counts[outcome])
        yield attempts
        yield CounterMetricFamily(
            "emberline_webhook_endpoints_disabled", "Endpoints disabled by us.", value=counts["disabled"]
        )
        yield GaugeMetricFamily(
            "emberline_webhook_deliveries_pending", "Deliveries that wait.", value=self._deliverer.n_pending
        )
