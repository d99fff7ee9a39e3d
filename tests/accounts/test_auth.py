import pytest

from emberline.accounts.auth import Authenticator
from emberline.accounts.secret import Secret
from emberline.protocol.errors import BadInput, Unauthorized

SECRET = Secret("s" * 32)


def test_local_mode_needs_no_key() -> None:
    local = Authenticator(SECRET)
    assert not local.needs_key
    alice, bob = local.authenticate({}, "alice"), local.authenticate({"authorization": "Bearer whatever"}, "bob")
    assert (alice.account, alice.key_id) == ("alice", "")
    assert alice.salt == SECRET.derive("kv", "alice") != bob.salt
    assert local.authenticate({}).account == "local"


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer right-key"},
        {"authorization": "bearer  right-key "},
        {"x-auth-key": "right-key"},
        {"x-api-key": "right-key"},
        {"authorization": "Bearer wrong", "x-api-key": "right-key"},
    ],
)
def test_the_key_is_accepted_in_every_api_header(headers: dict[str, str]) -> None:
    principal = Authenticator(SECRET, "right-key").authenticate(headers, "acme")
    assert principal.account == "acme"
    assert principal.key_id
    assert "right-key" not in principal.key_id


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer "},
        {"authorization": "Basic right-key"},
        {"authorization": "right-key"},
        {"authorization": "Bearer right-key2"},
        {"authorization": "Bearer right-ke"},
        {"x-auth-key": ""},
        {"x-api-key": "\udcff\x00é"},
    ],
)
def test_other_keys_are_refused(headers: dict[str, str]) -> None:
    with pytest.raises(Unauthorized):
        Authenticator(SECRET, "right-key").authenticate(headers)


def test_an_empty_key_in_the_configuration_is_no_key() -> None:
    assert not Authenticator(SECRET, "").needs_key


@pytest.mark.parametrize("account", ["", "-a", "_a", "a/b", "..", "a b", "ä", "a\n", "a" * 65, "a\x00", "%2e"])
def test_invalid_account_names_are_refused(account: str) -> None:
    with pytest.raises(BadInput, match="account names"):
        Authenticator(SECRET).authenticate({}, account)


@pytest.mark.parametrize("account", ["a", "023e105f4ecef8ad9ca31a8372d0c353", "My-Team_1", "a" * 64])
def test_valid_account_names(account: str) -> None:
    assert Authenticator(SECRET).authenticate({}, account).account == account
