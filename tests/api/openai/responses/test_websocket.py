"""Responses over a WebSocket, with a client of its own, over a real port."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from socket import create_connection
from typing import Any

import httpx
import pytest
from websockets.client import ClientProtocol
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.frames import CloseCode
from websockets.protocol import State
from websockets.sync.client import ClientConnection, connect
from websockets.uri import parse_uri

from emberline.api.http.body import LARGE_BYTES, held_bodies
from emberline.api.http.exchange import RequestLimits
from emberline.api.http.large_requests import LargeRequestRelay
from emberline.api.http.websocket import MAX_WAITING
from emberline.api.openai.responses.unstored import UnstoredResponse
from emberline.net.http_server import Message as HttpMessage
from emberline.net.http_server import Receive, Scope, Send, ServerLimits
from emberline.net.websocket_server import MAX_FRAGMENTS, MAX_MESSAGE_BYTES
from emberline.protocol.complete_response import StoredResponse
from emberline.protocol.errors import RateLimited, Unavailable
from emberline.protocol.events import Started, TextDelta
from emberline.protocol.rate_limits import RateLimits
from emberline.protocol.request import GenerateRequest, Message
from tests.api.fake_service import KEY, USAGE, FakeService, app_of, hello
from tests.api.loopback import Loopback, on_loopback
from tests.api.openai.responses import open_responses
from tests.api.openai.responses.test_endpoints import ASK, normal, saying
from tests.api.openai.responses.test_open_responses import check, check_events
from tests.net.test_http_server import held, slowly, wait_for

CREATE = ASK | {"type": "response.create"}
UNSTORED = CREATE | {"store": False}
PATIENCE_S = 30
NOT_FOUND = "previous_response_not_found"
Json = dict[str, Any]


class Socket:
    """A client's connection."""

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection

    def send(self, message: Any) -> None:
        self.connection.send(message if isinstance(message, str | bytes) else json.dumps(message))

    def next(self) -> Json:
        event: Json = json.loads(self.connection.recv(PATIENCE_S))
        return event

    def events(self) -> list[Json]:
        """The events of one response, or one error."""
        events = [self.next()]
        while events[-1]["type"] not in ("error", "response.completed", "response.failed", "response.incomplete"):
            events.append(self.next())
        return events

    def ask(self, message: Json) -> Json:
        """The response; its events are checked."""
        self.send(message)
        events = self.events()
        numbers = [event["sequence_number"] for event in events]
        assert numbers == sorted(set(numbers)), events[-1]
        return check_events(events)

    def error(self, message: Any) -> Json:
        self.send(message)
        event = self.next()
        check(open_responses.SOCKET_ERROR, event)
        return event

    def close_code(self) -> int:
        """Waits for the server to close."""
        with pytest.raises(ConnectionClosed):
            self.connection.recv(PATIENCE_S)
        assert self.connection.protocol.close_rcvd is not None
        return int(self.connection.protocol.close_rcvd.code)


@contextmanager
def connected(server: Loopback, path: str = "/v1/responses", key: str = KEY, **options: Any) -> Iterator[Socket]:
    headers = {"authorization": f"Bearer {key}"} | options.pop("headers", {})
    address = server.url.replace("http://", "ws://") + path
    with connect(address, additional_headers=headers, max_size=None, **options) as connection:
        yield Socket(connection)


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[FakeService, Loopback]]:
    service = FakeService()
    with on_loopback(app_of(service, KEY)) as server:
        yield service, server


@pytest.fixture
def service(shared: tuple[FakeService, Loopback]) -> FakeService:
    service, _ = shared
    service.script, service.rate_limits = hello, None
    service.requests.clear()
    return service


@pytest.fixture
def server(shared: tuple[FakeService, Loopback]) -> Loopback:
    return shared[1]


# --- turns ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/responses", "/client/v4/accounts/acme/ai/v1/responses"])
def test_events_are_those_of_a_stream(server: Loopback, service: FakeService, path: str) -> None:
    with connected(server, path) as socket:
        found = [socket.ask(CREATE | {"stream": False}) for _ in range(3)]  # a socket always streams
    over_http = httpx.post(server.url + path, json=ASK, headers={"authorization": f"Bearer {KEY}"})
    assert [normal(response) for response in found] == [normal(over_http.json())] * 3
    assert len({request.id for request in service.requests}) == 4


