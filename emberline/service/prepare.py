"""Prepares a request for the engine: validation, session lookup, chat template, tokenization, grammar."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar

import msgspec

from emberline.cluster.served_models import Served
from emberline.images.request_images import ModelImages, RequestImages, image_places
from emberline.protocol import block_hash as blockhash
from emberline.protocol.errors import BadInput, ContextExceeded, TooLarge, Unsupported
from emberline.protocol.frames import EngineInfo
from emberline.protocol.images import ImageProcessor, PromptImage, locate
from emberline.protocol.request import (
    GenerateRequest,
    Message,
    PreparedImage,
    Principal,
    SamplingParams,
    ThinkingLimit,
    Tool,
)
from emberline.protocol.token_ids import unpack
from emberline.service.core import Core, SessionEntry
from emberline.service.validation import validate, validate_prompt
from emberline.telemetry.request_log import Clock
from emberline.text.grammar.reply_grammar import GrammarSpec
from emberline.text.prompt import (
    EncodedPrefix,
    Prompt,
    build_prompt,
    chain_digests,
    encode_tools,
    grammar_spec,
    prompt_kwargs,
    reasoning_begun,
    reasoning_limit,
    render_prompt,
    turn_entries,
)
from emberline.text.text_model import Rendered, TextModel
from emberline.text.tokenizers.tokenizer import OFF_LOOP_BYTES
from emberline.text.truncation import truncate_prompt

T = TypeVar("T")
Tools = Sequence[Tool] | msgspec.Raw  # as they came, or encoded

log = logging.getLogger("emberline.request")

MAX_COUNTED_CHARS = 4 << 20  # of a prompt that is tokenized for a client alone: about a million tokens
MAX_PROMPT_LOGPROBS = 1 << 17  # of an answer: of the prompt's tokens and their alternatives
RENDERINGS = 8  # by templates in other processes, at once
_ROLES_WITH_IMAGES = ("user", "tool")
MESSAGE_BYTES = 64  # of text that are tokenized in the time that a template takes for a message


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
    is_long: bool  # its text is too long to be rendered or tokenized on the event loop
    thinking: bool | None = False  # whether the prompt has begun reasoning; None: the reply may
    thinking_limit: ThinkingLimit | None = None
    grammar: bytes = b""  # encoded; empty: unconstrained
    keys: bytes = b""  # content keys of the prompt's full blocks
    images: tuple[PromptImage, ...] = ()
    image_tokens: int = 0  # of the prompt: they stand for images

    @property
    def parsed(self) -> bool:
        """True if the reply may be more than text."""
        return bool(self.request.tools) or self.thinking is not False


class Grammars(Protocol):
    async def compile(self, spec: GrammarSpec) -> bytes:
        """The encoded grammar; BadInput where the spec is at fault."""


class Preparer:
    def __init__(self, core: Core, grammars: Grammars, images: RequestImages | None = None) -> None:
        """Create the preparer. Without `images`, it refuses requests with images."""
        self._core = core
        self._grammars = grammars
        self._images = images
        self._threads = ThreadPoolExecutor(2, "emberline-text")
        self._renderings = ThreadPoolExecutor(RENDERINGS, "emberline-templates")  # that wait for other processes
        self._remembering: dict[bytes, asyncio.Task[None]] = {}  # by the digest of a conversation

    async def close(self) -> None:
        """Return when all conversations are remembered that have ended."""
        await asyncio.gather(*self._remembering.values())
        self._threads.shutdown(cancel_futures=True)
        self._renderings.shutdown(wait=False, cancel_futures=True)

    async def prepare(
        self, request: GenerateRequest, principal: Principal, served: Served, info: EngineInfo, clock: Clock
    ) -> Prepared:
        """Make a request ready for an engine. Refuses everything that can be refused without one."""
        text = served.text
        pixels: Mapping[str, bytes] = {}
        for message in request.messages or ():
            if message.parts:
                request, pixels = await self._with_images(request, principal, served, info.images)
                break
        is_long, tools = _is_long(request)
        valid, digests, rendered = await self._run(is_long, lambda: _read(text, request, tools, info), text)
        asked = served.card.defaults.apply(valid, _left_to_model(request))
        if self._remembering:
            await self._remembered(digests)
        known = await self._core.find(principal.account, info.fingerprint, digests) if digests else None
        thinking = reasoning_begun(text, rendered, request.continue_final)
        spec = grammar_spec(text, request, thinking)

        context_len = min(info.context_len, request.context_len or info.context_len)

        def tokenize() -> tuple[Prompt, SamplingParams, bytes, tuple[PromptImage, ...]]:
            prompt, messages = build_prompt(text, request, known, rendered), request.messages or ()
            if request.truncate and prompt.n_ids >= context_len > 1:
                room = min(asked.max_tokens or context_len, context_len // 2)  # for the reply
                cut = truncate_prompt(text, request, context_len - room)
                prompt, messages = Prompt(cut.ids), tuple(cut.messages)
            images: tuple[PromptImage, ...] = ()
            if info.images is not None:
                images = _prompt_images(info.images, prompt.ids, request, messages, pixels)
            sampling = _fit(asked, prompt.n_ids, context_len, request)
            if sampling.prompt_logprobs is not None:
                _check_scored(sampling.prompt_logprobs, prompt.n_ids)
            if request.suffix is not None and text.fill_in_middle is not None:
                stop_ids = (*sampling.stop_ids, *text.fill_in_middle.end_ids)
                sampling = msgspec.structs.replace(sampling, stop_ids=stop_ids)
            if sampling.bad_words:
                spelled = text.spellings(sampling.bad_words)
                sampling = msgspec.structs.replace(sampling, bad_words=(), bad_ids=spelled)
            extras = blockhash.NO_EXTRAS
            if images:
                extras = blockhash.extras_at((image.start, image.digest) for image in images)
            keys = blockhash.chain(blockhash.root(info.fingerprint, principal.salt), prompt.ids, extras)
            return prompt, sampling, keys, images

        renders_again = request.truncate or bool(request.context_ids)
        tokenizing = self._run(is_long, tokenize, text if renders_again else None)
        grammar = b""
        if spec is None:
            prompt, sampling, keys, images = await tokenizing
        else:
            compiling = self._grammars.compile(spec)
            (prompt, sampling, keys, images), grammar, _ = await asyncio.gather(
                tokenizing, compiling, self.load_vocabulary(text)
            )
        if prompt.rendered is None:  # a prompt that was cut is not what later turns begin with
            digests = []
        limit = reasoning_limit(text, request, sampling.max_tokens or 1) if thinking else None
        return Prepared(
            request,
            principal,
            served,
            info,
            sampling,
            prompt,
            digests,
            clock,
            is_long,
            thinking,
            limit,
            grammar,
            keys,
            images,
            _image_tokens(info.images, images) if images else 0,
        )

    async def count(self, request: GenerateRequest, principal: Principal, served: Served) -> int:
        check_countable(request)
        counted, _ = await self._with_images(request, principal, served, served.text.images)

        def tokenize() -> int:
            validate_prompt(counted, served.text.vocab_size)
            return build_prompt(served.text, counted).n_ids

        return await self._run(_is_long(counted)[0], tokenize, served.text)

    async def _with_images(
        self, request: GenerateRequest, principal: Principal, served: Served, processor: ImageProcessor | None
    ) -> ModelImages:
        """The request with its images as the model will see them, and their pixels. Raises Unsupported if the model
        takes none."""
        media = [
            (at, number, part)
            for at, message in enumerate(request.messages or ())
            for number, part in enumerate(message.parts)
            if part.kind != "text"
        ]
        if not media:
            return ModelImages(request, {})
        at, number, part = next((one for one in media if one[2].kind != "image"), media[0])
        field = f"messages[{at}].content[{number}]"
        if part.kind != "image":
            raise Unsupported(f"{request.model} takes no media of kind {part.kind!r} (`{field}`)", param=field)
        if processor is None or served.text.images is None or self._images is None:
            raise Unsupported(f"{request.model} takes no images: leave out the one in `{field}`", param=field)
        for place, _ in image_places(request.messages):
            assert request.messages is not None
            if (role := request.messages[place.message].role) not in _ROLES_WITH_IMAGES:
                message = f"`{place.field}`: images are for messages of the user and of tools, not of the {role}"
                raise BadInput(message, param=place.field)
        validate(request, served.text.vocab_size)  # before anything is fetched
        return await self._images.prepare(request, principal, processor)

    def remember(self, prepared: Prepared, replies: list[tuple[Message, bytes]]) -> None:
        """Let the core remember a conversation that has ended, with its `replies` and their ids, for its next turn.

        The entries are made after the reply has gone out: rendering the conversation again takes as long as the first
        time. The next turn waits for them if it comes earlier, to this process."""
        if not prepared.digests:
            return
        digest = prepared.digests[-1]
        task = self._remembering[digest] = asyncio.create_task(self._remember(prepared, replies))
        task.add_done_callback(lambda done: self._remembering.get(digest) is done and self._remembering.pop(digest))

    async def _remember(self, prepared: Prepared, replies: list[tuple[Message, bytes]]) -> None:
        for _ in range(2):  # iterations of the event loop, in which the end of the reply is sent
            await asyncio.sleep(0)
        try:
            text = prepared.served.text
            entries = await self._run(prepared.is_long, lambda: _session_entries(prepared, text, replies), text)
            self._core.remember(entries)
        except Exception:  # the next turn is slower, nothing worse
            log.exception("a conversation was not remembered", extra={"request_id": prepared.request.id})

    async def _remembered(self, digests: list[bytes]) -> None:
        """Wait for the entries of the conversation's earlier turns that are being made."""
        if pending := [task for digest in digests if (task := self._remembering.get(digest)) is not None]:
            await asyncio.wait(pending)

    async def load_vocabulary(self, text: TextModel) -> None:
        """Engines need the vocabulary for grammars: built here once, off the event loop."""
        if "vocabulary" not in text.__dict__:
            await asyncio.get_running_loop().run_in_executor(self._threads, lambda: text.vocabulary)

    async def run_off_loop(self, n_bytes: int, work: Callable[[], T], renders: TextModel | None = None) -> T:
        """Do the work in a thread, if `n_bytes` of text are too many for the event loop, or if it renders by a template
        that runs in another process."""
        return await self._run(n_bytes > OFF_LOOP_BYTES, work, renders)

    async def _run(self, is_long: bool, work: Callable[[], T], renders: TextModel | None = None) -> T:
        """Do the work, in a thread if it is long, or if it renders by a template that runs in another process."""
        if renders is not None and renders.template.blocks:
            return await asyncio.get_running_loop().run_in_executor(self._renderings, work)
        if is_long:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        return work()


