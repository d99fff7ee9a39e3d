"""One attempt of a request on a provider."""

from emberline.balancer.route_request import Fault
from emberline.protocol.errors import EmberlineError, EngineLost
from emberline.protocol.trace_context import TraceContext
from emberline.upstream.attempt import MAX_ERROR_BYTES
from emberline.upstream.disaggregation import Fields
from emberline.upstream.http_client import ConnectionFailed, Exchange
from emberline.upstream.providers.access import Access
from emberline.upstream.providers.api import StreamTranslator
from emberline.upstream.providers.client import ProviderClient
from emberline.upstream.providers.errors import ProviderFailed, ProviderTimeout, raise_status


class ProviderAttempt:
    """To the transport what `upstream.attempt.Attempt` is. Nothing is sent twice: a provider bills what it computes."""

    prefill = None

    def __init__(
        self, path: str, request_id: str, client: ProviderClient, access: Access, trace: TraceContext | None = None
    ) -> None:
        self.decode = client
        self._path = path
        self._access = access
        self._ids = f"x-request-id: {request_id}\r\n{'' if trace is None else trace.headers}"
        self._exchange: Exchange | None = None
        self._translator: StreamTranslator | None = None

    async def open(self, fields: Fields) -> Exchange:
        """The provider's reply, its status 200."""
        client, access = self.decode, self._access
        call = client.api.call(self._path, fields)
        self._translator = call.translator
        headers = f"{self._ids}{client.api.authorization(access.key)}{call.headers}"
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
            raise self._failed(error) from error
        raise_status(client.name, exchange.status, exchange.headers, body, access.key)

    async def piece(self) -> bytes:
        """More of the reply in OpenAI's form; b"" at its end."""
        assert self._exchange is not None
        while True:
            try:
                piece = await self._exchange.piece()
            except ConnectionFailed as error:
                raise self._failed(error) from error
            if self._translator is None:
                return piece
            lines = self._translator.feed(piece) if piece else self._translator.end()
            if lines or not piece:
                return lines

    async def cached(self) -> int | None:
        return None

    def fault(self, error: EmberlineError) -> Fault:
        """There is one server: whether to ask again is for the client, or a rule of its gateway, to say."""
        is_to_blame = isinstance(error, EngineLost) and not self._access.is_own_url
        return Fault(False, lost=(self.decode.name,) if is_to_blame else ())

    def close(self) -> None:
        if self._exchange is not None:
            self._exchange.close()

    def _failed(self, error: ConnectionFailed) -> ProviderFailed:
        failure = ProviderTimeout if error.timed_out else ProviderFailed
        return failure(self.decode.name, f"did not answer: {error}" if error.timed_out else f"failed: {error}")
