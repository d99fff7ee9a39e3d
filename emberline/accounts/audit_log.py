"""The audit log: who did what to accounts, keys and the server, when and from where; never a secret.

Each row's digest is keyed by a key that is derived from the root secret and covers the digest of the row before, so a
row cannot be changed, removed or inserted without breaking the chain. Cutting rows off the end is shown by a head that
was noted elsewhere: every append is logged with its number and digest, and `verify` takes such a head.

The number of the last row is also the version of the directory of accounts and keys: all of their changes are audited.
"""

import hmac
import logging
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import TypeVar

import msgspec

from emberline.accounts.secret import Secret
from emberline.protocol.errors import BadInput
from emberline.store import Database, Query, Transaction
from emberline.store.database import decode_row

CHANNEL = "accounts"
MAX_PAGE = 1000
_MAX_TARGET = 256  # characters
_HEAD = "UPDATE audit_head SET number = number + 1 RETURNING number, digest"
_INSERT = "INSERT INTO audit_log (number, at_us, actor, source, act, target, details, digest) VALUES (?,?,?,?,?,?,?,?)"
_SET_HEAD = "UPDATE audit_head SET digest = ?"
_PAGE = (
    "SELECT number, at_us, actor, source, act, target, details, digest FROM audit_log"
    " WHERE number > ? ORDER BY number LIMIT ?"
)
_LAST_PAGE = (
    "SELECT number, at_us, actor, source, act, target, details, digest FROM audit_log"
    " WHERE number < ? ORDER BY number DESC LIMIT ?"
)

log = logging.getLogger("emberline.audit")
T = TypeVar("T")
_encode = msgspec.json.Encoder(order="sorted").encode


class Actor(msgspec.Struct, frozen=True):
    """The key that acts, and the address it acts from."""

    name: str  # a key's id; "local" without keys; "operator" for the command line
    source: str = ""  # the address of the connection; headers that a client could forge do not count


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    at_us: int
    actor: str
    source: str
    act: str  # such as "key.create"
    target: str  # the id of what it was done to
    details: str  # JSON object
    digest: bytes = b""


class Verification(msgspec.Struct, frozen=True):
    """The result of walking the chain. `head` is the last row's "number:digest"."""

    n_entries: int
    head: str
    problem: str = ""  # empty: the chain is intact


_COLUMNS = ", ".join(AuditEntry.__struct_fields__)


class AuditLog:
    def __init__(self, store: Database, secret: Secret) -> None:
        self._store = store
        self._key = secret.derive("audit", size=32)

    async def run(
        self, actor: Actor, act: str, target: str, details: object, work: Callable[[int], Transaction[T]]
    ) -> T:
        """Run a change and append its row in one transaction. `work` gets the row's number."""
        appended: list[AuditEntry] = []

        def transaction() -> Transaction[T]:
            entry = yield from self._append(actor, act, target, details)
            appended[:] = [entry]
            return (yield from work(entry.number))

        result = await self._store.run(transaction)
        head = _format_head(appended[0].number, appended[0].digest)
        log.info("%s %s", act, target, extra={"actor": actor.name, "source": actor.source, "head": head})
        await self._store.notify(CHANNEL)
        return result

    async def record(self, actor: Actor, act: str, target: str, details: object = None) -> None:
        """An act that changes nothing in the store."""
        await self.run(actor, act, target, details, _no_change)

    def _append(self, actor: Actor, act: str, target: str, details: object) -> Transaction[AuditEntry]:
        """The head's row lock orders concurrent writers, so it comes first."""
        ((number, previous),) = yield Query(_HEAD)
        assert isinstance(number, int)
        assert isinstance(previous, bytes)
        entry = AuditEntry(
            number=number,
            at_us=self._store.now_us(),
            actor=actor.name,
            source=actor.source,
            act=act,
            target=target[:_MAX_TARGET],
            details=_encode({} if details is None else details).decode(),
        )
        entry = msgspec.structs.replace(entry, digest=self._digest(previous, entry))
        yield Query(_INSERT, msgspec.structs.astuple(entry))
        yield Query(_SET_HEAD, (entry.digest,))
        return entry

    async def entries(self, *, before: int | None = None, limit: int = 100) -> list[AuditEntry]:
        """The latest first."""
        rows = await self._store.read(_LAST_PAGE, ((1 << 62) if before is None else before, limit))
        return [decode_row(AuditEntry, _COLUMNS, row) for row in rows]

    async def intact_entry(self, number: int) -> AuditEntry | None:
        """The row with this number. Returns None if there is none, or if it was changed.

        Unlike `verify`, it does not walk the chain: the row's keyed digest covers the digest of the row before."""
        rows = {entry.number: entry for entry in (await self._page(max(0, number - 2)))[:2]}
        entry, before = rows.get(number), rows.get(number - 1)
        if entry is None or (before is None and number > 1):
            return None
        expected = self._digest(b"" if before is None else before.digest, entry)
        return entry if hmac.compare_digest(expected, entry.digest) else None

    async def verify(self, expected_head: str = "") -> Verification:
        """Walk the whole chain. `expected_head`: "number:digest" from an earlier verification or from the log."""
        expected = _parse_head(expected_head) if expected_head else None
        ((head, head_digest),) = await self._store.read("SELECT number, digest FROM audit_head")
        last, previous, seen_expected = 0, b"", expected is None or expected[0] == 0
        while page := await self._page(last):
            for entry in page:
                if entry.number != last + 1:
                    return self._broken(last, previous, f"row {last + 1} is missing")
                if not hmac.compare_digest(self._digest(previous, entry), entry.digest):
                    return self._broken(last, previous, f"row {entry.number} was changed, or a row before it")
                last, previous = entry.number, entry.digest
                if expected is not None and last == expected[0]:
                    if not hmac.compare_digest(previous, expected[1]):
                        return self._broken(last, previous, f"row {last} is not the one whose digest was noted")
                    seen_expected = True
        assert isinstance(head, int)
        if not seen_expected:
            return self._broken(last, previous, f"the log ends at row {last}, before the row that was noted")
        if last < head or (last == head and previous != head_digest):
            return self._broken(last, previous, f"the log ends at row {last}, but {head} were written")
        return Verification(last, _format_head(last, previous))

    async def _page(self, after: int) -> Sequence[AuditEntry]:
        return [decode_row(AuditEntry, _COLUMNS, row) for row in await self._store.read(_PAGE, (after, MAX_PAGE))]

    def _broken(self, last: int, digest: bytes, problem: str) -> Verification:
        return Verification(last, _format_head(last, digest), problem)

    def _digest(self, previous: bytes, entry: AuditEntry) -> bytes:
        fields = msgspec.msgpack.encode(msgspec.structs.astuple(entry)[:-1])
        return blake2b(previous + fields, key=self._key, digest_size=32).digest()


def _no_change(number: int) -> Transaction[None]:
    return
    yield


def _format_head(number: int, digest: bytes) -> str:
    return f"{number}:{digest.hex()}"


def _parse_head(text: str) -> tuple[int, bytes]:
    number, _, digest = text.partition(":")
    try:
        return int(number), bytes.fromhex(digest)
    except ValueError:
        raise BadInput("a head of the audit log is NUMBER:DIGEST, as `emberline audit --verify` prints it") from None