def _is_long(request: GenerateRequest) -> tuple[bool, Tools]:
    """True if the request has more than OFF_LOOP_BYTES of text, estimated: about three bytes for a character beyond
    ASCII. Reads no more of the text than it has to. And the tools: encoded, if that was needed to know their length."""
    n_bytes = MESSAGE_BYTES * len(request.messages or ())
    for text in _texts(request):
        n_bytes += len(text) if text.isascii() else 3 * len(text)
        if n_bytes > OFF_LOOP_BYTES:
            return True, request.tools
    if not request.tools:
        return False, ()
    try:
        tools = encode_tools(request.tools)
    except (UnicodeEncodeError, RecursionError):  # which validation refuses
        return False, request.tools
    return n_bytes + len(bytes(tools)) > OFF_LOOP_BYTES, tools


def check_countable(request: GenerateRequest) -> int:
    """The number of characters that a prompt is made of, its tools included, if a client wants its tokens and no reply.
    Raises TooLarge if they are too many."""
    try:
        tools = encode_tools(request.tools) if request.tools else b""
    except (UnicodeEncodeError, RecursionError):  # which validation refuses
        tools = b""
    n_chars = sum(map(len, _texts(request))) + len(bytes(tools))
    if n_chars > MAX_COUNTED_CHARS:
        message = f"a prompt whose tokens are counted has at most {MAX_COUNTED_CHARS:,} characters, not {n_chars:,}"
        raise TooLarge(message, param=_prompt_field(request))
    return n_chars


