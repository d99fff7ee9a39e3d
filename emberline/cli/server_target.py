"""The server that `run` and `bench` talk to: the running one if it has the model, otherwise a temporary one."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec

from emberline import log as logs
from emberline.catalog.model_card import built_in, describe_path
from emberline.catalog.model_store import ModelEntry, ModelStore, looks_like_path
from emberline.cli import http_client as client
from emberline.cli.terminal import transient_line
from emberline.config import Config
from emberline.protocol.errors import BadInput
from emberline.server.address import ServerAddress


def served_names(config: Config, *, required: bool) -> dict[str, str]:
    """The models of the server at the configured address, as `served_models`; none if no server runs there.

    `required`: the user has named the address, so it is an error if none does.
    """
    address = ServerAddress.for_client(config)
    return client.served_models(address) if required or client.is_running(address) else {}


@contextlib.contextmanager
def server(
    config: Config, model: str | None, served: Mapping[str, str], *, required: bool
) -> Iterator[tuple[ServerAddress, str]]:
    """Yields the address of a server and the id of the model there; without `model`, the server's first one.

    `served` is from `served_names`. With `required`, a model that it lacks is an error, and no server is started.
    """
    wanted = served_id(config, model, served, required=required)
    if wanted is not None:
        yield ServerAddress.for_client(config), wanted
        return
    with temporary_server(config, model) as target:
        yield target


def served_id(config: Config, model: str | None, served: Mapping[str, str], *, required: bool) -> str | None:
    """The id of the model on the server, as `server` finds it. Returns None if a server has to be started for it."""
    names = (model.lower(), _model_id(model, config).lower()) if model else tuple(served)[:1]
    wanted = next((served[name] for name in names if name in served), None)
    if wanted is None and model and served:
        wanted = _id_of_path(model, config)
    if wanted is None and required:
        others = ", ".join(dict.fromkeys(served.values()))
        url = ServerAddress.for_client(config).url
        raise BadInput(f"the server at {url} has no model {model or ''}; it has {others or 'none'}")
    return wanted


def _model_id(name: str, config: Config) -> str:
    """The id behind an alias of a built-in or installed model; any other name is an id itself."""
    entry = ModelStore(config.home).find(name)
    card = entry.card if entry else built_in(name)
    return card.id if card else name


def _id_of_path(name: str, config: Config) -> str | None:
    """The id of the model at a path of this machine, if the server has the same files under that id."""
    store = ModelStore(config.home)
    if store.offer(name) is not None or not looks_like_path(name):
        return None
    path = Path(name).expanduser().absolute()
    card = next((entry.card for entry in store.entries() if entry.path == path), None) or describe_path(path)
    rows = client.get(ServerAddress.for_client(config), "/api/tags")["models"]
    return next((card.id for row in rows if row["digest"] == card.digest), None)


@contextlib.contextmanager
def temporary_server(config: Config, model: str | None) -> Iterator[tuple[ServerAddress, str]]:
    """A server in a thread of this process, on a free port, for the duration of the block. It logs errors only."""
    from emberline.cli.serve import fetch_models
    from emberline.server.core_process import serve
    from emberline.server.listener import bind

    replace = msgspec.structs.replace
    config = replace(
        config,
        server=replace(config.server, host="127.0.0.1", port=0, http_workers=1, drain_timeout_s=1.0),
        engine=replace(config.engine, models=(model,) if model else config.engine.models),
    )
    logs.setup("local", "error", config.log.format)
    entries = fetch_models(config)
    ready: Future[ServerAddress] = Future()
    stop = asyncio.Event()
    loop = asyncio.new_event_loop()

    def on_ready(address: ServerAddress, entries: Sequence[ModelEntry], workers: Sequence[dict[str, Any]]) -> None:
        ready.set_result(address)

    def run() -> None:
        try:
            with bind(config.server) as listener:
                loop.run_until_complete(serve(config, entries, listener, on_ready, stop))
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error)
        finally:
            loop.close()

    thread = threading.Thread(target=run, name="temporary server")
    thread.start()
    try:
        with transient_line(f"starting {entries[0].card.id} …"):
            address = ready.result()
        yield address, entries[0].card.id
    finally:
        with contextlib.suppress(RuntimeError):  # the loop has ended already
            loop.call_soon_threadsafe(stop.set)
        thread.join()
