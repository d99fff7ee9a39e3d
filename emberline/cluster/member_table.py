"""The members of a cluster in the store, where every core reads them and is notified of changes.

Epochs are counted in the store, for all names together: a worker that comes back after its row was forgotten cannot
have a higher one than whoever has its name now.
"""

from collections.abc import Callable, Sequence

import msgspec

from emberline.protocol.errors import Conflict, NotFound, Unauthorized, Unavailable
from emberline.protocol.frames import WorkerRole
from emberline.protocol.member import Announcement, Member, MemberState
from emberline.store import Database, Query, Transaction, Value
from emberline.store.database import Row, Sql
from emberline.store.notifications import Subscription

CHANNEL = "members"
POLL_S = 5.0  # without a notification
_SECOND_US = 1_000_000

_COLUMNS = ", ".join(Member.__struct_fields__)
_SELECT = f"SELECT {_COLUMNS} FROM members"
_ONE = f"{_SELECT} WHERE name = ?"
_LOCK = Sql(_ONE, postgres=f"{_ONE} FOR UPDATE")
_INSERT = f"INSERT INTO members ({_COLUMNS}) VALUES ({', '.join('?' * len(Member.__struct_fields__))})"
_SERIALIZE = Sql(
    "SELECT 1", postgres="SELECT epoch FROM cluster FOR UPDATE"
)  # announcements and role changes take turns
_NEXT_EPOCH = "UPDATE cluster SET epoch = epoch + 1 RETURNING epoch"
_USE = "INSERT INTO join_challenges (challenge, until_us) VALUES (?, ?) ON CONFLICT DO NOTHING RETURNING until_us"
_EXPIRE = "DELETE FROM join_challenges WHERE until_us < ?"
_FORGET = "DELETE FROM members WHERE seen_us < ? OR (state = 'leaving' AND seen_us < ?) RETURNING name"
_LOSE = "UPDATE members SET state = 'lost' WHERE seen_us < ? AND state = 'joined' RETURNING name"
_SEEN = (
    "UPDATE members SET seen_us = ?, state = CASE WHEN state = 'lost' THEN 'joined' ELSE state END "
    "WHERE name = ? AND epoch = ? AND seen_us < ?"
)


class MemberLimits(msgspec.Struct, frozen=True, kw_only=True):
    """When the table gives a worker up, and when it holds one back that keeps failing."""

    lost_s: float = 30.0  # without an announcement, and out of every core's reach
    forget_s: float = 600.0  # after which a lost worker is forgotten
    flap_s: float = 60.0  # a run that is shorter counts as failed
    max_quick_joins: int = 3  # failed runs in a row before a worker is held back
    first_hold_s: float = 2.0  # for which it is held back then; doubles with each failed run
    max_hold_s: float = 60.0


DEFAULTS = MemberLimits()


class MemberTable:
    """Reads and changes the members. Notifies the other cores after each change that concerns them."""

    def __init__(self, store: Database, limits: MemberLimits = DEFAULTS) -> None:
        self._store = store
        self._limits = limits

    def now_us(self) -> int:
        return self._store.now_us()

    def listen(self) -> Subscription:
        return self._store.listen(CHANNEL, POLL_S)

    async def all(self) -> list[Member]:
        return [_member(row) for row in await self._store.read(f"{_SELECT} ORDER BY name")]

    async def find(self, name: str) -> Member | None:
        rows = await self._store.read(_ONE, (name,))
        return _member(rows[0]) if rows else None

    async def claim(self, cluster: str) -> None:
        """Unavailable: the database belongs to another cluster."""
        await self._store.write("UPDATE cluster SET id = ? WHERE id = ''", (cluster,))
        ((found,),) = await self._store.read("SELECT id FROM cluster")
        if found != cluster:
            raise Unavailable(
                f"the database belongs to cluster {found!s}, and the root secret of this core to cluster {cluster}: "
                "give all cores of a cluster the same secret (EMBERLINE_SECRET), and each cluster a database of its own"
            )

    async def announce(self, said: Announcement, until_us: int) -> Member:
        """The row of the worker that counts under this name, which is the announcing one if the instance is the same.
        Unauthorized: its challenge, which expires at `until_us`, was used already."""
        now_us = self.now_us()
        member, is_news = await self._store.run(lambda: _announce(said, until_us, now_us, self._limits))
        if is_news:
            await self._notify(said.name)
        return member

    async def leave(self, said: Announcement) -> None:
        """A worker has ended by itself."""
        rows = await self._store.write(
            "DELETE FROM members WHERE name = ? AND instance = ? RETURNING name", (said.name, said.instance)
        )
        if rows:
            await self._notify(said.name)

    async def set_state(self, name: str, state: MemberState) -> Member:
        """Set the state that an operator or the planner wants. Raises NotFound, or Conflict if it leaves."""
        member = await self._store.run(lambda: _change(name, state))
        await self._notify(name)
        return member

    async def set_role(
        self, name: str, role: WorkerRole, check: Callable[[Sequence[Member]], None] = lambda members: None
    ) -> Member:
        """`check` is called with all members, of which none changes its role meanwhile at any core, and raises what
        speaks against it; perhaps in another thread. NotFound; Conflict: it is leaving."""
        member = await self._store.run(lambda: _set_role(name, role, check))
        await self._notify(name)
        return member

    async def forget(self, name: str, epoch: int) -> None:
        """A worker has left, or was given up."""
        rows = await self._store.write("DELETE FROM members WHERE name = ? AND epoch = ? RETURNING name", (name, epoch))
        if rows:
            await self._notify(name)

    async def reached(self, members: list[tuple[str, int]]) -> None:
        """Record that this core is connected to these members, by name and epoch."""
        now_us = self.now_us()
        statements = [Query(_SEEN, (now_us, name, epoch, now_us)) for name, epoch in sorted(members)]
        if statements:
            await self._store.transaction(statements)

    async def sweep(self) -> None:
        """Mark the silent as lost, and forget those that are lost for long, or were to leave. One that drains still
        does when it is back. Any core may, at any time."""
        now_us = self.now_us()
        silent_us = now_us - int(self._limits.lost_s * _SECOND_US)
        forgotten_us = silent_us - int(self._limits.forget_s * _SECOND_US)
        results = await self._store.transaction(
            [
                Query(_FORGET, (forgotten_us, silent_us)),
                Query(_LOSE, (silent_us,)),
                Query(_EXPIRE, (now_us,)),
            ]
        )
        for name in {str(row[0]) for rows in results[:2] for row in rows}:
            await self._notify(name)

    async def _notify(self, name: str) -> None:
        await self._store.notify(CHANNEL, name)


