"""From a canonical request to token ids that fit: the checks, the session, the template, the tokenizer."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from emberline.balancer.endpoint import Endpoint
from emberline.catalog.card import ModelCard
from emberline.protocol.errors import BadInput, ContextExceeded
from emberline.protocol.frames import EngineInfo
from emberline.protocol.principal import Principal
from emberline.protocol.request import GenerateRequest, Message, SamplingParams
from emberline.service.clock import Clock
from emberline.service.core import Core, Memory
from emberline.service.validate import validate, validate_prompt
from emberline.text.digest import chain_digests
from emberline.text.model import TextModel
from emberline.text.prompt import Entry, Prompt, build_prompt, turn_entries
from emberline.text.tokenizer import OFF_LOOP_BYTES

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Served:
    """A model on offer, and the engines that serve it."""

    card: ModelCard
    text: TextModel
    endpoints: tuple[Endpoint, ...]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that is ready for an engine."""

    request: GenerateRequest
    principal: Principal
    served: Served
    info: EngineInfo
    sampling: SamplingParams
    prompt: Prompt
    digests: list[bytes]  # of a conversation's messages
    clock: Clock


class Preparer:
    def __init__(self, core: Core) -> None:
        self._core = core
        self._threads = ThreadPoolExecutor(2, "emberline-text")

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)

    async def prepare(
        self, request: GenerateRequest, principal: Principal, served: Served, info: EngineInfo, clock: Clock
    ) -> Prepared:
        """Everything about a request that can be refused without an engine is refused here."""
        sampling = validate(request, info.vocab_size)
        _check_length(request, served.text, info.context_len)
        digests: list[bytes] = []
        known = None
        if request.messages is not None:
            digests = await self._run(request, lambda: chain_digests(request.messages or (), request.template_kwargs))
            known = await self._core.find(principal.account, info.fingerprint, digests)
        prompt = await self._run(request, lambda: build_prompt(served.text, request, known))
        sampling = _fit(sampling, prompt.n_ids, info.context_len, _prompt_field(request))
        return Prepared(request, principal, served, info, sampling, prompt, digests, clock)

    async def count(self, request: GenerateRequest, served: Served) -> int:
        validate_prompt(request, served.text.vocab_size)
        return (await self._run(request, lambda: build_prompt(served.text, request))).n_ids

    async def memories(self, prepared: Prepared, replies: list[tuple[str, bytes]]) -> list[Memory]:
        """What the next turn of this conversation will want to find again; `replies` are texts and their token ids."""
        if prepared.request.messages is None:
            return []
        return await self._run(prepared.request, lambda: _memories(prepared, replies))

    async def _run(self, request: GenerateRequest, work: Callable[[], T]) -> T:
        if _n_bytes(request) <= OFF_LOOP_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _n_bytes(request: GenerateRequest) -> int:
    """Of the request's text, near enough: beyond ASCII a character has three bytes or so."""
    texts = [message.content for message in request.messages or ()] + [request.prompt or ""]
    return sum(len(text) if text.isascii() else 3 * len(text) for text in texts)


def _prompt_field(request: GenerateRequest) -> str:
    return "prompt" if request.messages is None else "messages"


def _check_length(request: GenerateRequest, text: TextModel, context_len: int) -> None:
    """Refuse what cannot fit however it is tokenised, without tokenising megabytes to learn it."""
    n_chars = sum(len(message.content) for message in request.messages or ()) + len(request.prompt or "")
    if n_chars > context_len and n_chars > context_len * text.longest_token_chars:
        raise ContextExceeded(
            f"the prompt has {n_chars} characters, far beyond the context of {context_len} tokens: shorten it",
            param=_prompt_field(request),
        )


def _fit(sampling: SamplingParams, n_prompt: int, context_len: int, field: str) -> SamplingParams:
    """Clip the reply to what the context leaves; refuse a prompt that leaves nothing."""
    if n_prompt == 0:
        raise BadInput("the prompt is empty", param=field)
    room = context_len - n_prompt
    if room < 1:
        raise ContextExceeded(
            f"the prompt has {n_prompt} tokens, and the context of {context_len} must also hold the reply: "
            f"shorten the prompt to {context_len - 1} tokens or fewer",
            param=field,
        )
    max_tokens = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
    return msgspec.structs.replace(sampling, max_tokens=max_tokens, min_tokens=min(sampling.min_tokens, max_tokens))


def _memories(prepared: Prepared, replies: list[tuple[str, bytes]]) -> list[Memory]:
    entries: dict[bytes, Entry] = {}
    for text, reply_ids in replies:
        reply = Message("assistant", text)
        entries |= turn_entries(
            prepared.served.text, prepared.request, prepared.prompt, prepared.digests, reply, reply_ids
        )
    account, version = prepared.principal.account, prepared.info.fingerprint
    return [Memory(account, version, digest, entry) for digest, entry in entries.items()]
