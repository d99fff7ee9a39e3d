"""Deliveries over TLS: to the checked address, with a certificate for the host name of the URL."""

import asyncio
import contextlib
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from emberline.net.egress_policy import parse_target
from emberline.net.http_post import PostFailed, PostResponse, post
from tests.jobs.webhooks.receiver import Receiver

NAME = "receiver.example"


class TlsReceiver(Receiver):
    names: list[str | None]
    certificate: Path


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrusted certificate for NAME, with its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
    ]
    about = [
        "-subj",
        f"/CN={NAME}",
        "-addext",
        f"subjectAltName=DNS:{NAME}",
        "-keyout",
        str(path),
        "-out",
        f"{path}.crt",
    ]
    subprocess.run([*command, *about], check=True, capture_output=True)
    path.write_bytes(path.read_bytes() + Path(f"{path}.crt").read_bytes())
    return path


@pytest.fixture
async def receiver(certificate: Path) -> AsyncIterator[TlsReceiver]:
    receiver = TlsReceiver([], 200)
    receiver.names, receiver.certificate = [], certificate
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    context.sni_callback = lambda _socket, name, _context: receiver.names.append(name)
    server = await asyncio.start_server(receiver.serve, "127.0.0.1", 0, ssl=context)
    receiver.port = server.sockets[0].getsockname()[1]
    yield receiver
    server.close()


async def send(receiver: TlsReceiver, host: str, tls: ssl.SSLContext | None = None) -> PostResponse:
    return await post(parse_target(f"https://{host}:{receiver.port}/"), ["127.0.0.1"], {}, b"{}", tls)


async def test_an_untrusted_certificate_is_refused(receiver: TlsReceiver) -> None:
    with pytest.raises(PostFailed, match="certificate is not valid: self"):
        await send(receiver, NAME)
    assert not receiver.got


async def test_the_certificate_is_checked_against_the_host_name(receiver: TlsReceiver) -> None:
    trusting = ssl.create_default_context(cafile=str(receiver.certificate))
    assert await send(receiver, NAME, trusting) == PostResponse(200)
    assert receiver.names == [NAME]
    assert receiver.got[0].headers["host"] == f"{NAME}:{receiver.port}"
    with pytest.raises(PostFailed, match="certificate is not valid: Hostname mismatch"):
        await send(receiver, "other.example", trusting)
    assert len(receiver.got) == 1


async def test_a_receiver_without_tls() -> None:
    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(babble, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(PostFailed, match="cannot connect: TLS failed"):
        await post(parse_target(f"https://{NAME}:{port}/"), ["127.0.0.1"], {}, b"{}")
    server.close()


async def test_the_next_address_is_tried(receiver: TlsReceiver) -> None:
    trusting = ssl.create_default_context(cafile=str(receiver.certificate))
    target = parse_target(f"https://{NAME}:{receiver.port}/")
    assert await post(target, ["127.0.0.2", "127.0.0.1"], {}, b"{}", trusting) == PostResponse(200)


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 204 Done\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n"])
async def test_the_connection_ends_with_the_post(answer: bytes) -> None:
    """Also where the caller gives up, the receiver would keep it, or the body does not come."""
    arrived, left = asyncio.Event(), asyncio.Event()

    async def receive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n{}")
        writer.write(answer)
        arrived.set()
        with contextlib.suppress(ConnectionError):
            await reader.read()
        left.set()
        writer.close()

    server = await asyncio.start_server(receive, "127.0.0.1", 0)
    target = parse_target(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/")
    posting = asyncio.create_task(post(target, ["127.0.0.1"], {}, b"{}", body_s=0.01))
    await arrived.wait()
    if answer:
        assert (await posting).status in (200, 204)
    else:
        posting.cancel()
    await asyncio.wait_for(left.wait(), 60)
    server.close()
