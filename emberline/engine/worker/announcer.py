"""A worker announces itself to the cores of its cluster: when it has started, every few seconds, and when it ends.

A thread of its own asks any of the given addresses. Cores that are away are tried again and again, and meanwhile the
worker serves those that are connected. What a core says only counts if it proves that it has this worker's join key;
an error has no proof, so one ends the worker only before it has joined.
"""

import argparse
import http.client
import json
import logging
import os
import random
import secrets
import signal
import socket
import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from emberline import __version__
from emberline.kv.transfer.manager import TransferManager
from emberline.protocol import member as members
from emberline.protocol.credential import Credential, client_context, server_context
from emberline.protocol.errors import BadInput, Unauthorized
from emberline.protocol.frames import VERSION, EngineInfo
from emberline.protocol.member import Announcement, Challenge, Signed, Standing

TIMEOUT_S = 10.0  # of one call
LEAVE_TIMEOUT_S = 2.0
FIRST_RETRY_S, LAST_RETRY_S = 0.1, 5.0
MAX_REPLY_BYTES = 64 << 10
_WILDCARDS = ("0.0.0.0", "::", "[::]", "")
T = TypeVar("T")

_log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--join", action="append", default=[], metavar="URL", help="of any core of the cluster; repeatable")
    add("--credential", type=Path, metavar="FILE", help="of this worker, as `emberline cluster credential` makes it")
    add("--advertise", default="", metavar="HOST", help="where cores reach it; default: the address of --socket")
    add("--region", default="", metavar="NAME", help="of this machine; requests stay in their region while it has room")
    add("--account", default="", metavar="ACCOUNT", help="that alone may use it (a dedicated instance)")


class Refused(Exception):
    """Says why a core does not want this worker."""


class CoreUnreachable(Exception):
    pass


class Joining:
    """Credential and identity of a worker that joins a cluster, before it can announce itself."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Check the flags. Raises BadInput that says what is wrong with them or with the credential."""
        self._args = args
        self.credential = Credential.open(args.credential)
        self.instance = secrets.token_hex(16)
        self.release, self.version = __version__, VERSION
        self.token = members.connection_token(self.credential.key, self.instance)
        for url in args.join:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise BadInput(f"--join {url}: give the URL of a core, such as http://10.0.0.1:8686")
        if args.id and args.id != self.credential.name:
            raise BadInput(
                f"this worker is called {args.id}, and its credential is of {self.credential.name}: drop --id, or make "
                f"a credential with `emberline cluster credential {args.id}`"
            )
        if not args.socket.startswith("tcp:"):
            raise BadInput("a worker that joins a cluster needs --socket tcp:HOST:PORT, which every core can reach")

    def secure(self, transfers: TransferManager | None) -> ssl.SSLContext | None:
        """Return the TLS context for the engine's clients, and send KV over TLS, too. Returns None if the credential
        has no certificate."""
        if not self.credential.pem:
            return None
        if transfers is not None:
            transfers.tls = client_context(self.credential.pem)
        return server_context(self.credential.pem)

    def announcer(self, info: EngineInfo, address: str) -> "Announcer":
        """Announcer of the engine that listens at `address`."""
        args, credential = self._args, self.credential
        said = Announcement(
            challenge="",
            name=credential.name,
            instance=self.instance,
            address=_advertised(address, args.advertise, args.join[0]),
            role=info.role,
            model=info.model,
            fingerprint=info.fingerprint,
            version=self.version,
            region=args.region,
            account=args.account,
            node=socket.gethostname()[:256],
            device=info.device,
            is_tls=bool(credential.pem),
            release=self.release,
        )
        return Announcer(args.join, credential, said)


def open_joining(args: argparse.Namespace) -> Joining | None:
    """Open the credential of a worker that joins a cluster. Returns None if no flag asks for that."""
    if args.join:
        return Joining(args)
    for name in ("credential", "advertise", "region", "account"):
        if getattr(args, name):
            raise BadInput(f"--{name} is for a worker that joins a cluster: give --join URL, too")
    return None


