import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from emberline.accounts.account_service import AccountService, KeyGrant
from emberline.accounts.api_key import is_well_formed, new_key
from emberline.accounts.audit_log import Actor
from emberline.accounts.auth import Authenticator
from emberline.accounts.operator_ticket import VALID_S, operator_ticket
from emberline.accounts.secret import Secret
from emberline.protocol.errors import BadInput, Forbidden, Unauthorized
from emberline.store import open_store
from tests.faulty_store import FaultyStore

SECRET = Secret("s" * 32)
TEST = Actor("test")
Headers = list[tuple[bytes, bytes]]


def bearer(key: str) -> Headers:
    return [(b"authorization", f"Bearer {key}".encode("latin-1"))]


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[FaultyStore]:
    store = await open_store(tmp_path / "t.db")
    yield FaultyStore(store)
    await store.close()


@pytest.fixture
async def accounts(store: FaultyStore) -> AsyncIterator[AccountService]:
    service = AccountService(store, SECRET, poll_s=3600)  # only changes and unknown keys make it read
    await service.open()
    yield service
    await service.close()


class Clock:
    """The real time, plus `later_s`."""

    later_s = 0.0

    def __call__(self) -> float:
        return time.time() + self.later_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def auth(accounts: AccountService, clock: Clock) -> Authenticator:
    return Authenticator(SECRET, "admin-key", accounts.directory, required=True, clock=clock)


def test_local_mode_needs_no_key() -> None:
    local = Authenticator(SECRET)
    assert not local.needs_key
    alice, bob = local.check([], "alice"), local.check(bearer("whatever"), "bob")
    assert (alice.account, alice.key_id, alice.role) == ("alice", "", "admin")
    assert alice.salt == SECRET.derive("kv", "alice") != bob.salt
    assert local.check([]).account == "local"


@pytest.mark.parametrize(
    "headers",
    [
        [(b"authorization", b"Bearer right-key")],
        [(b"authorization", b"bearer  right-key ")],
        [(b"x-auth-key", b"right-key")],
        [(b"x-auth-key", b"right-key"), (b"x-auth-email", b"a@b.c")],
        [(b"x-api-key", b"right-key")],
        [(b"x-api-key", b"right-key"), (b"authorization", b"Bearer right-key")],
        [(b"x-api-key", b"right-key"), (b"authorization", b"Basic abc")],
    ],
)
def test_the_admin_key_is_accepted_in_every_api_header(headers: Headers) -> None:
    principal = Authenticator(SECRET, "right-key").check(headers, "acme")
    assert (principal.account, principal.role) == ("acme", "admin")
    assert principal.key_id
    assert "right-key" not in principal.key_id


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"authorization", b"Bearer ")],
        [(b"authorization", b"Basic right-key")],
        [(b"authorization", b"right-key")],
        [(b"authorization", b"Bearer right-key2")],
        [(b"authorization", b"Bearer right-ke")],
        [(b"x-auth-key", b"")],
        [(b"x-auth-email", b"right-key")],
        [(b"x-api-key", b"\xff\x00\xe9")],
        [(b"x-api-key", b"right-key" * 1000)],
        [(b"x-forwarded-authorization", b"Bearer right-key")],
        [(b"cookie", b"key=right-key")],
    ],
)
def test_other_keys_are_refused(headers: Headers) -> None:
    with pytest.raises(Unauthorized):
        Authenticator(SECRET, "right-key").check(headers)


@pytest.mark.parametrize(
    "headers",
    [
        [(b"authorization", b"Bearer right-key"), (b"authorization", b"Bearer right-key")],
        [(b"authorization", b"Bearer wrong"), (b"authorization", b"Bearer right-key")],
        [(b"authorization", b"Bearer right-key"), (b"authorization", b"Basic eA==")],
        [(b"authorization", b"Bearer wrong"), (b"x-api-key", b"right-key")],
        [(b"authorization", b"Bearer right-key"), (b"x-api-key", b"wrong")],
        [(b"x-auth-key", b"right-key"), (b"x-api-key", b"wrong")],
    ],
)
def test_two_credentials_are_refused_even_if_one_is_right(headers: Headers) -> None:
    with pytest.raises(Unauthorized, match="send one"):
        Authenticator(SECRET, "right-key").check(headers)


def test_an_empty_key_in_the_configuration_is_no_key() -> None:
    assert not Authenticator(SECRET, "").needs_key


@pytest.mark.parametrize("account", ["", "-a", "_a", "a/b", "..", "a b", "ä", "a\n", "a" * 65, "a\x00", "%2e"])
def test_invalid_account_names_are_refused(account: str) -> None:
    with pytest.raises(BadInput, match="account names"):
        Authenticator(SECRET).check([], account)


@pytest.mark.parametrize("account", ["a", "023e105f4ecef8ad9ca31a8372d0c353", "My-Team_1", "a" * 64])
def test_valid_account_names(account: str) -> None:
    assert Authenticator(SECRET).check([], account).account == account


async def test_a_key_acts_for_its_own_account_only(accounts: AccountService, auth: Authenticator) -> None:
    grant = KeyGrant(models=("@cf/a/*",), apis=("chat",))
    issued = await accounts.create_key(TEST, "alice", grant)
    principal = auth.check(bearer(issued.key.text))
    assert (principal.account, principal.key_id, principal.role) == ("alice", issued.record.id, "user")
    assert (principal.models, principal.apis) == (("@cf/a/*",), ("chat",))
    assert principal.salt == SECRET.derive("kv", "alice")
    assert auth.check(bearer(issued.key.text), "alice") == principal
    with pytest.raises(Forbidden, match="belongs to account alice"):
        auth.check(bearer(issued.key.text), "bob")


