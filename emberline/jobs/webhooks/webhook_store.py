"""Webhook endpoints: the subscriptions of an account, and the signatures of what is delivered to them.

A Workers AI event subscription is an endpoint of another form. Deliveries are signed after Standard Webhooks 1.0. An
endpoint's signing secret is derived from the root secret, its id and its version; it is stored nowhere.
"""

import hmac
import secrets
from base64 import b64encode
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from emberline.accounts.secret import Secret
from emberline.jobs.webhooks.events import TYPES
from emberline.net.egress_policy import EgressPolicy, parse_target
from emberline.protocol.errors import BadInput, NotFound
from emberline.store import Database, Query, Value
from emberline.store.database import decode_row

MAX_ENDPOINTS = 100  # per account: each event costs a delivery for each
MAX_NAME_CHARS = 200
OVERLAP_S = 24 * 3600  # how long the secret before a rotation still signs
ANY = "*"
_SECRET_PREFIX = "whsec_"
_KEY_BYTES = 32

EndpointForm = Literal["standard", "workers_ai"]


def signing_key(secret: Secret, endpoint_id: str, version: int) -> bytes:
    return secret.derive("webhook-signing", endpoint_id, str(version), size=_KEY_BYTES)


def encode_secret(key: bytes) -> str:
    return _SECRET_PREFIX + b64encode(key).decode()


def signature_headers(keys: Sequence[bytes], message_id: str, timestamp_s: int, body: bytes) -> dict[str, str]:
    """The headers of one attempt. During a rotation there are several keys, and each of them signs."""
    content = b"%s.%d.%s" % (message_id.encode(), timestamp_s, body)
    digests = [hmac.digest(key, content, "sha256") for key in keys]
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp_s),
        "webhook-signature": " ".join(f"v1,{b64encode(digest).decode()}" for digest in digests),
    }


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
    model: str  # "": events of every model
    types: str  # ",one,two,", or "*" for all
    enabled: int
    disabled_reason: str  # why it was disabled automatically; "" where its owner did it, or it is enabled
    secret_version: int
    previous_until_us: int  # the previous version still signs until then
    failing_since_us: int | None  # the first failure after the last success
    created_us: int
    modified_us: int

    @property
    def type_list(self) -> list[str]:
        return [ANY] if self.types == ANY else self.types.strip(",").split(",")

    def keys(self, secret: Secret, now_us: int) -> list[bytes]:
        """The signing keys, newest first."""
        versions = [self.secret_version]
        if now_us < self.previous_until_us:
            versions.append(self.secret_version - 1)
        return [signing_key(secret, self.id, version) for version in versions]


ENDPOINT_COLUMNS = ", ".join(WebhookEndpoint.__struct_fields__)
_PLACEHOLDERS = ", ".join("?" * len(WebhookEndpoint.__struct_fields__))
_INSERT = (
    f"INSERT INTO webhook_endpoints ({ENDPOINT_COLUMNS}) SELECT {_PLACEHOLDERS} "
    "WHERE (SELECT COUNT(*) FROM webhook_endpoints WHERE account = ?) < ? RETURNING id"
)
_SELECT = f"SELECT {ENDPOINT_COLUMNS} FROM webhook_endpoints WHERE account = ?"
_ROTATE = (
    "UPDATE webhook_endpoints SET secret_version = secret_version + 1, previous_until_us = ?, modified_us = ? "
    "WHERE id = ? AND account = ? RETURNING id"
)


class EndpointUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """The fields to change; None leaves a field as it is."""

    name: str | None = None
    url: str | None = None
    model: str | None = None
    types: Sequence[str] | None = None
    enabled: bool | None = None


