"""One attempt of a request on a provider."""

from typing import Any, cast

import msgspec

from emberline.net.http_client import ConnectionFailed, Exchange
from emberline.protocol.errors import BadInput, EmberlineError, EngineLost
from emberline.protocol.request import GenerateRequest
from emberline.protocol.route_request import Fault
from emberline.protocol.trace_context import TraceContext
from emberline.upstream.dialects.dialect import Dialect, Fields
from emberline.upstream.providers.access import Access
from emberline.upstream.providers.client import ProviderClient
from emberline.upstream.providers.errors import ProviderFailed, ProviderTimeout, raise_status
from emberline.upstream.servers.attempt import MAX_ERROR_BYTES

LIST_TIMEOUT_S = 15.0
MAX_LIST_BYTES = 8 << 20
MAX_LISTED = 1000


class ProviderAttempt:
    """To the transport what `upstream.attempt.Attempt` is. Nothing is sent twice: a provider bills what it computes."""

    prefill = None

    def __init__(
        self,
        path: str,
        request_id: str,
        client: ProviderClient,
        access: Access,
        trace: TraceContext | None = None,
        headers: str = "",
        task: GenerateRequest | None = None,
    ) -> None:
        """`headers` replace those that the provider's API usually gets. `task` is written by the provider's dialect."""
        self._headers = headers
        self._task = task
        self.decode = client
        self._path = path
        self._access = access
        self._ids = f"x-request-id: {request_id}\r\n{'' if trace is None else trace.headers}"
        self._exchange: Exchange | None = None

    async def open(self, fields: Fields) -> Exchange:
        """The provider's reply, its status 200."""
        client, access = self.decode, self._access
        api = access.api or client.api
        task = self._task
        call = api.call(self._path, fields) if task is None else cast(Dialect, api).write(task, fields["model"])
        headers = f"{self._ids}{api.authorization(access.key)}{self._headers or api.headers}"
        pool, timeout_s = access.pool or client.pool, client.provider.timeout_s
        try:
            exchange = await pool.post(call.path, call.body, headers, timeout_s)
            if exchange.status == 200:
                self._exchange = exchange
                return exchange
            try:
                body = await exchange.read(MAX_ERROR_BYTES)
            finally:
                exchange.close()
        except ConnectionFailed as error:
            raise connection_failure(self.decode, error) from error
        except BadInput as error:  # the account's own address may not be reached
            raise BadInput(f"provider {client.provider.name}: {error.message}", param="model") from None
        raise_status(client.provider.name, exchange.status, exchange.headers, body, access.key)

    def failure(self, error: ConnectionFailed) -> EmberlineError:
        """The error of a request whose reply was cut off."""
        return connection_failure(self.decode, error)

    async def cached(self) -> int | None:
        return None

    def fault(self, error: EmberlineError) -> Fault:
        """There is one server: whether to ask again is for the client, or a rule of its gateway, to say."""
        is_to_blame = isinstance(error, EngineLost) and not self._access.is_own_url
        return Fault(False, lost=(self.decode.name,) if is_to_blame else ())

    def close(self) -> None:
        if self._exchange is not None:
            self._exchange.close()


async def list_models(client: ProviderClient, access: Access) -> list[str]:
    """The models that a provider lists: whether it can be reached, and accepts the key."""
    api, pool = access.api or client.api, access.pool or client.pool
    try:
        status, body = await pool.get(
            "/models", LIST_TIMEOUT_S, MAX_LIST_BYTES, api.authorization(access.key) + api.headers
        )
    except ConnectionFailed as error:
        raise connection_failure(client, error) from error
    if status != 200:
        raise_status(client.provider.name, status, {}, body, access.key)
    try:
        answer = msgspec.json.decode(body)
        rows = answer.get("data") or answer.get("models") or []
        names = [row.get("id") or row.get("name") for row in rows]
    except (msgspec.DecodeError, RecursionError, AttributeError, TypeError):
        raise ProviderFailed(client.provider.name, "did not answer with a list of models: check its url") from None
    return [name.removeprefix("models/") for name in names if isinstance(name, str)][:MAX_LISTED]


async def count_tokens(client: ProviderClient, access: Access, body: dict[str, Any]) -> int:
    """Count the tokens of an Anthropic request. Nothing is generated, or billed."""
    api, pool = access.api or client.api, access.pool or client.pool
    headers = api.authorization(access.key) + api.headers
    try:
        exchange = await pool.post("/messages/count_tokens", msgspec.json.encode(body), headers, LIST_TIMEOUT_S)
        try:
            answer = await exchange.read(MAX_LIST_BYTES)
        finally:
            exchange.close()
    except ConnectionFailed as error:
        raise connection_failure(client, error) from error
    if exchange.status != 200:
        raise_status(client.provider.name, exchange.status, exchange.headers, answer, access.key)
    try:
        count = msgspec.json.decode(answer).get("input_tokens")
    except (msgspec.DecodeError, RecursionError, AttributeError):
        count = None
    if type(count) is not int or count < 0:
        raise ProviderFailed(client.provider.name, "did not count the tokens")
    return count


def connection_failure(client: ProviderClient, error: ConnectionFailed) -> ProviderFailed:
    failure = ProviderTimeout if error.timed_out else ProviderFailed
    return failure(client.provider.name, f"did not answer: {error}" if error.timed_out else f"failed: {error}")
