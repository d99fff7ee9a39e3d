"""Signatures of deliveries after Standard Webhooks 1.0, so that a receiver can tell that one came from here.

An endpoint's secret is derived from the root secret, its id and its version: none is kept anywhere.
"""

import hmac
import secrets
from base64 import b64encode
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from emberline.accounts.secret import Secret
from emberline.jobs.webhooks.egress_policy import EgressPolicy, parse_target
from emberline.jobs.webhooks.events import TYPES
from emberline.protocol.errors import BadInput, NotFound
from emberline.store import Database, Step, Value

PREFIX = "whsec_"
_KEY_BYTES = 32


def signing_key(secret: Secret, endpoint_id: str, version: int) -> bytes:
    return secret.derive("webhook-signing", endpoint_id, str(version), size=_KEY_BYTES)


def shown(key: bytes) -> str:
    """The key as its owner configures it at the receiver."""
    return PREFIX + b64encode(key).decode()


def signed_headers(keys: Sequence[bytes], message_id: str, timestamp_s: int, body: bytes) -> dict[str, str]:
    """The headers of one attempt. Several keys: while a secret is being rotated, each of them signs."""
    content = b"%s.%d.%s" % (message_id.encode(), timestamp_s, body)
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp_s),
        "webhook-signature": " ".join(f"v1,{_signature(key, content)}" for key in keys),
    }


def _signature(key: bytes, content: bytes) -> str:
    return b64encode(hmac.digest(key, content, "sha256")).decode()


MAX_ENDPOINTS = 100  # of an account: each event costs a delivery for each
MAX_NAME_CHARS = 200
OVERLAP_S = 24 * 3600  # how long the secret before a rotation still signs
ANY = "*"

EndpointForm = Literal["standard", "workers_ai"]
ENDPOINT_COLUMNS = (
    "id, account, form, name, url, model, types, enabled, disabled_reason, secret_version, previous_until_us, "
    "failing_since_us, created_us, modified_us"
)


class NoSuchEndpoint(NotFound):
    kind = "webhook_not_found"

    def __init__(self, endpoint_id: str) -> None:
        super().__init__(f"there is no webhook endpoint {endpoint_id[:80]!r}", param="id")


class WebhookEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    account: str
    form: EndpointForm
    name: str
    url: str
    model: str  # "": every model's
    types: str  # ",one,two,", or "*": all there are and will be
    enabled: int
    disabled_reason: str  # why we disabled it; "" where its owner did, or it is enabled
    secret_version: int
    previous_until_us: int  # the version before still signs until then
    failing_since_us: int | None  # the first failure after the last success
    created_us: int
    modified_us: int

    @property
    def type_list(self) -> list[str]:
        return [ANY] if self.types == ANY else self.types.strip(",").split(",")

    def keys(self, secret: Secret, now_us: int) -> list[bytes]:
        """What to sign with, newest first."""
        versions = [self.secret_version]
        if now_us < self.previous_until_us:
            versions.append(self.secret_version - 1)
        return [signing_key(secret, self.id, version) for version in versions]


class EndpointUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """What an owner changes; None leaves it."""

    name: str | None = None
    url: str | None = None
    model: str | None = None
    types: Sequence[str] | None = None
    enabled: bool | None = None


