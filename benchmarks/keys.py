"""API keys: time to authenticate, time until another process sees a revocation, start with 100,000 keys.

python -m benchmarks.keys [--postgres URL]     # the database's schema is used as it is: name an empty one
"""

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path

import msgspec

from emberline.accounts.account_service import AccountService
from emberline.accounts.api_key import KEY_COLUMNS, ApiKey
from emberline.accounts.audit_log import Actor
from emberline.accounts.auth import Authenticator
from emberline.accounts.secret import Secret
from emberline.store import BulkQuery, Database, open_store

SECRET = Secret("benchmark" * 4)
ACTOR = Actor("benchmark")
N_HEADERS = 12  # besides the key
N_CHECKS = 20_000
N_REVOCATIONS = 20
N_KEYS = 100_000


async def authentication_us(store: Database) -> dict[str, float]:
    accounts = AccountService(store, SECRET)
    await accounts.open()
    issued = await accounts.create_key(ACTOR, "acme")
    auth = Authenticator(SECRET, "an-admin-key-of-the-server", accounts.directory, required=True)
    headers = [(b"header-%d" % n, b"value" * 5) for n in range(N_HEADERS)]
    headers.append((b"authorization", b"Bearer " + issued.key.text.encode()))
    took = []
    for _ in range(N_CHECKS):
        start_s = time.perf_counter()
        await auth.authenticate(headers)
        took.append((time.perf_counter() - start_s) * 1e6)
    await accounts.close()
    took.sort()
    return {"p50": round(took[N_CHECKS // 2], 1), "p99": round(took[N_CHECKS * 99 // 100], 1)}


async def revocation_ms(where: str | Path) -> dict[str, float]:
    """From the return of the revocation to when a second process, here a second connection, refuses the key."""
    stores = [await open_store(where) for _ in range(2)]
    ours, other = (AccountService(store, SECRET) for store in stores)
    await ours.open()
    await other.open()
    took = []
    for _ in range(N_REVOCATIONS):
        issued = await ours.create_key(ACTOR, "acme")
        await ours.revoke_key(ACTOR, issued.record.id)
        start_s = time.perf_counter()
        while (found := other.directory.key(issued.record.id)) is None or found.revoked_us is None:
            await asyncio.sleep(0.002)
        took.append((time.perf_counter() - start_s) * 1e3)
    for service, store in zip((ours, other), stores, strict=True):
        await service.close()
        await store.close()
    took.sort()
    return {"p50": round(took[N_REVOCATIONS // 2], 1), "max": round(took[-1], 1)}


async def start_s(store: Database) -> dict[str, float]:
    accounts = AccountService(store, SECRET)
    await accounts.open()
    record = (await accounts.create_key(ACTOR, "acme")).record
    await accounts.close()
    rows = [_row(record, number) for number in range(N_KEYS)]
    insert = f"INSERT INTO api_keys ({KEY_COLUMNS}) VALUES ({', '.join('?' * len(rows[0]))})"
    await store.transaction([BulkQuery(insert, rows)])
    await store.write("UPDATE audit_head SET number = ?", (2 * N_KEYS,))
    accounts = AccountService(store, SECRET)
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    await accounts.open()
    taken = {"wall": round(time.perf_counter() - wall_s, 2), "cpu": round(time.process_time() - cpu_s, 2)}
    await accounts.close()
    return taken


def _row(record: ApiKey, number: int) -> tuple[str | bytes | int | None, ...]:
    changes = {"id": f"key_{number:016x}", "digest": number.to_bytes(32, "big"), "version": number + 2}
    fields = msgspec.structs.asdict(msgspec.structs.replace(record, **changes))
    return tuple("[]" if name in ("models", "apis") else value for name, value in fields.items())


async def measure(postgres: str | None) -> dict[str, dict[str, float]]:
    figures: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        store = await open_store(Path(folder) / "keys.db")
        figures["authentication, µs"] = await authentication_us(store)
        figures["revocation seen, SQLite, ms"] = await revocation_ms(Path(folder) / "revoked.db")
        if postgres:
            figures["revocation seen, PostgreSQL, ms"] = await revocation_ms(postgres)
        figures[f"start with {N_KEYS:,} keys, s"] = await start_s(store)
        await store.close()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--postgres", metavar="URL", help="measure the revocation there, too")
    figures = asyncio.run(measure(parser.parse_args().postgres))
    print(json.dumps(figures, ensure_ascii=False))
    for name, values in figures.items():
        print(f"{name:<34}" + "  ".join(f"{key} {value:g}" for key, value in values.items()))


if __name__ == "__main__":
    main()
