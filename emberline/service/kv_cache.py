"""Cached KV as its owners and operators see it: purged in every worker, exported from one and imported into one.

Every HTTP worker has connections to the engine workers, and asks them itself. Files change hands in a folder that
engine workers of this machine can use; those of other machines can only be purged.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from emberline.cluster.engine_client import EngineClient
from emberline.protocol.block_hash import session_digest
from emberline.protocol.errors import BadInput, Conflict, EmberlineError, NotFound, Unavailable, Unsupported
from emberline.protocol.frames import CacheCommand

FOLDER = "kv-exchange"  # in the data folder


class KVCacheAdmin:
    """`salt` is an account's; it is never a client's choice."""

    def __init__(self, engines: Sequence[EngineClient], folder: Path | None, generates: bool = True) -> None:
        """`generates` is False on a server that serves no model with a KV cache."""
        self._generates = generates
        self._engines = [engine for engine in engines if engine.info is None or engine.info.task == "generate"]
        self._folder = folder

    async def purge(self, salt: bytes | None, session: str | None) -> dict[str, dict[str, int]]:
        """Forget the KV of an account, of one of its sessions, or (None) of all; blocks by worker and tier.

        Unavailable names the workers in which something may be left.
        """
        if not self._engines and not self._generates:
            return {}
        if not self._engines:
            raise Unavailable("no engine worker runs: load a model first, or stop the server and purge everything")
        digest = session_digest(session)
        calls = (engine.command_cache(CacheCommand(0, "purge", salt, digest)) for engine in self._engines)
        results = await asyncio.gather(*calls, return_exceptions=True)
        purged: dict[str, dict[str, int]] = {}
        failed: list[str] = []
        for engine, result in zip(self._engines, results):
            if isinstance(result, EmberlineError):
                failed.append(f"{engine.name}: {result.message}")
            elif isinstance(result, BaseException):
                raise result
            else:
                purged[engine.name] = result.blocks
        if failed:
            raise Unavailable(f"not everything is purged: {'; '.join(failed)}")
        return purged

    @asynccontextmanager
    async def export(self, salt: bytes, session: str, model: str | None) -> AsyncIterator[tuple[Path, dict[str, Any]]]:
        """A file with a session's KV, which is deleted afterwards: from the worker that holds most of it."""
        with self._files() as folder:
            found: list[tuple[int, EngineClient, Path]] = []
            problem: EmberlineError = NotFound(f"no KV of session {session!r} is stored", param="session")
            for engine in self._local(model):
                path = folder / f"{engine.name.replace('/', '_')}.kv"
                try:
                    command = CacheCommand(0, "export", salt, session_digest(session), str(path))
                    blocks = (await engine.command_cache(command)).blocks["exported"]
                except NotFound:
                    continue
                except EmberlineError as error:
                    problem = error
                    continue
                if blocks:
                    found.append((blocks, engine, path))
            if not found:
                raise problem
            models = {engine.endpoint.models[0] for _, engine, _ in found}
            if len(models) > 1:
                raise Conflict(
                    f"the session was used with several models, say which: {', '.join(sorted(models))}", param="model"
                )
            blocks, engine, path = max(found, key=lambda each: each[0])
            yield path, {"worker": engine.name, "model": engine.endpoint.models[0], "blocks": blocks}

    @asynccontextmanager
    async def upload(self) -> AsyncIterator[Path]:
        """Yield the path for a file that is to be imported; the file is deleted afterwards."""
        self._local(None)
        with self._files() as folder:
            yield folder / "import.kv"

    async def import_file(self, path: Path, salt: bytes, worker: str | None) -> dict[str, Any]:
        """Into the named worker, or the first one whose model it is of. BadInput, Forbidden: why it is refused."""
        problem: EmberlineError | None = None
        for engine in self._local(None, worker):
            try:
                result = await engine.command_cache(CacheCommand(0, "import", salt, path=str(path)))
            except BadInput as error:  # perhaps it is of another worker's model
                problem = error
            else:
                return {"worker": engine.name, "model": engine.endpoint.models[0], "blocks": result.blocks["imported"]}
        assert problem is not None
        raise problem

    def _local(self, model: str | None, worker: str | None = None) -> list[EngineClient]:
        """The engine workers that can use our files."""
        if self._folder is None:
            raise Unsupported("this server has no data folder: KV cannot be exported or imported")
        self._check_generates()
        chosen = [engine for engine in self._engines if worker in (None, engine.name)]
        if worker and not chosen:
            raise NotFound(f"no engine worker is called {worker}", param="worker")
        chosen = [engine for engine in chosen if model is None or model in engine.endpoint.models]
        local = [engine for engine in chosen if engine.endpoint.address.startswith("unix:")]
        if not local:
            what = (
                f"the engine worker {worker} is on another machine" if worker else "this machine runs no engine worker"
            )
            raise Unavailable(what + ("" if model is None else f" of model {model}"))
        return local

    def _check_generates(self) -> None:
        """Raise Unsupported if no model of this server has a KV cache."""
        if not self._generates:
            raise Unsupported("the models of this server keep no KV")

    @contextmanager
    def _files(self) -> Iterator[Path]:
        assert self._folder is not None
        folder = self._folder / secrets.token_hex(8)
        folder.mkdir(parents=True, mode=0o700)
        try:
            yield folder
        finally:
            for path in folder.iterdir():
                path.unlink()
            folder.rmdir()