async def test_an_admin_key_acts_for_every_account(accounts: AccountService, auth: Authenticator) -> None:
    issued = await accounts.create_key(TEST, "ops", KeyGrant(role="admin"))
    assert auth.check(bearer(issued.key.text)).account == "ops"
    other = auth.check(bearer(issued.key.text), "alice")
    assert (other.account, other.role, other.key_id) == ("alice", "admin", issued.record.id)


async def test_revoked_and_expired_keys_are_refused(
    accounts: AccountService, auth: Authenticator, clock: Clock
) -> None:
    in_an_hour_us = time.time_ns() // 1000 + 3600_000_000
    key = await accounts.create_key(TEST, "alice", KeyGrant(expires_us=in_an_hour_us))
    assert auth.check(bearer(key.key.text)).account == "alice"
    clock.later_s = 3601
    with pytest.raises(Unauthorized, match="expired"):
        auth.check(bearer(key.key.text))
    await accounts.revoke_key(TEST, key.record.id)
    with pytest.raises(Unauthorized, match="revoked"):
        auth.check(bearer(key.key.text))


async def test_a_rotated_key_is_valid_for_the_overlap(
    accounts: AccountService, auth: Authenticator, clock: Clock
) -> None:
    first = await accounts.create_key(TEST, "alice")
    second = await accounts.rotate_key(TEST, first.record.id, overlap_s=3600)
    assert second.record.id == first.record.id
    assert auth.check(bearer(first.key.text)) == auth.check(bearer(second.key.text))
    clock.later_s = 3601
    with pytest.raises(Unauthorized, match="rotated"):
        auth.check(bearer(first.key.text))
    assert auth.check(bearer(second.key.text)).account == "alice"
    third = await accounts.rotate_key(TEST, first.record.id, overlap_s=0)
    for old in (first, second):
        with pytest.raises(Unauthorized):
            auth.check(bearer(old.key.text))
    assert auth.check(bearer(third.key.text)).key_id == first.record.id


async def test_keys_of_a_disabled_account_are_refused(accounts: AccountService, auth: Authenticator) -> None:
    key = await accounts.create_key(TEST, "alice")
    await accounts.update_account(TEST, "alice", disabled=True)
    with pytest.raises(Forbidden, match="disabled"):
        auth.check(bearer(key.key.text))
    await accounts.update_account(TEST, "alice", disabled=False)
    assert auth.check(bearer(key.key.text)).account == "alice"


async def test_a_key_that_another_process_made_is_known_at_once(accounts: AccountService, tmp_path: Path) -> None:
    store = await open_store(tmp_path / "t.db")
    other = AccountService(store, SECRET, poll_s=3600)  # only the unknown key makes it read
    await other.open()
    auth = Authenticator(SECRET, None, other.directory, required=True)
    issued = await accounts.create_key(TEST, "alice")
    assert (await auth.authenticate(bearer(issued.key.text))).account == "alice"
    with pytest.raises(Unauthorized):
        await auth.authenticate(bearer(new_key().text))
    await other.close()
    await store.close()


async def test_malformed_keys_never_cause_a_read(auth: Authenticator, store: FaultyStore) -> None:
    reads: list[object] = []

    async def note(name: str, asked: object) -> None:
        reads.append(asked)

    store.before = note
    good = new_key().text
    for key in ("ember_", good[:-1], good + "A", good[:-1] + "!", "ember_" + "A" * 48, good.swapcase(), "x' OR 1=1 --"):
        assert not is_well_formed(key)
        with pytest.raises(Unauthorized):
            await auth.authenticate(bearer(key))
    assert reads == []
    with pytest.raises(Unauthorized):
        await auth.authenticate(bearer(good))
    assert reads


async def test_local_mode_honors_a_key_that_is_sent(accounts: AccountService) -> None:
    local = Authenticator(SECRET, None, accounts.directory)
    issued = await accounts.create_key(TEST, "alice")
    assert local.check(bearer(issued.key.text)).account == "alice"
    await accounts.revoke_key(TEST, issued.record.id)
    with pytest.raises(Unauthorized, match="revoked"):
        local.check(bearer(issued.key.text))
    assert local.check(bearer("sk-something")).is_admin


def test_operator_tickets(auth: Authenticator) -> None:
    now_s = int(time.time())
    ticket = operator_ticket(SECRET, now_s)
    principal = auth.check(bearer(ticket), "alice")
    assert (principal.role, principal.key_id, principal.account) == ("admin", "operator", "alice")
    other = operator_ticket(Secret("t" * 32), now_s)
    old = operator_ticket(SECRET, now_s - VALID_S - 2)
    late = operator_ticket(SECRET, now_s + VALID_S + 60)
    moved = ticket.replace(str(now_s), str(now_s + 1))
    for bad in (other, old, late, moved, "ember-operator.", "ember-operator.x.y", f"ember-operator.{'9' * 40}.a"):
        with pytest.raises(Unauthorized):
            auth.check(bearer(bad))


async def test_a_queued_job_keeps_the_scope_of_its_revoked_key(accounts: AccountService, auth: Authenticator) -> None:
    issued = await accounts.create_key(TEST, "alice", KeyGrant(models=("small",)))
    await accounts.revoke_key(TEST, issued.record.id)
    principal = auth.principal("alice", issued.record.id)
    assert (principal.account, principal.models, principal.role) == ("alice", ("small",), "user")
    with pytest.raises(Forbidden, match="may not use large"):
        principal.check_model("large", ("Large",))
    principal.check_model("the-id", ("other", "SMALL"))