def test_the_last_unstored_response_is_continued(server: Loopback, service: FakeService) -> None:
    with connected(server) as socket:
        first = socket.ask(UNSTORED)
        second = socket.ask(UNSTORED | {"previous_response_id": first["id"], "input": "More"})
        assert (second["previous_response_id"], second["store"]) == (first["id"], False)
        said = (Message("user", "Hi"), Message("assistant", "Hello!"), Message("user", "More"))
        assert service.requests[-1].messages == said
        assert service.requests[-1].session == first["id"]
        assert socket.error(UNSTORED | {"previous_response_id": first["id"]})["error"]["code"] == NOT_FOUND
        # A stored response that continues it holds the whole conversation, for every connection.
        stored = socket.ask(CREATE | {"previous_response_id": second["id"], "input": "And?"})
    with connected(server) as socket:
        error = socket.error(UNSTORED | {"previous_response_id": second["id"]})
        assert (error["status"], error["error"]["param"]) == (400, "previous_response_id")
        assert error["error"]["code"] == NOT_FOUND
        socket.ask(UNSTORED | {"previous_response_id": stored["id"], "input": "Last"})
    messages = (*said, Message("assistant", "Hello!"), Message("user", "And?"), Message("assistant", "Hello!"))
    assert service.requests[-1].messages == (*messages, Message("user", "Last"))


@pytest.mark.parametrize(
    "change",
    [
        {"input": [{"type": "function_call_output", "call_id": "none", "output": ""}]},
        {"tools": [{"type": "mcp"}]},
        {"temperature": 9},
    ],
)
def test_a_failed_continuation_ends_the_unstored_chain(server: Loopback, change: Json) -> None:
    with connected(server) as socket:
        first = socket.ask(UNSTORED)
        assert socket.error(UNSTORED | {"previous_response_id": first["id"]} | change)["status"] == 400
        assert socket.error(UNSTORED | {"previous_response_id": first["id"]})["error"]["code"] == NOT_FOUND
        assert socket.ask(UNSTORED)["status"] == "completed"


def test_a_response_that_fails_on_its_way(server: Loopback, service: FakeService) -> None:
    async def broken(request: GenerateRequest) -> Any:
        yield Started(USAGE)
        yield TextDelta(0, "Hel")
        raise Unavailable("the engine was lost")

    with connected(server) as socket:
        first = socket.ask(UNSTORED)
        service.script = broken
        failed = socket.ask(UNSTORED | {"previous_response_id": first["id"]})
        assert (failed["status"], failed["error"]["message"]) == ("failed", "the engine was lost")
        service.script = hello
        assert socket.error(UNSTORED | {"previous_response_id": first["id"]})["error"]["code"] == NOT_FOUND


def test_a_compacted_conversation_begins_a_chain(server: Loopback, service: FakeService) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    compacted = httpx.post(f"{server.url}/v1/responses/compact", json=ASK, headers=headers).json()
    with connected(server) as socket:
        assert socket.ask(UNSTORED | {"input": [*compacted["output"], {"role": "user", "content": "Go on"}]})
    assert service.requests[-1].messages is not None
    assert [message.role for message in service.requests[-1].messages] == ["user", "assistant", "user"]


def test_warming_up(server: Loopback, service: FakeService) -> None:
    with connected(server) as socket:
        warm = socket.ask(
            UNSTORED
            | {
                "generate": False,
                "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
                "tool_choice": "required",
            }
        )
        assert (warm["status"], warm["output"], warm["usage"]["input_tokens"]) == ("completed", [], 12)
        assert service.requests[-1].sampling.max_tokens == 1
        socket.ask(UNSTORED | {"previous_response_id": warm["id"], "input": "Now"})
        assert service.requests[-1].messages == (Message("user", "Hi"), Message("user", "Now"))
        assert service.requests[-1].sampling.max_tokens is None


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "param", "words"),
    [
        ("no JSON", "type", "JSON object"),
        ("[]", "type", "JSON object"),
        ("{}", "type", "response.create"),
        (b"\x00", None, "binary"),
        ({"type": "response.steer"}, "type", "response.steer"),
        (CREATE | {"background": True}, "background", "background"),
        (CREATE | {"model": "@cf/no/model"}, "model", "no/model"),
        (CREATE | {"input": 3}, "input", "list"),
    ],
)
def test_bad_messages(server: Loopback, message: Any, param: str | None, words: str) -> None:
    with connected(server) as socket:
        error = socket.error(message)["error"]
        assert error["param"] == param
        assert words in error["message"]
        assert socket.ask(CREATE)["status"] == "completed"


