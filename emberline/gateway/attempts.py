"""Tries the models of a plan, one attempt after the other, until one of them begins to answer."""

import asyncio
import time
from collections.abc import Mapping
from typing import NamedTuple

from emberline.balancer.circuit_breaker import OPEN_S, CircuitBreaker
from emberline.catalog.model_card import ModelCard
from emberline.gateway.gateway_errors import AttemptsFailed, AttemptsRefused, FirstByteTimeout, redact
from emberline.gateway.log import LogAttempt
from emberline.gateway.retry import RetryPolicy, falls_back, is_providers_fault, is_transient, wait_s
from emberline.protocol.errors import EmberlineError, EngineLost, Internal, ModelNotFound, Overloaded, Unavailable
from emberline.service.work import Begun, Start, Work
from emberline.telemetry.request_log import AttemptContext
from emberline.upstream.providers.errors import ProviderRefusedKey, ProviderTimeout

LOCAL = "workers-ai"  # the provider of the models of our own engines, as Cloudflare's gateway names it


class PlanStep(NamedTuple):
    """One model of a plan, and its provider."""

    card: ModelCard
    provider: str
    number: int  # its position in the chain
    max_failovers: int | None = None  # between workers, in one attempt; None: as many as any request

    @property
    def model(self) -> str:
        return self.card.id


class Breakers:
    """A circuit breaker for each account and provider, in this process: with its own key or address, one account's
    failures say nothing about another's. Our own engines have the balancer's."""

    def __init__(self) -> None:
        self._breakers: dict[tuple[str, str], CircuitBreaker] = {}

    def find(self, account: str, provider: str) -> CircuitBreaker | None:
        if provider == LOCAL:
            return None
        breaker = self._breakers.setdefault((account, provider), CircuitBreaker())
        breaker.check(time.monotonic())
        return breaker

    def states(self, account: str) -> Mapping[str, str]:
        return {provider: breaker.state for (owner, provider), breaker in self._breakers.items() if owner == account}


class Attempts:
    """The attempts of one request. Nothing was sent to its client while they go on."""

    def __init__(self, request_id: str, account: str, breakers: Breakers) -> None:
        self.made: list[LogAttempt] = []
        self._was_admitted = False  # an attempt of an earlier step has counted for the limits on requests
        self._breaker: CircuitBreaker | None = None  # of the attempt that answers
        self._request_id = request_id
        self._account = account
        self._breakers = breakers

    async def begin(
        self, work: Work, step: PlanStep, policy: RetryPolicy, start: Start, context: AttemptContext
    ) -> Begun:
        """Start attempts until one begins to answer, and return it. Raises the last error if none does."""
        delays_s = policy.delays_s()
        waited_s = 0.0
        context = context._replace(max_failovers=step.max_failovers)
        while True:
            try:
                return await self._attempt(work, step, policy, waited_s, start, context)
            except EmberlineError as error:
                delay_s = next(delays_s, None)
                pause_s = None if delay_s is None or not is_transient(error) else wait_s(error, delay_s)
                if pause_s is None or isinstance(error, CircuitOpen):
                    raise
            await asyncio.sleep(pause_s)
            waited_s = pause_s

    async def _attempt(
        self, work: Work, step: PlanStep, policy: RetryPolicy, waited_s: float, start: Start, context: AttemptContext
    ) -> Begun:
        number = len(self.made)
        attempt_id = self._request_id if not number else f"{self._request_id}-{number + 1}"
        context = context._replace(id=attempt_id, is_retry=work.was_admitted or self._was_admitted)
        breaker = self._breakers.find(self._account, step.provider)
        began_s = time.monotonic()
        failed: EmberlineError | None = None
        try:
            if breaker is not None:
                if not breaker.allows:
                    raise CircuitOpen(step.provider, OPEN_S - (began_s - breaker.opened_s))
                breaker.sent()
            in_time = _in_time(start, step, context, policy) if policy.timeout_ms else start(step.card, context)
            begun = await in_time
            self._breaker = breaker
            return begun
        except EmberlineError as error:
            failed = error
            if breaker is not None and not isinstance(error, CircuitOpen):
                if is_providers_fault(error):
                    breaker.failed(time.monotonic())
                else:
                    breaker.inconclusive()
            raise
        except BaseException:
            if breaker is not None:
                breaker.inconclusive()
            raise
        finally:
            self.made.append(
                LogAttempt(
                    step.model,
                    step.provider,
                    attempt_id,
                    step.number,
                    round((time.monotonic() - began_s) * 1000, 1),
                    round(waited_s * 1000, 1),
                    "" if failed is None else failed.kind,
                    "" if failed is None else redact(failed.message),
                )
            )

    def ended(self, work: Work, error: BaseException | None) -> None:
        """Tell the circuit breaker how the attempt has ended that began to answer."""
        self._was_admitted |= work.was_admitted
        if self._breaker is None:
            return
        if error is None:
            self._breaker.succeeded()
        elif isinstance(error, EmberlineError) and is_providers_fault(error):
            self._breaker.failed(time.monotonic())
        else:
            self._breaker.inconclusive()
        self._breaker = None


async def _in_time(start: Start, step: PlanStep, context: AttemptContext, policy: RetryPolicy) -> Begun:
    is_waiting = True
    try:
        async with asyncio.timeout(policy.timeout_ms / 1000) as timeout:

            def began() -> None:
                nonlocal is_waiting
                if is_waiting and not timeout.expired():
                    is_waiting = False
                    timeout.reschedule(None)

            timed_out = timeout.expired if policy.is_timeout_free else None
            begun = await start(step.card, context._replace(on_began=began, timed_out=timed_out))
            is_waiting = False
            return begun
    except TimeoutError:
        message = f"{step.model} ({step.provider}) sent nothing within {policy.timeout_ms} ms"
        raise FirstByteTimeout(message, param="model") from None


class CircuitOpen(Unavailable):
    """The provider has failed too often of late: it is not asked."""

    def __init__(self, provider: str, retry_after_s: float) -> None:
        wait = max(1.0, retry_after_s)
        super().__init__(
            f"provider {provider} has failed too often and is not asked for another {wait:.0f} s (circuit breaker)",
            retry_after_s=wait,
        )


def tries_next(error: EmberlineError) -> bool:
    """True if the next model of the plan is tried after `error`."""
    return falls_back(error)


def final_error(error: EmberlineError, n_attempts: int) -> EmberlineError:
    """The error for the client when no attempt is left, or when a reply broke off: the gateway's, with its code.

    An error of the request itself stays as it is."""
    message = redact(error.message)
    if n_attempts > 1:
        message = f"{message} (after {n_attempts} attempts)"
    if isinstance(error, Overloaded):
        return AttemptsRefused(message, retry_after_s=error.retry_after_s)
    if isinstance(error, ProviderTimeout):
        return FirstByteTimeout(message)
    if isinstance(error, EngineLost | Unavailable | Internal | ProviderRefusedKey):
        return AttemptsFailed(message, retry_after_s=error.retry_after_s)
    error.message = message if isinstance(error, FirstByteTimeout | ModelNotFound) else redact(error.message)
    return error
