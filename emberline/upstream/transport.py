"""A request on OpenAI-compatible servers: SSE lines in, and out whatever the decoder makes of them."""

import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Generic, TypeVar, cast

import msgspec
from msgspec import Raw

from emberline.net.http_client import ConnectionFailed, Exchange
from emberline.protocol.errors import BadInput, EmberlineError, EngineLost, Unavailable, WorkerRemoved
from emberline.protocol.events import Usage
from emberline.protocol.price import Price, format_amount
from emberline.protocol.request import GenerateRequest
from emberline.protocol.route_request import Fault, Route, RouteRequest
from emberline.protocol.trace_context import TraceContext, TraceDetails, current
from emberline.upstream.dialects.anthropic_relay import MessagesEditor
from emberline.upstream.dialects.chunks import UnreadableChunk
from emberline.upstream.dialects.dialect import COMPLETIONS, MESSAGES, Dialect
from emberline.upstream.dialects.event_reader import ChunkEditor, EventReader
from emberline.upstream.dialects.sse import MAX_LINE_BYTES, MalformedLine, StreamEditor, StreamError, read_usage
from emberline.upstream.dialects.whole_reply import message_lines, stream_lines
from emberline.upstream.providers.attempt import ProviderAttempt
from emberline.upstream.providers.client import ProviderClient
from emberline.upstream.providers.errors import hide_key
from emberline.upstream.resume import (
    CAN_CONTINUE,
    Continuation,
    Transcript,
    can_resume,
    continuation,
    gives_token_ids,
    without_token_ids,
)
from emberline.upstream.servers.attempt import Attempt, UpstreamBusy
from emberline.upstream.servers.client import UpstreamClient
from emberline.upstream.upstream_request import UpstreamRequest

RESTART_WAIT_S = 15.0  # for a server to come back after a failover

UNSEEN_PROMPT_TOKENS = 200_000  # of files and images that a provider fetches or keeps
MAX_OUTPUT_TOKENS = 2_000_000

T = TypeVar("T")

log = logging.getLogger("emberline.balancer")

# Turns whole SSE lines into output; the flag marks the end of the stream. UnreadableChunk blames the server.
Decoder = Callable[[Any, bool], T]
Adjust = Callable[[dict[str, Any]], None]
MakeAttempt = Callable[[str, str, UpstreamClient, UpstreamClient | None, TraceContext | None], Attempt]


def _cost_pico(price: Price, route: RouteRequest, usage: Usage) -> int:
    return price.cost_pico(
        route.priority,
        input_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        output_tokens=usage.completion_tokens,
        images=route.images,
    )


async def _no_piece() -> bytes:
    raise AssertionError("no attempt is open")


def _whole_lines(editor: StreamEditor | EventReader | ChunkEditor) -> Callable[[bytes], bytes]:
    """Turns a whole reply into the stream that the editor reads."""
    if isinstance(editor, StreamEditor):
        return message_lines if isinstance(editor, MessagesEditor) else stream_lines
    return editor.whole_lines


async def _whole_reply(exchange: Exchange, lines: Callable[[bytes], bytes]) -> bytes:
    """A server's reply in one piece, as the `lines` that were asked for. Returns b"" once it was read."""
    body = await exchange.read(MAX_LINE_BYTES)
    return lines(body) if body else b""


_NO_EDITOR, _NO_TRANSCRIPT = StreamEditor(), Transcript(keep=False)  # of a request that was not attempted: never fed