def _announce(said: Announcement, until_us: int, now_us: int, limits: MemberLimits) -> Transaction[tuple[Member, bool]]:
    if not (yield Query(_USE, (said.challenge, until_us))):
        raise Unauthorized("this announcement was received before: a challenge is good for one")
    yield Query(_SERIALIZE)
    rows = yield Query(_LOCK, (said.name,))
    known = _member(rows[0]) if rows else None
    if known is not None and known.instance != said.instance and 0 < said.epoch < known.epoch:
        return known, False  # superseded
    if known is not None and known.instance == said.instance:
        state: MemberState = "joined" if known.state == "lost" else known.state
        member = msgspec.structs.replace(known, state=state, seen_us=now_us)  # all else was checked when it joined
        yield from _put(member)
        return member, msgspec.structs.replace(member, seen_us=known.seen_us) != known
    ((epoch,),) = yield Query(_NEXT_EPOCH)
    assert isinstance(epoch, int)
    is_quick = known is not None and now_us - known.joined_us < limits.flap_s * _SECOND_US
    n_joins = known.n_joins + 1 if known is not None and is_quick else 1
    is_kept = known is not None and known.first_role == said.role  # a role that was set since
    member = Member(
        **_facts(said),  # type: ignore[arg-type]
        role=known.role if known is not None and is_kept else said.role,
        first_role=said.role,
        name=said.name,
        instance=said.instance,
        epoch=epoch,
        state="draining" if known is not None and known.state == "draining" else "joined",
        n_joins=n_joins,
        ready_us=now_us + _hold_us(n_joins, limits),
        joined_us=now_us,
        seen_us=now_us,
    )
    yield from _put(member)
    return member, True


def _set_role(name: str, role: WorkerRole, check: Callable[[Sequence[Member]], None]) -> Transaction[Member]:
    yield Query(_SERIALIZE)
    rows = yield Query(_SELECT)
    check([_member(row) for row in rows])
    return (yield from _change(name, role=role))


def _change(name: str, state: MemberState | None = None, role: WorkerRole | None = None) -> Transaction[Member]:
    rows = yield Query(_LOCK, (name,))
    if not rows:
        raise NotFound(f"no member of the cluster is called {name[:100]}", param="name")
    known = _member(rows[0])
    if known.state == "leaving" and state != "leaving":
        raise Conflict(f"{name} is leaving; it can join again once it has left", param="name")
    member = msgspec.structs.replace(known, state=state or known.state, role=role or known.role)
    yield from _put(member)
    return member


def _put(member: Member) -> Transaction[None]:
    yield Query("DELETE FROM members WHERE name = ?", (member.name,))
    values: list[Value] = [getattr(member, name) for name in Member.__struct_fields__]
    yield Query(_INSERT, [int(value) if isinstance(value, bool) else value for value in values])


def _facts(said: Announcement) -> dict[str, object]:
    names = ("address", "model", "fingerprint", "region", "account", "node", "device", "version", "is_tls", "release")
    return {name: getattr(said, name) for name in names}


def _hold_us(n_joins: int, limits: MemberLimits) -> int:
    over = n_joins - limits.max_quick_joins
    return 0 if over <= 0 else int(min(limits.max_hold_s, limits.first_hold_s * 2.0 ** (over - 1)) * _SECOND_US)


def _member(row: Row) -> Member:
    fields = dict(zip(Member.__struct_fields__, row, strict=True))
    return msgspec.convert({**fields, "is_tls": bool(fields["is_tls"])}, Member)
