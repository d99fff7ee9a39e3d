"""Signals that end a server: the first one drains it, another one ends the drain."""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

DRAIN_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
log = logging.getLogger("emberline.serve")


def run_until_terminated(main: Coroutine[Any, Any, None]) -> int:
    """Run until done. SIGTERM and SIGHUP cancel the start until HTTP is served; from then on they drain the server."""
    import uvloop

    async def cancellable() -> None:
        task = asyncio.current_task()
        assert task is not None
        on_signals(task.cancel, (signal.SIGTERM, signal.SIGHUP))
        try:
            await main
        finally:  # uvloop leaves them installed when it closes
            for number in DRAIN_SIGNALS:
                asyncio.get_running_loop().remove_signal_handler(number)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            runner.run(cancellable())
        except asyncio.CancelledError:
            return 128 + signal.SIGTERM
    return 0


def cancel_on_second_signal(
    serving: asyncio.Task[Any] | None, stop: asyncio.Event, drain_timeout_s: float
) -> asyncio.Task[None]:
    """Return a task that cancels `serving` at the next signal once `stop` is set and the drain has begun."""
    assert serving is not None

    async def watch() -> None:
        await stop.wait()
        log.info("stopping: running requests may finish within %g s; Ctrl-C again aborts them", drain_timeout_s)
        on_signals(serving.cancel)

    return asyncio.create_task(watch())


def on_signals(act: Callable[[], object], numbers: Sequence[signal.Signals] = DRAIN_SIGNALS) -> None:
    """Call `act` at these signals. SIGHUP, which a closed terminal sends, stays ignored under `nohup`."""
    for number in numbers:
        if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
            continue
        with contextlib.suppress(ValueError, RuntimeError):  # not the main thread, where only `stop` ends the server
            asyncio.get_running_loop().add_signal_handler(number, act)
