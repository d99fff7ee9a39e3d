"""OpenAI's door to other people's servers: bytes out, bytes back, counted on the way."""

import contextlib
import logging
from collections.abc import Callable

import msgspec

from emberline.api.body import decode
from emberline.api.call import Call
from emberline.api.departure import while_connected
from emberline.api.errors import Dialect, error_body
from emberline.api.fields import PRIORITY, session_name
from emberline.api.openai_chat import ChatRequest
from emberline.api.openai_completions import CompletionRequest
from emberline.api.relay_body import Peek, RelayBody, RelayedChat, RelayedCompletion
from emberline.api.reply import HeaderList, Reply, encode
from emberline.catalog.card import ModelCard
from emberline.protocol.errors import BadInput, EmberlineError, Internal, Unavailable
from emberline.protocol.request import Priority
from emberline.service.relay.keys import byte_keys, estimated_tokens
from emberline.service.relay.parcel import CHAT, COMPLETIONS, Parcel
from emberline.service.relay.passage import Passage
from emberline.service.relay.relay import Relay

_peek = msgspec.json.Decoder(Peek)
_chat = msgspec.json.Decoder(RelayedChat)
_completion = msgspec.json.Decoder(RelayedCompletion)
_canonical_chat = msgspec.json.Decoder(ChatRequest)
_canonical_completion = msgspec.json.Decoder(CompletionRequest)

log = logging.getLogger(__name__)


def relayed_card(call: Call, raw: bytes) -> ModelCard | None:
    """The card of the model that the body names, where others compute it."""
    if call.service.relay is None:
        return None
    try:
        name = _peek.decode(raw).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None  # what is wrong with it is told where it is read in full
    return call.service.relayed(name) if isinstance(name, str) else None


async def relay_chat(call: Call, card: ModelCard, raw: bytes) -> Reply | None:
    body = decode(raw, _chat)
    _checked(body.check)
    parcel = _parcel(call, card, body, CHAT, 1)
    if (text := _relay(call).text_of(card)) is not None:
        with contextlib.suppress(EmberlineError):  # not all that its server takes can be rendered here
            request = decode(raw, _canonical_chat).to_request(call)
            parcel.keys, parcel.input_tokens = await _relay(call).keys_of(request, card, text)
    return await _answer(call, parcel)


async def relay_completion(call: Call, card: ModelCard, raw: bytes) -> Reply | None:
    body = decode(raw, _completion)
    _checked(body.check)
    parcel = _parcel(call, card, body, COMPLETIONS, body.n_prompts)
    if (text := _relay(call).text_of(card)) is not None and body.n_prompts == 1:
        with contextlib.suppress(EmberlineError):
            (request,) = decode(raw, _canonical_completion).to_requests(call)
            parcel.keys, parcel.input_tokens = await _relay(call).keys_of(request, card, text)
    return await _answer(call, parcel)


def _checked(check: Callable[[], None]) -> None:
    try:
        check()
    except msgspec.ValidationError as bad:
        raise BadInput(f"`messages`: {bad}", param="messages") from None


def _relay(call: Call) -> Relay:
    relay = call.service.relay
    assert relay is not None
    return relay


def _parcel(call: Call, card: ModelCard, body: RelayBody, path: str, n_prompts: int) -> Parcel:
    relay, principal = _relay(call), call.principal
    fields = body.fields(relay.kind_of(card))
    fields["model"] = card.id
    fields |= relay.salted(card, principal)
    if body.stream:
        fields["stream_options"] = {"include_usage": True}
    prompt = body.prompt_bytes
    asked = body.stream_options is not None and body.stream_options.include_usage
    priority = PRIORITY[body.service_tier]
    most = body.max_tokens or getattr(body, "max_completion_tokens", None) or 0
    return Parcel(
        id=call.id,
        card=card,
        principal=principal,
        path=path,
        fields=fields,
        keys=byte_keys(card.id, principal.salt, *prompt),
        input_tokens=estimated_tokens(sum(map(len, prompt))),
        stream=bool(body.stream),
        hides_usage=not asked and call.dialect is not Dialect.OPENAI_ENVELOPED,
        n=(body.n or 1) * n_prompts,
        max_tokens=most,
        priority=priority,
        session=session_name(call, body.prompt_cache_key, body.user),
        reject_if_busy=priority is Priority.FLEX,
    )


async def _answer(call: Call, parcel: Parcel) -> Reply | None:
    headers: HeaderList = [(b"cf-ai-req-id", call.id.encode())]
    if parcel.stream:
        await while_connected(call.receive, _stream(call, parcel, headers))
        return None
    return Reply(200, await while_connected(call.receive, _whole(call, parcel)), headers=headers)


async def _whole(call: Call, parcel: Parcel) -> bytes:
    passage = await _relay(call).open(parcel)
    async with passage:
        return await passage.body()


async def _stream(call: Call, parcel: Parcel, headers: HeaderList) -> None:
    """What is refused before the first byte becomes an HTTP status; what fails later, the stream's last event."""
    passage = await _relay(call).open(parcel)
    async with passage:
        await call.start_stream(headers)
        last = await _pump(call, passage)
    await call.send({"type": "http.response.body", "body": last})


async def _pump(call: Call, passage: Passage) -> bytes:
    """Send all but the last block, which is returned: it closes the stream."""
    send = call.send
    try:
        block = await passage.block()
        while following := not passage.over:
            await send({"type": "http.response.body", "body": block, "more_body": following})
            block = await passage.block()
        return block
    except EmberlineError as error:
        await passage.fail(error)
        return _failed(call, error)
    except Exception as error:
        log.exception("a stream failed")
        await passage.fail(error)
        return _failed(call, Internal("the request failed; the log has it under its id"))
    except BaseException:  # the client left, or the server stops: the second still has somebody to tell
        await send({"type": "http.response.body", "body": _failed(call, Unavailable("the server is stopping"))})
        raise


def _failed(call: Call, error: EmberlineError) -> bytes:
    return b"data: " + encode(error_body(error, call.dialect, call.id)) + b"\n\n"