def _texts(request: GenerateRequest) -> Iterator[str]:
    """All texts of the prompt, without its tools."""
    if request.prompt:
        yield request.prompt
    if request.suffix:
        yield request.suffix
    for message in request.messages or ():
        yield message.content
        if message.reasoning is not None:
            yield message.reasoning
        for call in message.tool_calls:
            yield call.arguments
        for part in message.parts:
            if isinstance(part, PreparedImage):
                yield part.plan.text


def _prompt_images(
    processor: ImageProcessor,
    prompt_ids: bytes,
    request: GenerateRequest,
    messages: Sequence[Message],
    pixels: Mapping[str, bytes],
) -> tuple[PromptImage, ...]:
    """The images of the messages that are left of the conversation, at their places in the prompt."""
    if not pixels:
        if (request.context_ids or request.prompt_ids) and processor.image_token_id in unpack(prompt_ids):
            message = "the token ids have tokens of images, which cannot be sent without them: send messages"
            raise BadInput(message, param="context" if request.context_ids else "prompt")
        return ()
    images = [part for message in messages for part in message.parts if isinstance(part, PreparedImage)]
    spans = locate(prompt_ids, processor, [image.plan for image in images])
    return tuple(
        PromptImage(bytes.fromhex(image.value), start, end, image.plan.tile_sizes, pixels[image.value])
        for image, (start, end) in zip(images, spans, strict=True)
    )


