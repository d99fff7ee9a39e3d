"""Anthropic's door: messages, streamed and not, and token counting."""

import msgspec

from emberline.api.anthropic.messages import CountRequest, MessagesRequest
from emberline.api.anthropic.stream import MessageStream, message_body
from emberline.api.common.answer import collect
from emberline.api.http.body import read_json
from emberline.api.http.call import Call
from emberline.api.http.reply import HeaderList, Reply, json_reply
from emberline.api.http.sse import stream

_messages_decoder = msgspec.json.Decoder(MessagesRequest)
_count_decoder = msgspec.json.Decoder(CountRequest)


async def messages(call: Call) -> Reply | None:
    body = await read_json(call, _messages_decoder)
    events = call.service.generate(body.to_request(call), call.principal)
    headers = _headers(call)
    if body.stream:
        await stream(call, events, MessageStream(call, body.model, body.hides_thinking), headers)
        return None
    answer = await collect(call, events)
    return json_reply(message_body(call, body.model, answer, body.hides_thinking), headers=headers)


async def count_tokens(call: Call) -> Reply:
    body = await read_json(call, _count_decoder)
    tokens = await call.service.count_tokens(body.to_request(call), call.principal)
    return json_reply({"input_tokens": tokens}, headers=_headers(call))


def _headers(call: Call) -> HeaderList:
    return [(b"request-id", call.id.encode()), (b"cf-ai-req-id", call.id.encode())]