def test_a_caller_beyond_its_limits(server: Loopback, service: FakeService) -> None:
    async def limited(request: GenerateRequest) -> Any:
        raise RateLimited("too many", retry_after_s=7)
        yield

    service.script = limited
    service.rate_limits = RateLimits()
    with connected(server) as socket:
        error = socket.error(CREATE)
        assert (error["status"], error["error"]["code"]) == (429, "rate_limit_exceeded")
        assert error["headers"]["retry-after"] == "7"


@pytest.mark.parametrize(
    ("path", "key", "headers", "status"),
    [
        ("/v1/responses", "wrong", {}, 401),
        ("/v1/responses", KEY, {"origin": "http://page.example"}, 403),
        ("/v1/models", KEY, {}, 400),
        ("/v1/nothing", KEY, {}, 404),
    ],
)
def test_refused_handshakes(server: Loopback, path: str, key: str, headers: Json, status: int) -> None:
    with pytest.raises(InvalidStatus) as refused, connected(server, path, key, headers=headers):
        pass
    assert refused.value.response.status_code == status
    assert json.loads(bytes(refused.value.response.body))["error"]["message"]


def test_requests_that_are_no_handshake(server: Loopback) -> None:
    with httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {KEY}"}) as client:
        answer = client.get("/v1/responses")
        assert (answer.status_code, answer.headers["upgrade"]) == (426, "websocket")
        asks = {"connection": "upgrade", "upgrade": "websocket"}
        assert client.get("/v1/responses", headers=asks).status_code == 400  # without its key
        assert client.get("/health").status_code == 200


class RawSocket:
    """A client that reads nothing while it sends a message."""

    def __init__(self, server: Loopback) -> None:
        self.protocol = ClientProtocol(parse_uri(server.url.replace("http://", "ws://") + "/v1/responses"))
        self.socket = create_connection(("127.0.0.1", server.port), PATIENCE_S)
        request = self.protocol.connect()
        request.headers["authorization"] = f"Bearer {KEY}"
        self.protocol.send_request(request)
        self.flush()
        while self.protocol.state is State.CONNECTING:
            self.protocol.receive_data(self.socket.recv(4096))

    def flush(self) -> None:
        self.socket.sendall(b"".join(self.protocol.data_to_send()))

    def close_code(self) -> int | None:
        """Read up to the end of what the server sends."""
        while piece := self.socket.recv(4096):
            self.protocol.receive_data(piece)
        return None if self.protocol.close_rcvd is None else int(self.protocol.close_rcvd.code)


@contextmanager
def raw_socket(server: Loopback) -> Iterator[RawSocket]:
    made = RawSocket(server)
    with made.socket:
        yield made


def test_large_messages(server: Loopback, service: FakeService) -> None:
    with raw_socket(server) as raw:
        raw.protocol.send_text(b"x" * 2 * MAX_MESSAGE_BYTES)
        raw.flush()
        assert raw.close_code() == 1009
    with connected(server) as socket:
        with suppress(ConnectionClosed):
            socket.send(CREATE | {"padding": "x" * MAX_MESSAGE_BYTES})
        assert socket.close_code() == 1009
    assert not service.requests


def test_a_refused_message_is_read_to_bounds_of_bytes_and_time() -> None:
    limits = ServerLimits(discarded_bytes=1 << 20, discard_timeout_s=PATIENCE_S * 2)
    with on_loopback(app_of(FakeService(), KEY), limits=limits) as server, raw_socket(server) as raw:
        raw.protocol.send_text(b"x" * 4 * MAX_MESSAGE_BYTES)
        with pytest.raises(OSError, match=r"reset|[Bb]roken pipe"):
            raw.flush()
        with raw_socket(server) as other:
            other.protocol.send_text(b"\xff")
            other.flush()
            assert other.close_code() == 1007  # the server's side has ended, though it still reads
    limits = ServerLimits(n_websockets=1, discard_timeout_s=0.01)
    with on_loopback(app_of(FakeService(), KEY), limits=limits) as server, raw_socket(server) as raw:
        raw.protocol.send_text(b"\xff")
        raw.flush()
        assert raw.close_code() == 1007
        wait_for(lambda: can_connect(server))  # though this client has not closed


