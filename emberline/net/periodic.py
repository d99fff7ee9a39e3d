"""Background work: repeated until it is cancelled, logged where it fails, and ended with its owner."""

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable
from typing import Any

from emberline.protocol.errors import EmberlineError

Action = Callable[[], Awaitable[object] | None]


async def attempt(action: Action, log: logging.Logger, problem: str) -> None:
    """Call `action`, and log its failure under `problem` instead of raising it: an EmberlineError, such as a store that
    is away, with its message, anything else with its traceback."""
    try:
        if (acting := action()) is not None:
            await acting
    except EmberlineError as error:
        log.warning("%s: %s", problem, error.message)
    except Exception:
        log.exception(problem)


async def every(
    interval_s: float,
    action: Action,
    log: logging.Logger,
    problem: str,
    *,
    jitter: float = 0.0,
    at_once: bool = False,
    wake: asyncio.Event | None = None,
) -> None:
    """Attempt `action` every `interval_s` until cancelled: first after one interval, unless `at_once`.

    `jitter` is the share of the interval by which each wait is longer or shorter at random, so that several processes
    do not act together. Setting `wake` ends a wait early.
    """
    if at_once:
        await attempt(action, log, problem)
    while True:
        wait_s = interval_s * random.uniform(1 - jitter, 1 + jitter)
        if wake is None:
            await asyncio.sleep(wait_s)
        else:
            # Not wait_for: before Python 3.12 it loses a cancellation that comes together with the event.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await wake.wait()
            wake.clear()
        await attempt(action, log, problem)


async def stop(*tasks: "asyncio.Task[Any] | None") -> None:
    """Cancel tasks and wait until they have ended. None stands for a task that was not started."""
    started = [task for task in tasks if task is not None]
    for task in started:
        task.cancel()
    await asyncio.gather(*started, return_exceptions=True)
