"""The cluster as one core sees it: workers announce themselves here, and members that any core has let in are dialed.

The rows in the store decide. A core writes a row when a worker announces itself to it; every core follows the rows, by
notification and now and then by reading all of them, so a core that restarts finds the members again. Requests, load
and caches stay per core.
"""

import asyncio
import hmac
import logging
import secrets
from typing import Literal, Protocol

import msgspec

from emberline import __version__
from emberline.balancer.endpoint import Endpoint
from emberline.cluster.member_table import MemberTable
from emberline.cluster.membership import DRAIN_POLL_S, Membership
from emberline.cluster.timings import DEFAULTS, Timings
from emberline.net.periodic import attempt, every, stop
from emberline.protocol import member as members
from emberline.protocol.credential import worker_host
from emberline.protocol.errors import BadInput, EmberlineError, Unauthorized
from emberline.protocol.frames import OLDEST_VERSION, VERSION, WorkerRole
from emberline.protocol.member import Announcement, Challenge, Member, Signed, Standing

RENEW_S = 10.0  # between two announcements of a worker
END_LIMIT_S = 600.0  # for a worker that leaves, or was superseded, to finish what it has
_MAC_CHARS = 32

_NOT_READ = "the cluster's members could not be read"

log = logging.getLogger("emberline.cluster")


class ClusterKeys(Protocol):
    """Derives keys from the root secret, which all cores of a cluster share."""

    def derive(self, purpose: str, *context: str, size: int = 16) -> bytes: ...


class MemberStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A member's row, and how this core stands with it."""

    member: Member
    connected: bool
    problem: str  # why this core does not use it
    in_flight: int  # sequences of this core
    running: int  # sequences of all cores, running or waiting, as the worker last said
    pushing: bool  # what it has cached is being sent to other workers, since it drains
    seen_s: float  # ago
    hold_s: float  # before it is used