def test_messages_of_very_many_fragments(server: Loopback, service: FakeService) -> None:
    with connected(server) as socket:
        socket.connection.send([json.dumps(CREATE), *[""] * 100])
        assert socket.events()[-1]["type"] == "response.completed"
        with suppress(ConnectionClosed):
            socket.connection.send([""] * (MAX_FRAGMENTS + 2))
        assert socket.close_code() == 1009
    assert len(service.requests) == 1


def test_messages_that_are_not_complete_count_as_bodies(server: Loopback, service: FakeService) -> None:
    fragment = json.dumps(CREATE)[:-1].encode()
    release, taken = threading.Event(), UnstoredResponse()

    def fragments() -> Iterator[str]:
        """A message whose end waits for `release`."""
        yield fragment.decode()
        release.wait(PATIENCE_S)
        yield "}"

    def send() -> None:
        with suppress(ConnectionClosed):
            socket.connection.send(fragments())

    with connected(server) as socket:
        senders = [threading.Thread(target=send) for _ in range(2)]
        senders[0].start()
        wait_for(lambda: held_bodies.n_bytes == len(fragment))
        release.set()
        assert socket.events()[-1]["type"] == "response.completed"
        release.clear()
        wait_for(lambda: held_bodies.n_bytes == 0)
        held_bodies.add(taken, held_bodies.most)
        senders[1].start()
        assert socket.close_code() == CloseCode.TRY_AGAIN_LATER
        held_bodies.release(taken)
        release.set()
        for sender in senders:
            sender.join()
    assert len(service.requests) == 1


# --- connections ------------------------------------------------------------------------------------------------------


def test_messages_that_wait_are_bounded_and_answered_in_turn() -> None:
    release = threading.Event()
    service = FakeService(held(release))
    with on_loopback(app_of(service, KEY)) as server, connected(server) as socket:
        socket.send(CREATE)
        assert socket.next()["type"] == "response.created"
        for number in range(MAX_WAITING):
            socket.send(CREATE | {"input": str(number)})
        socket.send(CREATE)
        while (event := socket.next())["type"] != "error":
            assert len(service.requests) == 1
        assert (event["status"], "waiting" in event["error"]["message"]) == (429, True)
        assert held_bodies.n_bytes > MAX_WAITING * len(json.dumps(CREATE))
        release.set()
        finished = [socket.events()[-1]["type"] for _ in range(MAX_WAITING + 1)]
        assert finished == ["response.completed"] * (MAX_WAITING + 1)
        texts = [request.messages[-1].content for request in service.requests if request.messages]
        assert texts == ["Hi", *map(str, range(MAX_WAITING))]
    assert held_bodies.n_bytes == 0


def test_large_messages_that_wait_are_bounded_together() -> None:
    release = threading.Event()
    with on_loopback(app_of(FakeService(held(release)), KEY)) as server, connected(server) as socket:
        socket.send(CREATE)
        assert socket.next()["type"] == "response.created"
        large = CREATE | {"padding": "x" * (MAX_MESSAGE_BYTES - 1000)}
        socket.send(large)
        socket.send(large)
        while (event := socket.next())["type"] != "error":
            pass
        assert (event["status"], "of 4 MiB in all" in event["error"]["message"]) == (429, True)
        release.set()
        assert [socket.events()[-1]["type"] for _ in range(2)] == ["response.completed"] * 2


def test_a_client_that_leaves_stops_generation() -> None:
    service = FakeService(slowly(10_000))
    with on_loopback(app_of(service, KEY)) as server:
        with connected(server) as socket:
            socket.send(CREATE)
            assert socket.next()["type"] == "response.created"
            wait_for(lambda: service.open == 1)
        wait_for(lambda: service.open == 0)


def test_a_drain_finishes_what_has_begun() -> None:
    release = threading.Event()
    service = FakeService(held(release))
    with (
        on_loopback(app_of(service, KEY), drain_s=PATIENCE_S) as server,
        connected(server) as idle,
        connected(server) as busy,
    ):
        busy.send(CREATE)
        assert busy.next()["type"] == "response.created"
        server.stop()
        assert idle.close_code() == 1012
        release.set()
        assert busy.events()[-1]["type"] == "response.completed"
        assert busy.close_code() == 1012
        server.join()


