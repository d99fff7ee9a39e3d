"""Workers announce themselves to one core, and all cores of the cluster use them."""

import asyncio
import secrets
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from emberline.accounts.secret import Secret
from emberline.balancer.endpoint import Endpoint
from emberline.cluster.cluster import Cluster, join_key
from emberline.cluster.engine_client import EngineClient
from emberline.cluster.member_table import MemberLimits, MemberTable
from emberline.cluster.membership import WorkerChange, WorkerConnections
from emberline.cluster.timings import Timings
from emberline.protocol import member as members
from emberline.protocol import token_ids as tokens
from emberline.protocol.errors import BadInput, Conflict, NotFound, Unauthorized, Unavailable
from emberline.protocol.events import TextEvent, TokenDelta
from emberline.protocol.frames import VERSION
from emberline.protocol.member import Announcement, Standing
from emberline.service import Service, open_service
from emberline.service.core import LocalCore
from emberline.service.service_factory import ClusterSettings
from emberline.service.work import Work
from emberline.text.text_model import TextModel
from tests.cluster.test_member_table import said as said_in_table
from tests.cluster.test_membership import states, until
from tests.databases import DatabaseLocation, mostly_sqlite, on_both_databases
from tests.faulty_store import FaultyStore
from tests.service.conftest import ALICE, PATIENCE_S, offer
from tests.service.fake_engine import EOS, FakeEngine, Script
from tests.service.test_service import ask, events_of, text_of

database = mostly_sqlite
SECRET = Secret("r" * 40)
Core = Callable[..., Awaitable[Service]]


class JoiningEngine(FakeEngine):
    """On a TCP port, with a join key."""

    def __init__(self, script: Script | None, name: str = "w0", *, address: str = "", **info: object) -> None:
        """`address`: that of another one, in whose place this one is announced."""
        super().__init__(Path("unused"), script, name=name, **info)
        self.key = join_key(SECRET, name)
        self.instance = secrets.token_hex(16)
        token = members.connection_token(self.key, self.instance)
        self.endpoint = Endpoint(name=name, address=address, token=token)
        if not address:
            self.listen()
        self.epoch = 0

    def said(self, challenge: str, **more: object) -> Announcement:
        fields: dict[str, object] = {
            "challenge": challenge,
            "name": self.endpoint.name,
            "instance": self.instance,
            "address": self.endpoint.address,
            "role": self.info.role,
            "model": "bytes",
            "fingerprint": self.info.fingerprint,
            "version": VERSION,
            "epoch": self.epoch,
        }
        return Announcement(**{**fields, **more})  # type: ignore[arg-type]

    async def announce(self, core: Service, **more: object) -> Standing:
        challenge = (await core.cluster_admin.join_challenge()).challenge
        answer = await core.cluster_admin.announce(members.sign(self.key, self.said(challenge, **more)))
        standing = members.verified(self.key, answer, Standing, "not the core")
        self.epoch = standing.epoch
        return standing


def cluster_of(service: Service) -> Cluster:
    assert isinstance(service.core, LocalCore)
    assert service.core.cluster is not None
    return service.core.cluster


@pytest.fixture
def stores() -> list[FaultyStore]:
    """Stores of the cores, in the order in which they were opened."""
    return []


@pytest.fixture
async def open_core(
    database: DatabaseLocation, tmp_path: Path, text_model: TextModel, stores: list[FaultyStore]
) -> AsyncIterator[Core]:
    """Opens cores of one cluster on one database."""
    opened: list[Service] = []

    async def make(secret: Secret = SECRET, members: MemberLimits | None = None, **more: object) -> Service:
        stores.append(FaultyStore(await database.open()))
        service = await open_service(
            [offer(text_model)],
            data_dir=tmp_path / f"core{len(stores)}",
            store=stores[-1],
            cluster=ClusterSettings(secret, members=members or MemberLimits()),
            **more,  # type: ignore[arg-type]
        )
        opened.append(service)
        return service

    yield make
    for service in opened:
        await service.close()
    for store in stores:
        await store.close()