class WebhookEndpoints:
    """The endpoints of one account at a time; another account's are not found."""

    def __init__(self, db: Database, secret: Secret, egress: EgressPolicy) -> None:
        self._db = db
        self._secret = secret
        self._egress = egress

    async def create(self, account: str, form: EndpointForm, fields: EndpointUpdate) -> WebhookEndpoint:
        """The egress policy must allow the URL now; it is checked again at every attempt."""
        if fields.url is None:
            raise BadInput("the endpoint needs a URL", param="url")
        await self._check_url(fields.url)
        now_us = self._db.now_us()
        endpoint = WebhookEndpoint(
            id=f"we_{secrets.token_hex(12)}",
            account=account,
            form=form,
            name=_checked_name(fields.name or ""),
            url=fields.url,
            model=fields.model or "",
            types=_joined_types(fields.types if fields.types is not None else [ANY]),
            enabled=int(fields.enabled is not False),
            disabled_reason="",
            secret_version=1,
            previous_until_us=0,
            failing_since_us=None,
            created_us=now_us,
            modified_us=now_us,
        )
        if not await self._db.write(_INSERT, (*msgspec.structs.astuple(endpoint), account, MAX_ENDPOINTS)):
            raise BadInput(f"an account has at most {MAX_ENDPOINTS} webhook endpoints: delete one first")
        return endpoint

    async def get(self, account: str, endpoint_id: str, form: EndpointForm | None = None) -> WebhookEndpoint:
        rows = await self._db.read(f"{_SELECT} AND id = ?", (account, endpoint_id))
        if not rows or (form is not None and rows[0][2] != form):
            raise NoSuchEndpoint(endpoint_id)
        return decode_row(WebhookEndpoint, ENDPOINT_COLUMNS, rows[0])

    async def of_account(self, account: str, form: EndpointForm | None = None) -> list[WebhookEndpoint]:
        """All endpoints (at most MAX_ENDPOINTS), oldest first."""
        rows = await self._db.read(f"{_SELECT} ORDER BY created_us, id", (account,))
        endpoints = [decode_row(WebhookEndpoint, ENDPOINT_COLUMNS, row) for row in rows]
        return [endpoint for endpoint in endpoints if form is None or endpoint.form == form]

    async def update(
        self, account: str, endpoint_id: str, update: EndpointUpdate, form: EndpointForm | None = None
    ) -> WebhookEndpoint:
        """Enabling resets the failure state; disabling fails what is pending, which can be replayed later."""
        await self.get(account, endpoint_id, form)
        if update.url is not None:
            await self._check_url(update.url)
        now_us = self._db.now_us()
        given = {
            "name": None if update.name is None else _checked_name(update.name),
            "url": update.url,
            "model": update.model,
            "types": None if update.types is None else _joined_types(update.types),
        }
        fields: dict[str, Value] = {"modified_us": now_us}
        fields |= {name: value for name, value in given.items() if value is not None}
        if update.enabled is not None:
            fields |= {"enabled": int(update.enabled), "disabled_reason": "", "failing_since_us": None}
        assignments = ", ".join(f"{name} = ?" for name in fields)
        statement = f"UPDATE webhook_endpoints SET {assignments} WHERE id = ? AND account = ?"
        queries = [Query(statement, (*fields.values(), endpoint_id, account))]
        if update.enabled is False:
            queries.append(fail_pending(endpoint_id, now_us))
        await self._db.transaction(queries)
        return await self.get(account, endpoint_id)

    async def delete(self, account: str, endpoint_id: str, form: EndpointForm | None = None) -> None:
        """Delete the endpoint and its deliveries."""
        await self.get(account, endpoint_id, form)
        deliveries = "SELECT id FROM deliveries WHERE endpoint_id = ?"
        await self._db.transaction(
            [
                Query("DELETE FROM webhook_endpoints WHERE id = ? AND account = ?", (endpoint_id, account)),
                Query(f"DELETE FROM delivery_attempts WHERE delivery_id IN ({deliveries})", (endpoint_id,)),
                Query("DELETE FROM deliveries WHERE endpoint_id = ?", (endpoint_id,)),
            ]
        )

    async def rotate(self, account: str, endpoint_id: str, overlap_s: int = OVERLAP_S) -> WebhookEndpoint:
        """Issue a new secret; for `overlap_s` the previous one signs too."""
        now_us = self._db.now_us()
        if not await self._db.write(_ROTATE, (now_us + overlap_s * 1_000_000, now_us, endpoint_id, account)):
            raise NoSuchEndpoint(endpoint_id)
        return await self.get(account, endpoint_id)

    def secret_of(self, endpoint: WebhookEndpoint) -> str:
        """The signing secret as its owner configures it at the receiver."""
        return encode_secret(signing_key(self._secret, endpoint.id, endpoint.secret_version))

    async def _check_url(self, url: str) -> None:
        await self._egress.addresses(parse_target(url))


def fail_pending(endpoint_id: str, now_us: int) -> Query:
    """A disabled endpoint has no pending deliveries; its owner replays what is still wanted."""
    return Query(
        "UPDATE deliveries SET state = 'failed', finished_us = ? WHERE endpoint_id = ? AND state = 'pending' "
        "AND EXISTS (SELECT 1 FROM webhook_endpoints WHERE id = ? AND enabled = 0)",
        (now_us, endpoint_id, endpoint_id),
    )


def _joined_types(types: Iterable[str]) -> str:
    wanted = list(dict.fromkeys(types))
    if ANY in wanted:
        return ANY
    for name in wanted:
        if name not in TYPES:
            raise BadInput(f"there is no event {name[:80]!r}; there are {', '.join(TYPES)} and {ANY}", param="events")
    if not wanted:
        raise BadInput(f"name at least one event, or {ANY} for all", param="events")
    return f",{','.join(wanted)},"


def _checked_name(name: str) -> str:
    if len(name) > MAX_NAME_CHARS or not name.isprintable():
        raise BadInput(f"a name is at most {MAX_NAME_CHARS} printable characters", param="name")
    return name