def _image_tokens(processor: ImageProcessor | None, images: Sequence[PromptImage]) -> int:
    """Number of tokens that stand for images."""
    return 0 if processor is None else sum(processor.n_rows(tile) for image in images for tile in image.tiles)


def _read(
    text: TextModel, request: GenerateRequest, tools: Tools, info: EngineInfo
) -> tuple[SamplingParams, list[bytes], Rendered | None]:
    """Check the request. Returns its sampling parameters, the digests of its messages, and its rendered text."""
    valid = validate(request, info.vocab_size, isinstance(tools, msgspec.Raw))
    if request.suffix is not None and text.fill_in_middle is None:
        why = f"{request.model} does not fill in the middle: its tokenizer has no tokens for that; leave `suffix` out"
        raise Unsupported(why, param="suffix")
    n_chars = sum(len(message.content) for message in request.messages or ())
    n_chars += len(request.prompt or "") + len(request.suffix or "")
    if not request.truncate:
        _check_length(n_chars, request, text, info.context_len)
    kwargs = prompt_kwargs(text, request)
    rendered = render_prompt(text, request, kwargs)
    if rendered is None:
        return valid, [], None
    if not request.truncate:
        _check_length(len(rendered.text), request, text, info.context_len)
    return valid, chain_digests(request.messages or (), kwargs, tools), rendered


def _prompt_field(request: GenerateRequest) -> str:
    return "prompt" if request.messages is None else "messages"


def _check_length(n_chars: int, request: GenerateRequest, text: TextModel, context_len: int) -> None:
    """Refuse what cannot fit however it is tokenized, without tokenizing megabytes to learn it."""
    if n_chars > context_len and n_chars > context_len * text.longest_token_chars:
        raise ContextExceeded(
            f"the prompt has {n_chars} characters, far beyond the context of {context_len} tokens: shorten it",
            param=_prompt_field(request),
        )


def _left_to_model(request: GenerateRequest) -> tuple[str, ...]:
    """Names of the sampling parameters for which the model's defaults apply.

    A default repetition penalty is meant for prose. It is left out where the reply is JSON or may call a tool: quotes,
    keys and what an agent copies from its context repeat there by design, and a penalized quote turns into stray
    characters in a copied value.
    """
    names = request.left_to_model
    copies = request.output is not None or bool(request.tools)
    return tuple(name for name in names if name != "repetition_penalty") if copies else names


def _fit(sampling: SamplingParams, n_prompt: int, context_len: int, request: GenerateRequest) -> SamplingParams:
    """Clip the reply to what the context leaves; refuse a prompt that leaves nothing."""
    if n_prompt == 0:
        raise BadInput("the prompt is empty", param=_prompt_field(request))
    room = context_len - n_prompt
    if room < 1:
        raise ContextExceeded(
            f"the prompt has {n_prompt} tokens, and the context of {context_len} must also hold the reply: "
            f"shorten the prompt to {context_len - 1} tokens or fewer",
            param=_prompt_field(request),
        )
    max_tokens = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
    return msgspec.structs.replace(sampling, max_tokens=max_tokens, min_tokens=min(sampling.min_tokens, max_tokens))


def _check_scored(n_top: int, n_prompt: int) -> None:
    """Refuse log-probabilities of a prompt that are too many for one answer."""
    n_entries = n_prompt * (1 + n_top)
    if n_entries > MAX_PROMPT_LOGPROBS:
        raise BadInput(
            f"{n_top} alternatives for each of the prompt's {n_prompt} tokens are {n_entries} "
            f"log-probabilities, and an answer has at most {MAX_PROMPT_LOGPROBS}: ask for fewer, or shorten the prompt",
            param="prompt_logprobs",
        )


def _session_entries(prepared: Prepared, text: TextModel, replies: list[tuple[Message, bytes]]) -> list[SessionEntry]:
    entries: dict[bytes, EncodedPrefix] = {}
    for reply, reply_ids in replies:
        entries |= turn_entries(text, prepared.request, prepared.prompt, prepared.digests, reply, reply_ids)
    principal, version, session = prepared.principal, prepared.info.fingerprint, prepared.request.session
    return [
        SessionEntry(principal.account, version, digest, entry, principal.salt, session)
        for digest, entry in entries.items()
    ]
