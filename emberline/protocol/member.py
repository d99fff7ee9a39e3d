"""A worker as a member of a cluster: its row, and the messages by which it announces itself to any core.

A worker asks any core for a challenge, and answers with an `Announcement` and a proof: the HMAC of the message's bytes
under its join key, which is derived from the root secret for its name. The core proves its answer with the same key. A
challenge is good for one announcement, and expires by the clock of the database, so the machines' own clocks do not
matter. Proofs are made of the bytes that are sent: a core of the next version can check a message with fields that it
does not know.
"""

import hmac
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from emberline.protocol.errors import BadInput, Unauthorized
from emberline.protocol.frames import WorkerRole

MemberState = Literal[
    "joined",
    "draining",  # an operator or the planner wants it to get nothing new
    "leaving",  # the same, and then it is told to end
    "lost",  # no core reaches it, and it has not announced itself for a while
]
# It is part of a host name, in certificates: no two dots in a row, and none at the end.
MemberName = Annotated[str, Meta(max_length=63, pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*(\.[A-Za-z0-9_-]+)*\Z")]
_Text = Annotated[str, Meta(max_length=256)]


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table `members`. Times are of the database's clock."""

    name: str  # unique in the cluster; also the name of its endpoint
    address: str  # tcp:host:port, at which every core dials it
    role: WorkerRole  # that it has, or is to have
    model: str
    fingerprint: str  # of the weights
    region: str  # empty: none
    account: str  # that alone may use it; empty: all
    node: str  # the machine, by its host name
    device: str
    version: int  # of the protocol
    is_tls: bool
    epoch: int  # of this run of the worker; of two with one name, the higher one counts
    instance: str  # random, of this run
    state: MemberState
    n_joins: int  # in quick succession
    ready_us: int  # it is not used before: it has joined too often in a short time
    joined_us: int
    seen_us: int  # when it was last reached, or announced itself
    first_role: WorkerRole = "both"  # with which this run was started
    release: str = ""  # of Emberline; empty: older than the field


class Announcement(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Message of a worker that it has joined, is still there, or is about to end. The first one of a run has no
    epoch."""

    challenge: _Text
    name: MemberName
    instance: Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
    address: Annotated[str, Meta(pattern=r"^tcp:.{1,255}:[0-9]{1,5}\Z")]
    role: WorkerRole
    model: _Text
    fingerprint: _Text
    version: int
    epoch: Annotated[int, Meta(ge=0)] = 0
    region: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{0,63}\Z")] = ""
    account: _Text = ""
    node: _Text = ""
    device: _Text = ""
    is_tls: bool = False
    leaving: bool = False
    release: _Text = ""  # of Emberline


class Standing(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A core's answer. A worker whose epoch is not its own any more was superseded: it is to end."""

    challenge: str  # that was answered
    epoch: int  # of the worker of that name that counts
    is_current: bool  # it is this one
    renew_s: float = 0.0  # after which it is to announce itself again
    hold_s: float = 0.0  # before it is used: it has joined too often in a short time


class Signed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A message and the proof that its sender has the join key."""

    message: Annotated[str, Meta(max_length=16 << 10)]  # JSON
    proof: Annotated[str, Meta(max_length=128)]


class Challenge(msgspec.Struct, frozen=True):
    """First message of the membership link, to which a worker answers with its proof."""

    challenge: str
    cluster: str  # its id


T = TypeVar("T")


def sign(key: bytes, message: msgspec.Struct) -> Signed:
    text = msgspec.json.encode(message).decode()
    return Signed(text, _proof(key, type(message), text))


def verified(key: bytes, signed: Signed, kind: type[T], refusal: str) -> T:
    """The message. Unauthorized, with the given text: the other side does not have this join key."""
    if not hmac.compare_digest(_proof(key, kind, signed.message).encode(), signed.proof.encode()):
        raise Unauthorized(refusal)
    return read_message(signed, kind)


def read_message(signed: Signed, kind: type[T]) -> T:
    """Not verified: only to learn whose key to verify it with."""
    try:
        return msgspec.json.decode(signed.message, type=kind)
    except msgspec.MsgspecError as error:
        raise BadInput(f"not an announcement of a worker: {error}") from None


def connection_token(key: bytes, instance: str) -> str:
    """With which cores open connections to this run of a worker. The join key itself is never sent, and another run at
    the same address refuses it."""
    return hmac.new(key, b"emberline.connection\0" + instance.encode(), "sha256").hexdigest()


def _proof(key: bytes, kind: type, text: str) -> str:
    return hmac.new(key, f"emberline.{kind.__name__}\0{text}".encode(), "sha256").hexdigest()