def test_a_drain_has_a_limit(caplog: pytest.LogCaptureFixture) -> None:
    service = FakeService(slowly(100_000))
    with on_loopback(app_of(service, KEY), drain_s=0.2) as server, connected(server) as socket:
        socket.send(CREATE)
        assert socket.next()["type"] == "response.created"
        server.stop()
        last = socket.events()[-1]
        assert (last["type"], last["response"]["error"]["message"]) == ("response.failed", "the server is stopping")
        assert socket.close_code() == 1012
        wait_for(lambda: service.open == 0)
        server.join()
    assert not [record for record in caplog.records if record.exc_info]


def test_old_and_idle_connections_are_closed() -> None:
    limits = RequestLimits(websocket_age_s=0.2)
    with on_loopback(app_of(FakeService(), KEY, limits=limits)) as server, connected(server) as socket:
        assert socket.next()["error"]["code"] == "websocket_connection_limit_reached"
        assert socket.close_code() == 1000
    limits = RequestLimits(websocket_idle_s=0.2)
    with on_loopback(app_of(FakeService(), KEY, limits=limits)) as server, connected(server) as socket:
        assert socket.close_code() == 1001


def test_too_many_connections() -> None:
    limits = ServerLimits(n_websockets=1)
    with on_loopback(app_of(FakeService(), KEY), limits=limits) as server:
        with connected(server) as first:
            with pytest.raises(InvalidStatus) as refused, connected(server):
                pass
            assert refused.value.response.status_code == 503
            assert first.ask(CREATE)["status"] == "completed"
        wait_for(lambda: can_connect(server))


def can_connect(server: Loopback) -> bool:
    try:
        with connected(server):
            return True
    except InvalidStatus:
        return False


# --- large requests and memory ----------------------------------------------------------------------------------------


def test_large_messages_are_served_elsewhere(tmp_path: Path) -> None:
    warnings: list[bytes | None] = []

    async def elsewhere(scope: Scope, receive: Receive, send: Send) -> None:
        async def sent(message: HttpMessage) -> None:
            warnings.append(dict(message.get("headers", ())).get(b"x-emberline-warning"))
            await send(message)

        await app(scope, receive, sent)

    small, large = FakeService(), FakeService(saying(TextDelta(0, "x" * LARGE_BYTES)))
    app = app_of(large, KEY)
    relay = LargeRequestRelay(tmp_path / "large.sock")
    with (
        on_loopback(elsewhere, path=tmp_path / "large.sock"),
        on_loopback(app_of(small, KEY, large_requests=relay)) as server,
        connected(server) as socket,
    ):
        first = socket.ask(UNSTORED | {"padding": "x" * LARGE_BYTES})
        assert len(first["output"][0]["content"][0]["text"]) == LARGE_BYTES
        assert (len(small.requests), len(large.requests)) == (0, 1)
        assert warnings[0] == b"ignored unknown fields: `padding`"  # and not `type`
        # That process does not know the connection: the client sends all of it again.
        assert socket.error(UNSTORED | {"previous_response_id": first["id"]})["error"]["code"] == NOT_FOUND
        assert socket.ask(UNSTORED)["status"] == "completed"


def test_memory_of_unstored_responses_is_bounded() -> None:
    held_before = held_bodies.n_bytes
    record = StoredResponse(id="resp_a", account="acme", created_us=0, input="x" * 100, body="{}")
    kept = UnstoredResponse(max_bytes=record.n_bytes)
    kept.keep(record)
    assert kept.find("acme", "resp_a") is record
    assert kept.find("other", "resp_a") is None
    assert held_bodies.n_bytes == held_before + record.n_bytes
    kept.keep(StoredResponse(id="resp_b", account="acme", created_us=0, input="x" * 101, body="{}"))
    assert kept.find("acme", "resp_a") is kept.find("acme", "resp_b") is None
    assert held_bodies.n_bytes == held_before
    held_bodies.add(kept, held_bodies.most - held_before)
    full = UnstoredResponse()
    full.keep(record)
    assert full.find("acme", "resp_a") is None
    kept.forget()
    assert held_bodies.n_bytes == held_before
