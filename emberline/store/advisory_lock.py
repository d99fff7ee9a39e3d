"""A lock that one process of many holds, by PostgreSQL: its session has it, and with the session it is gone.

It has a connection of its own. The server notices within seconds that a holder's machine was cut off, and another
process gets the lock; the holder, too, notices when it asks. A holder that asks nothing for SILENT_S, because its
process is stopped, loses it as well: its kernel would answer for it for ever.
"""

import asyncio
import logging
from typing import Any

import asyncpg  # type: ignore[import-untyped]

TIMEOUT_S = 5.0  # for the server to answer a question
SILENT_S = 240.0  # longer than anything that a holder does between two questions
# The schema is part of the key: each has the tables of an installation of its own.
_KEY = "hashtextextended('emberline ' || current_schema() || ' ' || $1, 0)"
_TRY = f"SELECT pg_try_advisory_lock({_KEY})"
_SETTINGS = {  # the server drops the session of a machine that was cut off after about five seconds
    "application_name": "emberline lock",
    "tcp_keepalives_idle": "2",
    "tcp_keepalives_interval": "1",
    "tcp_keepalives_count": "3",
}

# The last is raised between the server's last message and the end of its connection.
_ERRORS = (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)

log = logging.getLogger("emberline.store")


class AdvisoryLock:
    """A lock of this process, by its name. `timeout_s` and `silent_s`: see the constants."""

    def __init__(self, url: str, name: str, timeout_s: float = TIMEOUT_S, silent_s: float = SILENT_S) -> None:
        self._url, self._name = url, name
        self._timeout_s, self._silent_s = timeout_s, silent_s
        self._connection: Any = None
        self._held = False

    async def try_hold(self) -> bool:
        try:
            async with asyncio.timeout(self._timeout_s):
                if self._connection is None or self._connection.is_closed():
                    self._held = False
                    self._connection = await asyncpg.connect(self._url, server_settings=_SETTINGS)
                    if self._connection.get_server_version().major >= 14:
                        await self._connection.execute(f"SET idle_session_timeout = {int(self._silent_s * 1000)}")
                if self._held:
                    await self._connection.execute("SELECT 1")
                else:
                    self._held = bool(await self._connection.fetchval(_TRY, self._name))
        except _ERRORS as error:
            log.warning("the lock %s cannot be asked for: %s", self._name, error or type(error).__name__)
            self._drop()
        return self._held

    async def is_held(self) -> bool:
        connection = self._connection
        if not self._held or connection is None or connection.is_closed():
            return False
        try:
            async with asyncio.timeout(self._timeout_s):
                await connection.execute("SELECT 1")  # the session lives, and so it has the lock
        except _ERRORS as error:
            log.warning("the lock %s is lost: %s", self._name, error or type(error).__name__)
            self._drop()
            return False
        return True

    async def release(self) -> None:
        connection, self._connection, self._held = self._connection, None, False
        if connection is not None:
            try:
                await connection.close(timeout=self._timeout_s)
            except _ERRORS:
                connection.terminate()

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.terminate()
        self._connection, self._held = None, False