@pytest.fixture
async def worker(say: Callable[..., Script]) -> AsyncIterator[JoiningEngine]:
    engine = JoiningEngine(say("Joined!"))
    await engine.start()
    yield engine
    await engine.die()


async def until_states(service: Service, expected: dict[str, str]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while await states(service) != expected:
            await asyncio.sleep(0.005)


def is_shared(database: DatabaseLocation) -> bool:
    return database.kind == "postgres"


@on_both_databases
async def test_a_worker_joins_at_one_core_and_every_core_uses_it(
    database: DatabaseLocation, open_core: Core, worker: JoiningEngine
) -> None:
    cores = [await open_core() for _ in range(2 if is_shared(database) else 1)]
    standing = await worker.announce(cores[0])
    assert standing.is_current
    assert standing.hold_s == 0
    for core in cores:
        await until_states(core, {"w0": "ready"})
        assert text_of(await events_of(core, ask())) == "Joined!"
    assert (await worker.announce(cores[-1])).epoch == standing.epoch
    later = await open_core()  # as after a restart
    await until_states(later, {"w0": "ready"})
    (status,) = (await later.cluster_admin.cluster_status()).members
    assert (status.connected, status.member.epoch, status.problem) == (True, standing.epoch, "")


@on_both_databases
async def test_drain_and_leave_concern_every_core(
    database: DatabaseLocation, open_core: Core, worker: JoiningEngine
) -> None:
    cores = [await open_core() for _ in range(2 if is_shared(database) else 1)]
    await worker.announce(cores[0])
    for core in cores:
        await until_states(core, {"w0": "ready"})
    assert await cores[-1].cluster_admin.change_workers(WorkerChange(action="drain", name="w0")) == ["w0"]
    for core in cores:
        await until_states(core, {"w0": "draining"})
    await cores[0].cluster_admin.change_workers(WorkerChange(action="undrain", name="w0"))
    for core in cores:
        await until_states(core, {"w0": "ready"})
    worker.script = None
    running = asyncio.create_task(events_of(cores[0], ask()))
    await until(lambda: worker.submitted)
    await cores[-1].cluster_admin.change_workers(WorkerChange(action="leave", name="w0"))
    await until_states(cores[0], {"w0": "draining"})
    with pytest.raises(Conflict, match="leaving"):
        await cores[0].cluster_admin.change_workers(WorkerChange(action="undrain", name="w0"))
    (request,) = worker.submitted
    worker.step(TokenDelta(request.id, tokens.pack([EOS]), "stop"))
    await running
    await until(lambda: worker.drained)
    await worker.die()
    for core in cores:
        await until_states(core, {})
    assert (await cores[0].cluster_admin.cluster_status()).members == []
    with pytest.raises(NotFound):
        await cores[0].cluster_admin.change_workers(WorkerChange(action="drain", name="w0"))


async def test_a_core_that_does_not_reach_a_leaving_member_does_not_forget_it(
    open_core: Core, worker: JoiningEngine, stores: list[FaultyStore]
) -> None:
    """Requests of another core may still run there."""
    core = await open_core(timings=Timings(sweep_s=0.05))
    await worker.announce(core)
    await until_states(core, {"w0": "ready"})
    await worker.die()
    await until_states(core, {"w0": "down"})
    await core.cluster_admin.change_workers(WorkerChange(action="leave", name="w0"))
    leaving = [each.member.state for each in (await core.cluster_admin.cluster_status()).members]
    assert leaving == ["leaving"], "it is not given up at once"
    stores[0].later_us = 31_000_000
    await until_states(core, {})


async def test_a_core_is_ready_while_a_member_is_away(open_core: Core, worker: JoiningEngine) -> None:
    core = await open_core()
    await worker.announce(core)
    await worker.die()
    later = await open_core()
    await until_states(later, {"w0": "down"})
    assert await later.ready(0.1)


@on_both_databases
async def test_one_bad_row_does_not_keep_a_core_from_the_others(
    open_core: Core, database: DatabaseLocation, worker: JoiningEngine
) -> None:
    core = await open_core()
    await worker.announce(core)
    store = await database.open()
    other = said_in_table("a0", address="tcp:nowhere:0")
    member = await MemberTable(store).announce(other, 1 << 60)
    await store.close()
    later = await open_core()
    await until_states(later, {"w0": "ready"})
    problems = {each.member.name: each.problem for each in (await later.cluster_admin.cluster_status()).members}
    assert "tcp:nowhere:0" in problems["a0"]
    assert later.core.cluster.follows("a0")
    store = await database.open()
    await MemberTable(store).forget("a0", member.epoch)
    await store.close()
    async with asyncio.timeout(PATIENCE_S):
        while later.core.cluster.follows("a0"):
            await asyncio.sleep(0.01)


@on_both_databases
async def test_a_newer_run_replaces_the_older_which_is_told_to_end(
    open_core: Core, worker: JoiningEngine, say: Callable[..., Script]
) -> None:
    core = await open_core()
    await worker.announce(core)
    await until_states(core, {"w0": "ready"})
    newer = JoiningEngine(say("Newer!"))
    await newer.start()
    assert (await newer.announce(core)).is_current
    await until(lambda: worker.drained)
    await until_states(core, {"w0": "ready"})
    assert text_of(await events_of(core, ask())) == "Newer!"
    answer = await worker.announce(core)
    assert not answer.is_current
    assert answer.epoch == newer.epoch
    await until(lambda: not worker.links)
    assert text_of(await events_of(core, ask("again"))) == "Newer!"
    assert not worker.links
    await newer.die()


async def test_an_earlier_run_is_not_taken_for_the_one_that_has_just_joined(
    database: DatabaseLocation, open_core: Core, worker: JoiningEngine
) -> None:
    """An upgrade would go on to the next worker, while requests still go to a worker that is about to end."""
    core = await open_core()
    await worker.announce(core)
    await until_states(core, {"w0": "ready"})
    (before,) = (await core.cluster_admin.cluster_status()).members
    assert (before.connected, before.member.epoch) == (True, worker.epoch)
    store, reconciling = await database.open(), cluster_of(core)._reconciling
    async with reconciling:  # this core has not looked yet
        await MemberTable(store).announce(said_in_table("w0", model="bytes"), 1 << 60)
        (after,) = (await core.cluster_admin.cluster_status()).members
    await store.close()
    assert after.member.epoch > worker.epoch
    assert (after.connected, after.problem) == (False, "not dialed yet")


async def test_a_request_on_a_worker_that_is_replaced_continues_on_the_newer(
    open_core: Core, worker: JoiningEngine, say: Callable[..., Script], text_model: TextModel
) -> None:
    core = await open_core()
    worker.script = None
    said = text_model.encode("Old, ", special=False)
    await worker.announce(core)
    await until_states(core, {"w0": "ready"})
    found: list[TextEvent] = []

    async def generate() -> None:
        async for event in core.run(Work(ask(), ALICE)):
            found.append(event)

    running = asyncio.create_task(generate())
    (request,) = await worker.submission()
    worker.step(TokenDelta(request.id, said, None))
    await until(lambda: text_of(found))
    newer = JoiningEngine(say("and newer!"))
    await newer.start()
    assert (await newer.announce(core)).is_current
    await running
    assert text_of(found) == "Old, and newer!"
    (moved,) = newer.submitted
    assert moved.output_ids == said
    await newer.die()


async def test_who_may_not_join(
    open_core: Core, worker: JoiningEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = await open_core()
    for wrong, error, match in (
        ({"version": VERSION + 1}, BadInput, rf"speaks version {VERSION + 1}.*same release"),
        ({"model": "unknown"}, BadInput, "emberline pull unknown"),
        ({"is_tls": True}, BadInput, "has no certificate"),
        ({"address": "tcp:127.0.0.1:0"}, BadInput, "neither unix:/path nor tcp:host:port"),
        ({"model": "unknown", "epoch": 7}, BadInput, "emberline pull unknown"),  # its row was forgotten
    ):
        with pytest.raises(error, match=match):
            await worker.announce(core, **wrong)
    with monkeypatch.context() as patch:
        patch.setattr("emberline.cluster.membership.JOIN_TIMEOUT_S", 0.2)
        with pytest.raises(Unavailable, match=r"cannot be reached at tcp:127\.0\.0\.1:1"):
            await worker.announce(core, address="tcp:127.0.0.1:1")
    assert (await core.cluster_admin.cluster_status()).members == []
    await worker.announce(core)
    other = JoiningEngine(None, name="w1", address=worker.endpoint.address)
    with pytest.raises(BadInput, match=r"other weights \(eeee.*than w0 \(ffff.*same revision"):
        await other.announce(core, fingerprint="e" * 32)


async def test_an_announcement_must_be_proved_fresh_and_new(open_core: Core, worker: JoiningEngine) -> None:
    core = await open_core()
    challenge = (await core.cluster_admin.join_challenge()).challenge
    said = worker.said(challenge)
    with pytest.raises(Unauthorized, match=r"credential of w0 is not of this cluster.*cluster credential w0"):
        await core.cluster_admin.announce(members.sign(b"x" * 32, said))
    with pytest.raises(Unauthorized, match="credential of w1"):  # the key of another name
        await core.cluster_admin.announce(members.sign(worker.key, msgspec.structs.replace(said, name="w1")))
    signed = members.sign(worker.key, said)
    await core.cluster_admin.announce(signed)
    with pytest.raises(Unauthorized, match="received before"):
        await core.cluster_admin.announce(signed)
    for forged in ("", "1.2.3", challenge[:-1] + "x", challenge.replace(".", ".0", 1)):
        with pytest.raises(Unauthorized):
            await core.cluster_admin.announce(members.sign(worker.key, worker.said(forged)))


async def test_a_late_answer_is_refused(open_core: Core, worker: JoiningEngine) -> None:
    core = await open_core(timings=Timings(challenge_s=-1.0))
    with pytest.raises(Unauthorized, match="ask for another"):
        await worker.announce(core)


async def test_a_core_of_another_cluster_is_refused(database: DatabaseLocation, open_core: Core) -> None:
    await open_core()
    if is_shared(database):
        with pytest.raises(Unavailable, match="belongs to cluster"):
            await open_core(Secret("o" * 40))


async def test_a_worker_that_ends_is_forgotten_and_one_that_flaps_waits(
    open_core: Core, worker: JoiningEngine, stores: list[FaultyStore]
) -> None:
    core = await open_core(members=MemberLimits(max_quick_joins=1, first_hold_s=30), timings=Timings(sweep_s=0.05))
    await worker.announce(core)
    await worker.announce(core, leaving=True)
    await until_states(core, {})
    await worker.announce(core)
    again = JoiningEngine(worker.script, address=worker.endpoint.address)
    worker.endpoint = again.endpoint
    standing = await again.announce(core)
    assert 0 < standing.hold_s <= 30
    (status,) = (await core.cluster_admin.cluster_status()).members
    assert not status.connected
    assert "quick succession" in status.problem
    stores[0].later_us = 29_000_000  # it is not lost by then
    later = MemberTable(stores[0])
    async with asyncio.timeout(PATIENCE_S):
        while (await later.all())[0].ready_us > stores[0].now_us():
            stores[0].later_us += 100_000
    await until_states(core, {"w0": "ready"})


async def test_the_name_of_a_configured_worker_is_taken(
    database: DatabaseLocation, tmp_path: Path, text_model: TextModel, engine: FakeEngine, worker: JoiningEngine
) -> None:
    engine.endpoint = msgspec.structs.replace(engine.endpoint, name="w0")
    store = await database.open()
    folder, settings = tmp_path / "core", ClusterSettings(SECRET)
    core = await open_service([offer(text_model, engine)], data_dir=folder, store=store, cluster=settings)
    with pytest.raises(Conflict, match="configuration of this core"):
        await worker.announce(core)
    await core.close()
    await store.close()


@on_both_databases
async def test_two_role_changes_at_once_leave_one_worker_that_decodes(
    database: DatabaseLocation, open_core: Core, say: Callable[..., Script]
) -> None:
    """Asked at two cores, or at one: each alone would leave the other worker."""
    cores = [await open_core(timings=Timings(role_s=PATIENCE_S)) for _ in range(2 if is_shared(database) else 1)]
    workers = [JoiningEngine(say("Joined!"), name) for name in ("w0", "w1")]
    try:
        for worker in workers:
            worker.info = msgspec.structs.replace(worker.info, role="decode", transfers=("tcp",))
            await worker.start()
            await worker.announce(cores[0])
        for core in cores:
            await until_states(core, {"w0": "ready", "w1": "ready"})
        results = await asyncio.gather(
            cluster_of(cores[0]).set_role("w0", "prefill"),
            cluster_of(cores[-1]).set_role("w1", "prefill"),
            return_exceptions=True,
        )
        assert {type(each) for each in results} == {Conflict, int}
        assert sorted(worker.info.role for worker in workers) == ["decode", "prefill"]
    finally:
        for worker in workers:
            await worker.die()


async def test_what_a_core_knows_of_its_workers_is_read_in_its_own_thread(
    open_core: Core, say: Callable[..., Script], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A role change is checked in a transaction, which SQLite runs in another thread, while workers come and go."""
    core = await open_core(timings=Timings(role_s=PATIENCE_S))
    workers = [JoiningEngine(say("Joined!"), name) for name in ("w0", "w1")]
    engines_of, threads = WorkerConnections.engines_of, set[str]()

    def noted(self: WorkerConnections, model: str) -> list[EngineClient]:
        threads.add(threading.current_thread().name)
        return engines_of(self, model)

    try:
        for worker in workers:
            worker.info = msgspec.structs.replace(worker.info, role="decode", transfers=("tcp",))
            await worker.start()
            await worker.announce(core)
        await until_states(core, {"w0": "ready", "w1": "ready"})
        monkeypatch.setattr(WorkerConnections, "engines_of", noted)
        await cluster_of(core).set_role("w0", "prefill")
        with pytest.raises(Conflict, match="last worker"):
            await cluster_of(core).set_role("w1", "prefill")
        assert threads == {threading.current_thread().name}
    finally:
        for worker in workers:
            await worker.die()


@on_both_databases
async def test_a_role_that_another_core_has_set_is_not_undone(
    open_core: Core, worker: JoiningEngine, stores: list[FaultyStore]
) -> None:
    core = await open_core(timings=Timings(sweep_s=0.05))
    worker.info = msgspec.structs.replace(worker.info, transfers=("tcp",))
    await worker.announce(core)
    await until_states(core, {"w0": "ready"})
    stores[0].mute = True
    await MemberTable(stores[0]).set_role("w0", "decode")
    worker.set_role("decode")
    await until(lambda: core.engines["w0"].role == "decode")
    before_us, table = stores[0].now_us(), MemberTable(stores[0])
    async with asyncio.timeout(PATIENCE_S):
        while (await table.all())[0].seen_us < before_us:  # this core looks at its workers now and then
            await asyncio.sleep(0.01)
    assert text_of(await events_of(core, ask())) == "Joined!"  # it has handled all that it was sent before
    assert worker.info.role == "decode"
