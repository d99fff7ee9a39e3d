"""A server of a command's own, in this process, on a port nobody else uses, for as long as the command runs."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec

from emberline import log as logs
from emberline.catalog.model_store import ModelEntry
from emberline.cli.http_client import Address
from emberline.cli.listen import bound
from emberline.cli.serve import fetch_models, serve
from emberline.cli.terminal import passing
from emberline.config import Config


@contextlib.contextmanager
def own_server(config: Config, model: str | None) -> Iterator[tuple[Address, str]]:
    """Yields where it is and the id of its model. Its log is quiet: the terminal belongs to the command."""
    replace = msgspec.structs.replace
    config = replace(
        config,
        server=replace(config.server, host="127.0.0.1", port=0, doors=1, drain_s=1.0),
        engine=replace(config.engine, models=(model,) if model else config.engine.models),
    )
    logs.setup("own", "error", config.log.format)
    entries = fetch_models(config)
    ready: Future[Address] = Future()
    stop = asyncio.Event()
    loop = asyncio.new_event_loop()

    def announce(address: Address, entries: Sequence[ModelEntry], workers: Sequence[dict[str, Any]]) -> None:
        ready.set_result(address)

    def work() -> None:
        try:
            with bound(config.server) as listener:
                loop.run_until_complete(serve(config, entries, listener, announce, stop))
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error)
        finally:
            loop.close()

    thread = threading.Thread(target=work, name="own server")
    thread.start()
    try:
        with passing(f"starting {entries[0].card.id} …"):
            address = ready.result()
        yield address, entries[0].card.id
    finally:
        with contextlib.suppress(RuntimeError):  # it has ended by itself
            loop.call_soon_threadsafe(stop.set)
        thread.join()