class UpstreamTransport(Generic[T]):
    """A streamed reply is resumed behind what the client has seen; one that is not streamed begins again."""

    deadline_grace_s = 0.0  # these servers know no deadlines

    def __init__(
        self,
        request: UpstreamRequest,
        clients: Mapping[str, UpstreamClient],
        make_decoder: Callable[[], Decoder[T]] | None = None,
        make_attempt: MakeAttempt = Attempt,
    ) -> None:
        """Create the transport. Without `make_decoder` the client takes the lines, or events, as they are.
        `make_attempt` opens an attempt at a server that is not a provider's."""
        self.restart_wait_s = RESTART_WAIT_S
        self.trace: TraceContext | None = current.get()  # sent on, also where this server does not trace
        self.operation = "text_completion" if request.path == COMPLETIONS else "chat"
        self.provider = "openai"  # the kind of the server, once one is chosen
        self.began = False
        self.done = False
        self.cached_tokens = 0  # as the balancer expects: most servers tell at the end, if at all
        self._request = request
        self._clients = clients  # by endpoint name
        self._make_decoder = make_decoder
        self._make_attempt = make_attempt
        self._decoder = None if make_decoder is None else make_decoder()
        self._attempt: Attempt | ProviderAttempt | None = None
        self._piece: Callable[[], Awaitable[bytes]] = _no_piece  # waits for more of the current attempt's reply
        self._editor: StreamEditor | EventReader | ChunkEditor = _NO_EDITOR
        self._transcript = _NO_TRANSCRIPT
        self._n_events = 0  # of the reply that the client has seen
        self._n_events_before = 0  # of them, those of earlier attempts
        self._continuation: Continuation | None = None
        self._has_token_ids = False  # the server gives them with the text
        self._unreadable = False  # the decoder failed; what it had decoded of these lines is lost, so none can resume
        self._told_lie = False  # the provider, about its usage
        self._responds = False  # the server of the current attempt has accepted the request
        self._tried: set[str] = set()  # servers that failed this request or had no room for it

    @property
    def usage(self) -> Usage:
        """Token counts as the server said last: vLLM and SGLang do in every chunk. Otherwise the events of the reply
        are counted, and the prompt as soon as the server has begun to respond."""
        usage = self._editor.usage
        if usage is not None and (type(self._attempt) is not ProviderAttempt or self._is_plausible(usage)):
            return usage
        if not self._n_events:
            return Usage(prompt_tokens=self._request.route.input_tokens if self._responds else 0)
        n_tokens, n_prompt = max(0, self._n_events - self._n_events_before - 1), None  # the first event is the role
        if self._continuation is not None:
            n_tokens, n_prompt = n_tokens + self._continuation.n_tokens, self._continuation.prompt_tokens
        return Usage(
            prompt_tokens=self._request.route.input_tokens if n_prompt is None else n_prompt,
            completion_tokens=n_tokens,
        )

    def _is_plausible(self, usage: Usage) -> bool:
        """True if a provider's counts are possible. They are billed, so impossible ones are replaced by estimates."""
        assert self._attempt is not None
        route = self._request.route
        most_output = (2 * route.max_tokens + 1000) * route.n if route.max_tokens else MAX_OUTPUT_TOKENS
        is_plausible = (
            usage.prompt_tokens <= route.max_input_tokens + UNSEEN_PROMPT_TOKENS * (1 + route.images)
            and usage.completion_tokens <= most_output
            and (usage.prompt_tokens or usage.completion_tokens) > 0
        )
        if not is_plausible and not self._told_lie:
            self._told_lie = True
            counts = {"request_id": route.id, "prompt_tokens": usage.prompt_tokens, "tokens": usage.completion_tokens}
            log.warning("provider %s counts tokens that cannot be: estimated", self._attempt.decode.name, extra=counts)
        return is_plausible

    async def open(self, route: Route, attempt: int, deadline_s: float | None) -> None:
        request = self._request
        self.began = self._responds = False
        self.cached_tokens = route.cached_tokens
        if (decode := self._clients.get(route.decode)) is None:
            raise WorkerRemoved(route.decode)
        kind, resumed = decode.config.endpoint.kind, self._continuation
        self.provider = decode.provider.name if isinstance(decode, ProviderClient) else kind
        if not request.stream:
            self._decoder, self._n_events = None if self._make_decoder is None else self._make_decoder(), 0
        if not self._n_events:
            resumable = kind in CAN_CONTINUE and can_resume(request, kind)
            self._transcript = Transcript() if resumable else _NO_TRANSCRIPT
        self._n_events_before = self._n_events
        self._has_token_ids = self._transcript.keep and gives_token_ids(request, kind)
        running_usage = kind in ("vllm", "sglang") and request.route.n == 1  # of several choices it is each one's own
        if request.task is not None:
            self._editor = self._new_reader(request.task, decode)
        elif request.path == MESSAGES:
            self._editor = MessagesEditor()
        else:
            self._editor = StreamEditor(hides_usage=request.hides_usage, running_usage=running_usage)
        path, fields = request.path, request.fields
        if resumed is not None:
            path, fields, self._editor.adjust = resumed.path, resumed.fields, resumed.adjust_usage
        if request.adds_cost:
            self._editor.adjust = self._with_cost(self._editor.adjust, route.price)
        if running_usage:
            fields = {**fields, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        if self._has_token_ids:
            fields = {**fields, "return_token_ids": True}
        self._attempt = self._new_attempt(path, f"{request.route.id}{f'-m{attempt}' if attempt else ''}", decode, route)
        exchange = await self._attempt.open(fields)
        content_type = exchange.headers.get("content-type", "")
        if content_type.startswith("text/event-stream"):
            self._piece = exchange.piece
        elif content_type.startswith("application/json"):
            self._piece = partial(_whole_reply, exchange, _whole_lines(self._editor))
        else:
            raise decode.lost("did not answer with an event stream")
        self._responds = True

    def _new_attempt(
        self, path: str, attempt_id: str, decode: UpstreamClient, route: Route
    ) -> Attempt | ProviderAttempt:
        if isinstance(decode, ProviderClient):
            access = self._request.access
            assert access is not None, "a request to a provider has its key"
            return ProviderAttempt(
                path, attempt_id, decode, access, self.trace, self._request.headers, self._request.task
            )
        prefill = None
        if route.prefill or decode.config.endpoint.role == "decode":
            prefill = self._prefill_for(decode, self._clients.get(route.prefill))
        return self._make_attempt(path, attempt_id, decode, prefill, self.trace)

    def _new_reader(self, task: GenerateRequest, decode: UpstreamClient) -> EventReader | ChunkEditor:
        request = self._request
        assert isinstance(decode, ProviderClient), "only providers have dialects"
        assert request.access is not None
        dialect = cast(Dialect, request.access.api or decode.api)
        reader = dialect.reader(task, request.route.input_tokens)
        return reader if request.as_events else ChunkEditor(reader, request.fields["model"], request.hides_usage)

    def _with_cost(self, adjust: Adjust | None, price: Price | None) -> Adjust:
        """`adjust`, and then the cost of a usage object; null without a price."""
        route = self._request.route

        def add(usage: dict[str, Any]) -> None:
            if adjust is not None:
                adjust(usage)
            cost = None if price is None else _cost_pico(price, route, read_usage(usage))
            usage["cost"] = None if cost is None else Raw(format_amount(cost).encode())

        return add

    async def next(self) -> T:
        """Wait for more lines, and return what the decoder makes of them. The hot path: runs once for each read.

        A reader of events returns those in place of lines."""
        attempt, editor = self._attempt, self._editor
        assert attempt is not None
        try:
            try:
                piece = await self._piece()
                if attempt.prefill is not None and editor.cached is None and editor.needs_cached(piece):
                    editor.cached = await attempt.cached()
                lines: Any = editor.feed(piece)
            except (ConnectionFailed, EngineLost, StreamError, MalformedLine) as error:
                if not editor.finished or self._request.route.n > 1:
                    if isinstance(error, ConnectionFailed):
                        raise attempt.failure(error) from error
                    raise
                piece, lines = b"", None  # the reply is complete: nothing is to be computed again
                editor.n_events = 0
            if editor.ended or not piece:
                end = self._end(attempt.decode)
                lines = end if lines is None else lines + end
            if lines or self.done:
                self.began = True
            if self._continuation is not None and lines:
                lines = self._continuation.edit(lines)
            self._n_events += editor.n_events
            if self._transcript.keep:
                self._transcript.add(lines)
            if self._has_token_ids:
                lines = without_token_ids(lines)
            return cast(T, lines) if self._decoder is None else self._decoder(lines, self.done)
        except StreamError as error:
            access = self._request.access
            message = hide_key(error.message, "" if access is None else access.key)[:500]
            if 400 <= error.code < 500:
                raise BadInput(message) from None
            raise attempt.decode.lost(f"failed in the middle of its reply: {message}") from None
        except (MalformedLine, UnreadableChunk) as error:
            self.done = False
            self._unreadable = isinstance(error, UnreadableChunk)
            raise attempt.decode.lost(f"sent {error}") from error

    def _end(self, server: UpstreamClient) -> Any:
        """Set `done`, and return the lines that the server left out at the end of its reply. Raises EngineLost if the
        reply is not complete."""
        editor = self._editor
        if not (editor.ended or editor.finished):
            raise server.lost("ended its stream before the reply was complete")
        self.done = True
        return b"" if editor.ended and not self._request.as_events else editor.closing()

    def fault(self, error: EmberlineError) -> Fault:
        attempt = self._attempt
        if isinstance(attempt, ProviderAttempt):
            return attempt.fault(error)
        if attempt is None or not isinstance(error, EngineLost | UpstreamBusy):
            return Fault(False)
        if isinstance(error, UpstreamBusy):
            used = (attempt.decode.name, *(() if attempt.prefill is None else (attempt.prefill.name,)))
            self._tried.update(used)
            return Fault(not self._tried.issuperset(self._servers()), used)
        self._tried.add(error.engine)
        retryable = not attempt.decode.closing and not (self._request.stream and self._unreadable)
        if retryable and self._request.stream and self._n_events:
            known, said = self.usage, self._editor.usage is not None
            prompt_tokens = known.prompt_tokens if said else None
            kind = attempt.decode.config.kind
            resumed = continuation(self._request, kind, self._transcript, known.completion_tokens, prompt_tokens)
            retryable = resumed is not None
            if resumed is not None:  # it counts the tokens of this attempt too
                self._continuation, self._n_events_before = resumed, self._n_events
                self._editor = StreamEditor()
        return Fault(retryable, (error.engine,), (error.engine,))

    def trace_details(self, content: bool) -> TraceDetails:
        """The prompt only: a reply is relayed without being read."""
        fields, task = self._request.fields, self._request.task
        asked = task.messages if task is not None else fields.get("messages", fields.get("prompt"))
        asked = asked if content else None
        return TraceDetails(input="" if asked is None else msgspec.json.encode(asked).decode())

    async def settle(self) -> None:
        """Nothing more is known: other servers do not say what they computed of a request that was aborted."""

    def close(self) -> None:
        if self._attempt is not None:
            self._attempt.close()

    def _prefill_for(self, decode: UpstreamClient, chosen: UpstreamClient | None) -> UpstreamClient | None:
        """The balancer's choice, but for what the kinds of servers cannot do."""
        kind = decode.config.kind
        if kind == "vllm" and self._request.route.n > 1:
            return None  # a transfer serves one sequence
        if kind == "sglang" and chosen is None and decode.config.endpoint.role == "decode":
            others = (self._clients[name] for name in self._servers() if name not in self._tried)
            ready = (one for one in others if one.config.endpoint.role == "prefill" and one.connected)
            chosen = next(ready, None)
            if chosen is None:
                raise Unavailable(
                    f"{decode.name} computes no prompts, and no prefill server is connected", retry_after_s=2
                )
        return chosen

    def _servers(self) -> list[str]:
        model = self._request.route.model
        return [name for name, client in self._clients.items() if model in client.models]
