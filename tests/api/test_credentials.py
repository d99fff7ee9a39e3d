"""Header tricks on a real socket: what the HTTP parser lets through, the authentication must refuse.

Each is a lesson from an advisory: a Host that changes the path which is authorized, two credentials of which a proxy
checks the one and the server uses the other, keys that are long, malformed or meant for the database.
"""

import socket
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberline.accounts.auth import Authenticator
from emberline.accounts.secret import Secret
from emberline.protocol.errors import Unauthorized
from tests.api.fake_service import KEY, FakeService, app_of
from tests.api.loopback import Loopback, on_loopback

RIGHT = b"Authorization: Bearer " + KEY.encode()
WRONG = b"Authorization: Bearer wrong"
AUTH = Authenticator(Secret("0" * 64), KEY)


@pytest.fixture(scope="module")
def server() -> Iterator[Loopback]:
    with on_loopback(app_of(FakeService(), KEY)) as server:
        yield server


def status(server: Loopback, *fields: bytes, target: bytes = b"/api/ps", host: bytes = b"Host: localhost") -> int:
    request = b"\r\n".join([b"GET " + target + b" HTTP/1.1", host, *fields, b"Connection: close", b"", b""])
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as raw:
        raw.sendall(request)
        answer = b""
        while b"\r\n" not in answer and (chunk := raw.recv(4096)):
            answer += chunk
    return int(answer.split(b" ")[1])


def test_the_right_key_is_accepted(server: Loopback) -> None:
    assert status(server, RIGHT) == 200
    assert status(server, b"X-Auth-Email: a@example.org", b"X-Auth-Key: " + KEY.encode()) == 200


@pytest.mark.parametrize(
    "fields",
    [
        (RIGHT, RIGHT),
        (WRONG, RIGHT),
        (RIGHT, WRONG),
        (RIGHT, b"authorization: Basic eDp5"),
        (RIGHT, b"X-Api-Key: wrong"),
        (b"X-Api-Key: " + KEY.encode(), b"X-Auth-Key: wrong"),
        (RIGHT + b", Bearer wrong",),
        (b"Authorization: Bearer", b" " + KEY.encode()),  # obsolete line folding
        (b"Authorization : Bearer " + KEY.encode(),),
        (b"Authorization\x00: Bearer " + KEY.encode(),),
        (b"Authorization: Bearer " + KEY.encode() + b"\x00",),
        (b"Authorization: Bearer " + KEY.upper().encode(),),
        (b"Authorization: Bearer " + KEY.encode() * 100,),
        (b"Authorization: Bearer ' OR 1=1 --",),
        (b"Authorization: Bearer \xff\xfe\xfd",),
        (b"X-Auth-Email: a@example.org",),
        (b"X-Forwarded-Authorization: Bearer " + KEY.encode(), b"X-Forwarded-For: 127.0.0.1"),
        (b"Proxy-Authorization: Bearer " + KEY.encode(),),
        (b"Cookie: authorization=" + KEY.encode(),),
    ],
)
def test_tricks_with_credentials_are_refused(server: Loopback, fields: tuple[bytes, ...]) -> None:
    assert status(server, *fields) in (400, 401)


@pytest.mark.parametrize(
    ("target", "host"),
    [
        (b"/api/ps", b"Host: localhost/health"),
        (b"/api/ps", b"Host: localhost/health?"),
        (b"/api/ps", b"Host: localhost#/health"),
        (b"/api/ps", b"Host: user@localhost"),
        (b"/api/ps", b"Host: localhost\r\nHost: localhost"),
        (b"/api/ps", b"Host: evil.example"),
        (b"http://localhost/health/../api/ps", b"Host: localhost"),
        (b"http://localhost/api/ps", b"Host: localhost"),
        (b"/health/..%2fapi/ps", b"Host: localhost"),
        (b"/health%2f..%2f..%2fapi%2fps", b"Host: localhost"),
        (b"/health;/../api/ps", b"Host: localhost"),
        (b"//api/ps", b"Host: localhost"),
        (b"/api/ps?/health", b"Host: localhost\r\nX-Forwarded-Prefix: /health\r\nX-Original-URL: /health"),
    ],
)
def test_neither_host_nor_path_tricks_open_an_admin_route(server: Loopback, target: bytes, host: bytes) -> None:
    assert status(server, target=target, host=host) in (400, 401, 403, 404)


_names = st.sampled_from([b"authorization", b"x-api-key", b"x-auth-key", b"x-auth-email", b"cookie", b"x-key"])
_values = st.sampled_from([KEY, f"Bearer {KEY}", f"bearer {KEY}", "Bearer wrong", "wrong", "", f"Basic {KEY}"])


@given(st.lists(st.tuples(_names, _values), max_size=5))
def test_only_one_credential_that_is_right_authenticates(fields: list[tuple[bytes, str]]) -> None:
    credentials = [(name, value) for name, value in fields if name in (b"authorization", b"x-api-key", b"x-auth-key")]
    keys = set()
    for name, value in credentials:
        is_bearer = value.lower().startswith("bearer ")
        keys.add((value[7:] if is_bearer else "") if name == b"authorization" else value)
    expected = keys - {""} == {KEY} and len({name for name, _ in credentials}) == len(credentials)
    try:
        principal = AUTH.check([(name, value.encode()) for name, value in fields])
    except Unauthorized:
        assert not expected
    else:
        assert expected
        assert principal.is_admin