class Announcer:
    def __init__(self, urls: list[str], credential: Credential, said: Announcement) -> None:
        self.problem = ""  # why the cluster does not want this worker, which then ends
        self.is_superseded = False  # it ends because there is a newer one, and is not to be started again
        self._urls = list(urls)
        self._credential = credential
        self._said = said
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="announcer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread of an engine that is started again, and stays a member meanwhile."""
        self._stopping.set()
        self._thread.join(LEAVE_TIMEOUT_S)

    def leave(self) -> None:
        """Tell the cores that the engine has ended, if one of them can be reached immediately."""
        self.stop()
        if not self._said.epoch or self.problem:
            return
        try:
            self.announce(leaving=True, timeout_s=LEAVE_TIMEOUT_S)
        except (CoreUnreachable, Refused, Unauthorized) as error:
            _log.warning("the cluster could not be told that this worker ends: %s", error)

    def announce(self, leaving: bool = False, timeout_s: float = TIMEOUT_S) -> Standing:
        """Announce the worker to the first core that answers. Raises Refused, CoreUnreachable, or Unauthorized if the
        answer is not of a core of this cluster."""
        failures = []
        for url in list(self._urls):
            try:
                return self._announce_at(url, leaving, timeout_s)
            except CoreUnreachable as error:
                failures.append(str(error))
                self._urls.append(self._urls.pop(0))  # the next time, begin with another
        raise CoreUnreachable("; ".join(failures))

    def _announce_at(self, url: str, leaving: bool, timeout_s: float) -> Standing:
        credential = self._credential
        challenge = _decode(_call(url, "/api/cluster/challenge", None, timeout_s), Challenge, url)
        if challenge.cluster != credential.cluster:
            raise Refused(
                f"{url} belongs to cluster {challenge.cluster}, and this worker's credential to {credential.cluster}: "
                "check --join, or make a credential on that core's machine"
            )
        said = msgspec.structs.replace(self._said, challenge=challenge.challenge, leaving=leaving)
        signed = members.sign(credential.key, said)
        reply = _call(url, "/api/cluster/announce", msgspec.json.encode(signed), timeout_s)
        answer = _decode(reply, Signed, url)
        standing = members.verified(credential.key, answer, Standing, f"{url} does not know this worker's join key")
        if standing.challenge != said.challenge:
            raise Unauthorized(f"{url} answered another announcement")
        return standing

    # --- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        retry_s = FIRST_RETRY_S
        while not self._stopping.is_set():
            try:
                standing = self.announce()
            except (CoreUnreachable, Refused, Unauthorized) as error:
                if isinstance(error, Refused) and not self._said.epoch:
                    return self._end(str(error))
                _log.warning("this worker could not announce itself: %s", error)
                self._stopping.wait(retry_s * random.uniform(0.5, 1.0))
                retry_s = min(LAST_RETRY_S, 2 * retry_s)
                continue
            except Exception:
                _log.exception("the announcement failed")
                self._stopping.wait(LAST_RETRY_S)
                continue
            retry_s = FIRST_RETRY_S
            if not standing.is_current:
                name, self.is_superseded = self._said.name, True
                return self._end(f"a newer worker called {name} has joined (epoch {standing.epoch}): this one ends")
            self._has_joined(standing)
            self._stopping.wait(standing.renew_s * random.uniform(0.8, 1.0))

    def _has_joined(self, standing: Standing) -> None:
        if standing.epoch != self._said.epoch:
            facts = {"epoch": standing.epoch, "address": self._said.address, "cluster": self._credential.cluster}
            _log.info("joined as %s", self._said.name, extra=facts)
            if standing.hold_s > 0:
                _log.warning("it has joined often in a short time: it is used in %.0f s", standing.hold_s)
        self._said = msgspec.structs.replace(self._said, epoch=standing.epoch)

    def _end(self, why: str) -> None:
        """Drain the engine by a signal, which wakes its thread."""
        _log.error("%s", why)
        self.problem = why
        os.kill(os.getpid(), signal.SIGTERM)


def _advertised(address: str, advertise: str, core_url: str) -> str:
    """The address by which cores reach the engine: the given one, or the one where the engine listens. For a wildcard
    it is the address of this machine on the way to the core."""
    host, _, port = address.removeprefix("tcp:").rpartition(":")
    if advertise:
        given, _, given_port = advertise.rpartition(":")
        if given and given_port.isdigit() and not advertise.endswith("]"):
            return f"tcp:{given}:{given_port}"
        host = advertise
    elif host in _WILDCARDS:
        parts = urlsplit(core_url)
        try:
            family, _, _, _, to = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(to)  # sends nothing
                host = probe.getsockname()[0]
        except OSError as error:
            raise BadInput(f"no address to tell the cluster ({error}): give --advertise HOST") from None
    return f"tcp:[{host}]:{port}" if ":" in host and not host.startswith("[") else f"tcp:{host}:{port}"


def _call(url: str, path: str, body: bytes | None, timeout_s: float) -> bytes:
    parts = urlsplit(url)
    make: Callable[..., http.client.HTTPConnection]
    more: dict[str, Any] = {}
    if parts.scheme == "https":
        make, more = http.client.HTTPSConnection, {"context": ssl.create_default_context()}
    else:
        make = http.client.HTTPConnection
    connection = make(parts.hostname or "", parts.port, timeout=timeout_s, **more)
    try:
        headers = {"content-type": "application/json"}
        connection.request("POST", f"{parts.path.rstrip('/')}{path}", body or b"{}", headers)
        reply = connection.getresponse()
        text = reply.read(MAX_REPLY_BYTES)
    except (OSError, http.client.HTTPException) as error:
        raise CoreUnreachable(f"no answer from {url}: {error}") from None
    finally:
        connection.close()
    if reply.status == 200:
        return text
    message = f"{url}: {_error_message(text) or f'HTTP status {reply.status}'}"
    if 400 <= reply.status < 500 and reply.status not in (408, 429):
        raise Refused(message)
    raise CoreUnreachable(message)


def _error_message(text: bytes) -> str:
    try:
        error = json.loads(text)["error"]
        return str(error["message"])
    except (ValueError, KeyError, TypeError):
        return ""


def _decode(text: bytes, kind: type[T], url: str) -> T:
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.MsgspecError:
        raise CoreUnreachable(f"{url} is no core of a cluster: its answer cannot be read") from None