class WebhookEndpoints:
    """An account's endpoints, for their owner. Nothing here finds another account's."""

    def __init__(self, db: Database, secret: Secret, reach: EgressPolicy) -> None:
        self._db = db
        self._secret = secret
        self._reach = reach

    async def create(self, account: str, form: EndpointForm, changes: EndpointUpdate) -> WebhookEndpoint:
        """A new one, whose URL may be reached now; that is checked again at every attempt."""
        if changes.url is None:
            raise BadInput("the endpoint needs a URL", param="url")
        await self._check_url(changes.url)
        now_us = self._db.now_us()
        endpoint = WebhookEndpoint(
            id=f"we_{secrets.token_hex(12)}",
            account=account,
            form=form,
            name=_checked_name(changes.name or ""),
            url=changes.url,
            model=changes.model or "",
            types=joined(changes.types if changes.types is not None else [ANY]),
            enabled=int(changes.enabled is not False),
            disabled_reason="",
            secret_version=1,
            previous_until_us=0,
            failing_since_us=None,
            created_us=now_us,
            modified_us=now_us,
        )
        values = tuple(getattr(endpoint, name) for name in ENDPOINT_COLUMNS.split(", "))
        marks = ", ".join("?" for _ in values)
        insert = (
            f"INSERT INTO webhook_endpoints ({ENDPOINT_COLUMNS}) SELECT {marks} "
            "WHERE (SELECT COUNT(*) FROM webhook_endpoints WHERE account = ?) < ? RETURNING id"
        )
        if not await self._db.write(insert, (*values, account, MAX_ENDPOINTS)):
            raise BadInput(f"an account has at most {MAX_ENDPOINTS} webhook endpoints: delete one first")
        return endpoint

    async def get(self, account: str, endpoint_id: str, form: EndpointForm | None = None) -> WebhookEndpoint:
        query = f"SELECT {ENDPOINT_COLUMNS} FROM webhook_endpoints WHERE id = ? AND account = ?"
        rows = await self._db.read(query, (endpoint_id, account))
        if not rows or (form is not None and rows[0][2] != form):
            raise NoSuchEndpoint(endpoint_id)
        return endpoint_from_row(rows[0])

    async def of_account(self, account: str, form: EndpointForm | None = None) -> list[WebhookEndpoint]:
        """All there are (at most MAX_ENDPOINTS), the oldest first."""
        query = f"SELECT {ENDPOINT_COLUMNS} FROM webhook_endpoints WHERE account = ? ORDER BY created_us, id"
        endpoints = [endpoint_from_row(row) for row in await self._db.read(query, (account,))]
        return [endpoint for endpoint in endpoints if form is None or endpoint.form == form]

    async def update(
        self, account: str, endpoint_id: str, changes: EndpointUpdate, form: EndpointForm | None = None
    ) -> WebhookEndpoint:
        """Change what is given. Enabling forgets past failures; disabling ends what waits, to be replayed later."""
        await self.get(account, endpoint_id, form)
        if changes.url is not None:
            await self._check_url(changes.url)
        now_us = self._db.now_us()
        fields: dict[str, Value] = {"modified_us": now_us}
        if changes.name is not None:
            fields["name"] = _checked_name(changes.name)
        if changes.url is not None:
            fields["url"] = changes.url
        if changes.model is not None:
            fields["model"] = changes.model
        if changes.types is not None:
            fields["types"] = joined(changes.types)
        if changes.enabled is not None:
            fields |= {"enabled": int(changes.enabled), "disabled_reason": "", "failing_since_us": None}
        names = ", ".join(f"{name} = ?" for name in fields)
        statement = f"UPDATE webhook_endpoints SET {names} WHERE id = ? AND account = ?"
        steps = [Step(statement, (*fields.values(), endpoint_id, account))]
        if changes.enabled is False:
            steps.append(give_up_pending(endpoint_id, now_us))
        await self._db.transaction(steps)
        return await self.get(account, endpoint_id)

    async def delete(self, account: str, endpoint_id: str, form: EndpointForm | None = None) -> None:
        """The endpoint, and its deliveries with it."""
        await self.get(account, endpoint_id, form)
        of_it = "SELECT id FROM deliveries WHERE endpoint_id = ?"
        await self._db.transaction(
            [
                Step("DELETE FROM webhook_endpoints WHERE id = ? AND account = ?", (endpoint_id, account)),
                Step(f"DELETE FROM delivery_attempts WHERE delivery_id IN ({of_it})", (endpoint_id,)),
                Step("DELETE FROM deliveries WHERE endpoint_id = ?", (endpoint_id,)),
            ]
        )

    async def rotate(self, account: str, endpoint_id: str, overlap_s: int = OVERLAP_S) -> WebhookEndpoint:
        """A new secret; for `overlap_s` the one before signs beside it."""
        now_us = self._db.now_us()
        statement = (
            "UPDATE webhook_endpoints SET secret_version = secret_version + 1, previous_until_us = ?, modified_us = ? "
            "WHERE id = ? AND account = ? RETURNING id"
        )
        until_us = now_us + overlap_s * 1_000_000
        if not await self._db.write(statement, (until_us, now_us, endpoint_id, account)):
            raise NoSuchEndpoint(endpoint_id)
        return await self.get(account, endpoint_id)

    def secret_of(self, endpoint: WebhookEndpoint) -> str:
        return shown(signing_key(self._secret, endpoint.id, endpoint.secret_version))

    async def _check_url(self, url: str) -> None:
        await self._reach.addresses(parse_target(url))


def give_up_pending(endpoint_id: str, now_us: int) -> Step:
    """Nothing waits for an endpoint that is disabled; its owner replays what is still wanted."""
    return Step(
        "UPDATE deliveries SET state = 'failed', finished_us = ? WHERE endpoint_id = ? AND state = 'pending' "
        "AND EXISTS (SELECT 1 FROM webhook_endpoints WHERE id = ? AND enabled = 0)",
        (now_us, endpoint_id, endpoint_id),
    )


def joined(types: Iterable[str]) -> str:
    wanted = list(dict.fromkeys(types))
    if ANY in wanted:
        return ANY
    for name in wanted:
        if name not in TYPES:
            raise BadInput(f"there is no event {name[:80]!r}; there are {', '.join(TYPES)} and {ANY}", param="events")
    if not wanted:
        raise BadInput(f"name at least one event, or {ANY} for all", param="events")
    return f",{','.join(wanted)},"


def endpoint_from_row(row: Sequence[Value]) -> WebhookEndpoint:
    return msgspec.convert(dict(zip(ENDPOINT_COLUMNS.split(", "), row, strict=True)), WebhookEndpoint)


def _checked_name(name: str) -> str:
    if len(name) > MAX_NAME_CHARS or not name.isprintable():
        raise BadInput(f"a name is at most {MAX_NAME_CHARS} printable characters", param="name")
    return name