class ClusterStatus(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    region: str  # of this core
    release: str  # of Emberline, that this core is
    members: list[MemberStatus]


def cluster_id(keys: ClusterKeys) -> str:
    return keys.derive("cluster-id", size=8).hex()


def join_key(keys: ClusterKeys, name: str) -> bytes:
    """The secret with which the worker of this name joins."""
    return keys.derive("cluster-join", name.lower(), size=32)


class Cluster:
    """Owned by the core process."""

    def __init__(
        self,
        table: MemberTable,
        membership: Membership,
        keys: ClusterKeys,
        region: str = "",
        has_tls: bool = False,
        timings: Timings = DEFAULTS,
    ) -> None:
        """`has_tls`: this core has a certificate for connections to workers."""
        self.id = cluster_id(keys)
        self._table = table
        self._membership = membership
        self._keys = keys
        self._region = region
        self._has_tls = has_tls
        self._challenge_s = timings.challenge_s
        self._sweep_s = timings.sweep_s
        self._challenge_key = keys.derive("cluster-challenge", size=32)
        self._followed: dict[str, Member] = {}  # those that this core dials
        self._problems: dict[str, str] = {}  # of members that it cannot use
        self._ending: dict[str, asyncio.Task[None]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._reconciling = asyncio.Lock()

    async def start(self) -> None:
        """Returns when the members that are known are being dialed."""
        changes = self._table.listen()
        await self._follow()

        async def follow() -> None:
            async for _ in changes:
                changes.skip()  # however many have changed, all rows are read once
                await attempt(self._follow, log, _NOT_READ)

        keeping = every(self._sweep_s, self._keep, log, _NOT_READ)
        self._tasks = [asyncio.create_task(follow()), asyncio.create_task(keeping)]

    async def close(self) -> None:
        await stop(*self._tasks, *self._ending.values())

    # --- workers that announce themselves -----------------------------------------------------------------------------

    def challenge(self) -> Challenge:
        until_us = self._table.now_us() + int(self._challenge_s * 1e6)
        text = f"{until_us}.{secrets.token_hex(16)}"
        return Challenge(f"{text}.{self._mac(text)}", self.id)

    async def announce(self, signed: Signed) -> Signed:
        """A signed Standing. Unauthorized, BadInput, Unavailable say why the worker cannot be a member."""
        said = members.read_message(signed, Announcement)
        key = join_key(self._keys, said.name)
        try:
            until_us = self._check_challenge(said.challenge)
            members.verified(
                key,
                signed,
                Announcement,
                f"the credential of {said.name} is not of this cluster ({self.id}): make one with `emberline cluster "
                f"credential {said.name}` on the machine of one of its cores",
            )
            if said.leaving:
                await self._table.leave(said)
                return self._standing(key, said, said.epoch)
            if await self._is_new(said):
                await self._check(said)
            member = await self._table.announce(said, until_us)
        except EmberlineError as error:
            log.warning("worker %s was refused: %s", said.name, error.message, extra={"address": said.address})
            raise
        if member.instance == said.instance and member.epoch != said.epoch:
            log.info("worker %s has joined", said.name, extra={"address": said.address, "epoch": member.epoch})
            await self._follow()
        return self._standing(key, said, member.epoch, member)

    def _standing(self, key: bytes, said: Announcement, epoch: int, member: Member | None = None) -> Signed:
        is_current = member is None or member.instance == said.instance
        hold_s = 0.0 if member is None else max(0.0, (member.ready_us - self._table.now_us()) / 1e6)
        standing = Standing(
            challenge=said.challenge, epoch=epoch, is_current=is_current, renew_s=RENEW_S, hold_s=hold_s
        )
        return members.sign(key, standing)

    def _check_challenge(self, challenge: str) -> int:
        """When it expires."""
        text, _, mac = challenge.rpartition(".")
        until, _, _ = text.partition(".")
        if not hmac.compare_digest(mac.encode(), self._mac(text).encode()) or not until.isdigit():
            raise Unauthorized("this challenge is not of this cluster: ask the same core or load balancer again")
        if int(until) < self._table.now_us():
            raise Unauthorized(f"the challenge was answered after more than {self._challenge_s:.0f} s: ask for another")
        return int(until)

    def _mac(self, text: str) -> str:
        return hmac.new(self._challenge_key, text.encode(), "sha256").hexdigest()[:_MAC_CHARS]

    async def _is_new(self, said: Announcement) -> bool:
        """Neither the member of this name nor superseded by it. A worker that was away for long, too, is new: its row
        was forgotten."""
        known = await self._table.find(said.name)
        return known is None or not (known.instance == said.instance or 0 < said.epoch < known.epoch)

    async def _check(self, said: Announcement) -> None:
        """Raise BadInput, Conflict or Unavailable if this core could not use a new worker."""
        if not OLDEST_VERSION <= said.version <= VERSION:
            raise BadInput(
                f"{said.name} speaks version {said.version} of the protocol, and this core {OLDEST_VERSION} to "
                f"{VERSION}: install the same release of Emberline on both, or upgrade this core first",
                param="version",
            )
        if said.is_tls and not self._has_tls:
            raise BadInput(f"{said.name} uses TLS, and this core has no certificate")
        for other in await self._table.all():
            is_same = other.name != said.name and other.model.lower() == said.model.lower()
            if is_same and other.state != "lost" and other.fingerprint != said.fingerprint:
                raise BadInput(
                    f"{said.name} serves {said.model} with other weights ({said.fingerprint[:12]}) than {other.name} "
                    f"({other.fingerprint[:12]}): pull the same revision on both machines",
                    param="fingerprint",
                )
        await self._membership.check_engine(self._endpoint(said))

    def _endpoint(self, member: Member | Announcement) -> Endpoint:
        endpoint = Endpoint(
            name=member.name,
            address=member.address,
            token=members.connection_token(join_key(self._keys, member.name), member.instance),
            role=member.role,
            models=(member.model,),
            tls_host=worker_host(member.name) if member.is_tls else "",
            region=member.region,
            account=member.account,
            version=member.version,
        )
        try:
            endpoint.split()
        except ValueError as error:
            raise BadInput(str(error), param="address") from None
        return endpoint

    # --- what every core does ----------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        """Dial the members that are there, and forget the others."""
        async with self._reconciling:
            now_us = self._table.now_us()
            found = {member.name: member for member in await self._table.all()}
            for name in [name for name in (self._followed | self._problems) if name not in found]:
                await self._drop(name)
            for member in found.values():
                try:
                    await self._follow_one(member, now_us)
                    self._problems.pop(member.name, None)
                except EmberlineError as error:
                    if self._problems.get(member.name) != error.message:
                        log.warning("member %s cannot be used: %s", member.name, error.message)
                    self._problems[member.name] = error.message

    async def _follow_one(self, member: Member, now_us: int) -> None:
        known = self._followed.get(member.name)
        if known is not None and known.epoch != member.epoch:
            if self._membership.reaches(member.name):
                self._membership.end_worker(member.name, END_LIMIT_S)
                await asyncio.sleep(DRAIN_POLL_S)  # closing the connection would discard what is not sent yet
            await self._drop(member.name)
            log.info("member %s was superseded", member.name, extra={"epoch": known.epoch, "by": member.epoch})
            known = None
        if member.ready_us > now_us:
            asyncio.get_running_loop().call_later((member.ready_us - now_us) / 1e6, self._wake)
            raise BadInput(f"it has joined {member.n_joins} times in quick succession, and is used a little later")
        if known is None:
            self._membership.follow_engine(self._endpoint(member))
        self._followed[member.name] = member
        if known is None or known.role != member.role:
            self._membership.want_role(member.name, member.role)
        if known is None or known.state != member.state:
            self._membership.set_drained(member.name, member.state in ("draining", "leaving"))
        if member.state == "leaving" and member.name not in self._ending:
            task = asyncio.create_task(self._end(member), name=f"end {member.name}")
            self._ending[member.name] = task
            task.add_done_callback(lambda _: self._ending.pop(member.name, None))

    def _wake(self) -> None:
        task = asyncio.create_task(attempt(self._follow, log, _NOT_READ))
        self._tasks = [*(task for task in self._tasks if not task.done()), task]

    async def _drop(self, name: str) -> None:
        self._followed.pop(name, None)
        self._problems.pop(name, None)
        await self._membership.drop_engine(name)

    async def _end(self, member: Member) -> None:
        """A member leaves: once no request of this core runs there, tell it to end when no core's does. A core that
        does not reach it does nothing: others may, whose requests still run there."""
        await self._membership.wait_idle(member.name)
        await self._membership.wait_pushed(member.name)
        if not self._membership.reaches(member.name):
            return
        self._membership.end_worker(member.name, END_LIMIT_S)
        if await self._membership.wait_gone(member.name, END_LIMIT_S):
            await self._table.forget(member.name, member.epoch)

    async def _keep(self) -> None:
        """Tell the others whom this core reaches; give up whom no core does."""
        await self._follow()  # a role that another core has just set is not to be undone
        reached = [(name, member.epoch) for name, member in self._followed.items() if self._membership.reaches(name)]
        for name, _ in reached:
            self._membership.want_role(name, self._followed[name].role)  # it may have missed a change
        await self._table.reached(reached)
        await self._table.sweep()

    # --- operators ---------------------------------------------------------------------------------------------------

    def follows(self, name: str) -> bool:
        return name in self._followed or name in self._problems

    async def change(self, name: str, action: Literal["drain", "undrain", "leave"]) -> None:
        """Change a member's state. The change takes effect on this core before the call returns, and on every other
        core within moments."""
        states: dict[str, members.MemberState] = {"drain": "draining", "undrain": "joined", "leave": "leaving"}
        await self._table.set_state(name, states[action])
        log.info("%s: %s", action, name)
        await self._follow()

    async def set_role(self, name: str, role: WorkerRole, wait_s: float = 0.0) -> int:
        """Give a member another role, without loading its weights or losing its cache: in effect on every core within
        moments, on this one when it returns. It keeps the role over restarts, until it is started with another one.
        What it runs goes on; returns how many requests of this core still do, after `wait_s` at most. NotFound,
        Conflict: it cannot have this role. Unavailable: it does not answer."""
        await self._table.set_role(name, role, self._membership.role_check(name, role))
        await self._follow()
        await self._membership.wait_role(name, role)
        await self._membership.wait_former(name, wait_s)
        return self._membership.n_former(name)

    async def status(self) -> ClusterStatus:
        now_us, found = self._table.now_us(), []
        for member in await self._table.all():
            connected, problem, in_flight, running = self._membership.standing(member.name)
            followed = self._followed.get(member.name)
            if followed is None or followed.epoch != member.epoch:  # connected is an earlier run of it, if any
                connected, problem, running = False, "not dialed yet", 0
            found.append(
                MemberStatus(
                    member=member,
                    connected=connected,
                    problem=self._problems.get(member.name, problem),
                    in_flight=in_flight,
                    running=running,
                    pushing=self._membership.is_pushing(member.name),
                    seen_s=0.0 if connected else max(0.0, (now_us - member.seen_us) / 1e6),
                    hold_s=max(0.0, (member.ready_us - now_us) / 1e6),
                )
            )
        return ClusterStatus(id=self.id, region=self._region, release=__version__, members=found)
