"""vLLM's endpoints of tokenizers: the token ids of a prompt, the text of token ids, and a model's special tokens."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from emberline.api.common.chat_fields import TemplateKwargs, continues_final
from emberline.api.common.chat_messages import ChatMessage, canonical_messages
from emberline.api.common.sampling_fields import ModelName, TokenId
from emberline.api.common.tools import DeclaredTools, toolset
from emberline.api.common.unsupported_fields import UnsupportedField, refuse_unsupported
from emberline.api.http.body import read_wire
from emberline.api.http.exchange import HttpExchange, Reply, json_reply
from emberline.protocol.errors import BadInput
from emberline.protocol.request import GenerateRequest


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """The body of `/tokenize`: a text, or a conversation as the model's chat template renders it."""

    model: ModelName = ""
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None  # default: true for a text
    return_token_strs: bool | None = None
    tools: DeclaredTools | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    chat_template: UnsupportedField = None
    mm_processor_kwargs: UnsupportedField = None
    media_io_kwargs: UnsupportedField = None

    def to_request(self, request_id: str) -> GenerateRequest:
        """The prompt as a canonical request."""
        refuse_unsupported(self)
        if (self.prompt is None) == (self.messages is None):
            raise BadInput("send either `prompt` or `messages`", param="prompt")
        if self.messages is None:
            self._refuse_chat_fields()
            return GenerateRequest(id=request_id, model=self.model, prompt=self.prompt)
        if self.add_special_tokens:
            message = "`add_special_tokens` is for a `prompt`: of `messages` the chat template writes special tokens"
            raise BadInput(message, param="add_special_tokens")
        kwargs = {} if self.chat_template_kwargs is None else msgspec.structs.asdict(self.chat_template_kwargs)
        return GenerateRequest(
            id=request_id,
            model=self.model,
            messages=canonical_messages(self.messages),
            tools=toolset(self.tools, None).tools if self.tools else (),
            continue_final=continues_final(self.continue_final_message, self.add_generation_prompt),
            template_kwargs={name: value for name, value in kwargs.items() if value is not None},
        )

    def _refuse_chat_fields(self) -> None:
        for name in ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"):
            if getattr(self, name):
                raise BadInput(f"`{name}` is for `messages`, not for a `prompt`", param=name)


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """The body of `/detokenize`."""

    model: ModelName = ""
    tokens: list[TokenId]


MODEL_NAME = {"model": {"type": "string", "minLength": 1}}

_tokenize = msgspec.json.Decoder(TokenizeRequest)
_detokenize = msgspec.json.Decoder(DetokenizeRequest)


async def tokenize(call: HttpExchange) -> Reply:
    """Return the token ids of a prompt, as a request with it would have them."""
    body = (await read_wire(call)).decode(_tokenize)
    request = body.to_request(call.id)
    special, entries = body.add_special_tokens is not False, bool(body.return_token_strs)
    found = await call.service.tokenize(request, call.target_of(body.model), special, entries)
    reply: dict[str, Any] = {"count": len(found.ids), "max_model_len": found.max_len, "tokens": found.ids}
    return json_reply(reply | {"token_strs": found.entries})


async def detokenize(call: HttpExchange) -> Reply:
    """Return the text of token ids."""
    body = (await read_wire(call)).decode(_detokenize)
    return json_reply({"prompt": await call.service.detokenize(body.tokens, call.target_of(body.model))})


async def info(call: HttpExchange) -> Reply:
    """Return the special tokens and the chat template of a model, which the query names unless there is only one."""
    model = call.query.get("model") or call.only_model()
    return json_reply(await call.service.tokenizer_info(call.target_of(model)))
