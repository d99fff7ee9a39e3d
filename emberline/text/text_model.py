"""Tokenizer, chat template and reply formats of one model, read from the files that hold its weights."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from emberline.protocol.errors import BadInput
from emberline.protocol.frames import Vocabulary
from emberline.protocol.images import ImageProcessor, expand
from emberline.protocol.request import Message, PreparedImage, Tool
from emberline.protocol.token_ids import unpack
from emberline.text.chat_template import ChatTemplate, with_family_ids, with_system_text
from emberline.text.fill_in_middle import FillInMiddle
from emberline.text.template_renderer import LocalRenderer, RendererFactory, Turn
from emberline.text.tokenizers.detokenizer import Detokenizer
from emberline.text.tokenizers.gguf_tokenizer import gguf_parts
from emberline.text.tokenizers.hf_tokenizer import Json, hf_parts, read_json, token_text
from emberline.text.tokenizers.special_tokens import Guard
from emberline.text.tokenizers.tiktoken_tokenizer import FILE as RANKS_FILE
from emberline.text.tokenizers.tiktoken_tokenizer import tiktoken_parts
from emberline.text.tokenizers.tokenizer import Tokenizer
from emberline.text.tool_calls import formats, reasoning
from emberline.text.tool_calls.harmony import HarmonyFormat, HarmonyParser
from emberline.text.tool_calls.parser import ReplyFormat, ReplyParser
from emberline.text.tool_calls.typescript_tools import declare_tools, sorted_deep
from emberline.weights.gguf import GGUFFile
from emberline.weights.image_settings import read_image_processor
from emberline.weights.model_config import BadCheckpoint

# Template variables and the GGUF keys of their tokens.
_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}

# Where a message to be continued ends in the rendered text: a noncharacter, and none that `special_tokens` uses.
_CONTINUED = "\U0001ffff"


class Rendered(NamedTuple):
    """A conversation as text. `mark` hides special tokens in client text (`special_tokens`); empty: there are none."""

    text: str
    mark: str


class TextModel:
    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, images: ImageProcessor | None = None) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.images = images  # how the model wants images; None: it takes none
        self.guard = Guard(tokenizer.special)
        self.exact_forms: set[str] = set()  # template arguments with which plain replies render exactly
        self.special_ids = tokenizer.special_ids
        self.bos_id = tokenizer.bos_id
        self.vocab_size = tokenizer.vocab_size
        self.chat_stops = template.stops  # stop strings of chats with this model, besides its end tokens
        self.tool_format = formats.detect_tool_format(template.source, "tools" in template.variables, tokenizer.special)
        self.reasoning_format = reasoning.detect_reasoning_format(template.source, tokenizer.added, tokenizer.special)
        self._reply_formats = {
            True: ReplyFormat(self.tool_format, self.reasoning_format),
            False: ReplyFormat(None, self.reasoning_format),
        }
        self.harmony = HarmonyFormat(tokenizer.special) if self.tool_format.family == "harmony" else None
        form = self.harmony or self._reply_formats[True]
        self.reply_sentinels = form.sentinels
        self.marker_ids = frozenset(form.sentinel_of)  # with a meaning in replies
        self.fill_in_middle = FillInMiddle.of(tokenizer)  # None: not trained for it

    @classmethod
    def load(cls, path: Path, renderers: RendererFactory = LocalRenderer, name: str = "") -> "TextModel":
        """Read a GGUF file or a Hugging Face folder. `renderers` run its chat template, whose errors say `name`. Raises
        BadCheckpoint."""
        model = _from_folder(path, renderers) if path.is_dir() else _from_gguf(path, renderers)
        model.template.model_name = name
        return model

    @property
    def reasons(self) -> bool:
        """True if the model reasons before it answers."""
        has_form = self.reasoning_format is not None or self.harmony is not None
        return has_form or reasoning.EFFORT in self.template.variables

    @cached_property
    def longest_token_chars(self) -> int:
        """An upper bound of the characters of a token."""
        return self.tokenizer.longest_token_chars()

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The bytes of every token, for the grammar matchers of engines."""
        special = {token_id: text for text, token_id in self.tokenizer.special.items()}
        added = [token_id for token_id in self.tokenizer.added.values() if token_id not in special]
        return Vocabulary([self.tokenizer.token_bytes[token_id] for token_id in range(self.vocab_size)], special, added)

    def encode(self, text: str, special: bool) -> bytes:
        """Ids (u32 little-endian) of the text alone; `special`: special tokens in it are parsed."""
        return self.tokenizer.encode(text, special=special)

    def encode_prompt(self, text: str) -> bytes:
        """Ids of a raw prompt, in which special tokens are parsed: without a template the client writes them."""
        return self.with_bos(self.tokenizer.encode(text, special=True))

    def with_bos(self, ids: bytes) -> bytes:
        """The ids with the beginning-of-sequence token if the model wants one, never two."""
        if not self.tokenizer.add_bos or self.bos_id is None:
            return ids
        bos = self.bos_id.to_bytes(4, "little")
        return ids if ids[:4] == bos else bos + ids

    def spellings(self, words: Iterable[str]) -> tuple[bytes, ...]:
        """The ids of each word, as it stands at the beginning of a text and behind a space."""
        texts = [text for word in words for text in (word, " " + word.lstrip())]
        return tuple(dict.fromkeys(self.encode(text, special=False) for text in texts))

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **kwargs: Any) -> str:
        """The conversation as readable text; prompts are rendered by `render_guarded`."""
        turns = self.template.turns(messages)
        return self.template.render(turns, kwargs, add_generation_prompt=add_generation_prompt)

    def render_guarded(
        self,
        messages: Sequence[Message],
        kwargs: Mapping[str, Any],
        tools: Sequence[Tool] = (),
        *,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
    ) -> Rendered:
        """`continue_final`: the text ends inside the last message, which the reply continues."""
        turns = self._turns(messages, tools)
        given = formats.template_tools(tools) if tools and not self.tool_format.untemplated else None
        if given is not None and self.tool_format.family == "kimi":
            given = sorted_deep(given)
            declared = declare_tools(given) if "tools_ts_str" in self.template.variables else None
            kwargs = kwargs if declared is None else {"tools_ts_str": declared, **kwargs}
        try:
            if mark := self.guard.choose(turns, kwargs, given):
                turns, kwargs, given = self.guard.mark([turns, kwargs, given], mark)
        except RecursionError:
            raise BadInput("the tool arguments in the messages are nested too deeply", param="messages") from None
        if not continue_final:
            text = self.template.render(turns, kwargs, add_generation_prompt=add_generation_prompt, tools=given)
            return Rendered(text if self.images is None else self._with_images(text, messages), mark)
        turns[-1] = {**turns[-1], "content": turns[-1]["content"] + _CONTINUED}
        text, found, _ = self.template.render(turns, kwargs, add_generation_prompt=False, tools=given).rpartition(
            _CONTINUED
        )
        if not found:
            message = "the model's chat template leaves the last message out: it cannot be continued"
            raise BadInput(message, param="messages")
        return Rendered(text if self.images is None else self._with_images(text, messages), mark)

    def _with_images(self, text: str, messages: Sequence[Message]) -> str:
        """The rendered text with the tokens of each image in place of its placeholder."""
        plans = [part.plan for message in messages for part in message.parts if isinstance(part, PreparedImage)]
        if not plans:
            return text
        assert self.images is not None, "else the request is refused"
        return expand(text, self.images, plans)

    def _turns(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[Turn]:
        if not tools or not self.tool_format.untemplated:
            return self.template.turns(with_family_ids(messages, self.tool_format))
        return with_system_text(self.template.turns(messages, self.tool_format), formats.tools_system_prompt(tools))

    def reply_parser(
        self,
        prompt_ids: bytes,
        tools: Sequence[Tool],
        begun: bool | None,
        detokenizer: Detokenizer | None = None,
        *,
        loose: bool = True,
    ) -> ReplyParser | HarmonyParser:
        """Return a parser for the reply to a prompt that declares these tools. `begun` is the result of
        `reasoning.begun` for the prompt; `loose` is the parser's."""
        detokenizer = detokenizer or self.detokenizer(prompt_ids)
        if self.harmony is not None:
            return HarmonyParser(self.harmony, detokenizer, {tool.name for tool in tools}, begun=begun is False)
        return ReplyParser(self._reply_formats[bool(tools)], detokenizer, tools, begun, loose=loose)

    def token_text(self, token_id: int) -> bytes:
        """The bytes of one token, special ones included."""
        return self.tokenizer.token_bytes.spell(token_id)

    def decode(self, ids: bytes | Iterable[int], *, special: bool = False) -> str:
        """Text of a whole sequence; special tokens are left out by default."""
        ids = unpack(ids) if isinstance(ids, bytes) else list(ids)
        if not special:
            detokenizer = self.detokenizer()
            return detokenizer.push(ids) + detokenizer.finish()
        return self._decode_special(ids)

    def detokenizer(self, prompt_ids: bytes = b"") -> Detokenizer:
        """Make the detokenizer of the text after `prompt_ids`. The last prompt id decides whether the tokenizer has
        prepended a space."""
        after_special = not prompt_ids or int.from_bytes(prompt_ids[-4:], "little") in self.special_ids
        scheme = self.tokenizer.prefix_space
        strip = (scheme == "always" and after_special) or (scheme == "first" and not prompt_ids)
        return Detokenizer(self.tokenizer.token_bytes, strip_space=strip)

    def _decode_special(self, ids: list[int]) -> str:
        pieces: list[str] = []
        detokenizer = self.detokenizer()
        for token_id in ids:
            if token_id in self.special_ids:
                pieces += [detokenizer.finish(), self.token_text(token_id).decode()]
                detokenizer = self.detokenizer(token_id.to_bytes(4, "little"))
            else:
                pieces.append(detokenizer.push([token_id]))
        return "".join(pieces) + detokenizer.finish()


def _from_gguf(path: Path, renderers: RendererFactory) -> TextModel:
    file = GGUFFile.open(path)
    try:
        metadata = file.metadata
        tokenizer = Tokenizer(gguf_parts(metadata))
        source = metadata.get("tokenizer.chat_template")
        tokens: dict[str, str] = {}
        for name, gguf_name in _NAMED.items():
            token_id = metadata.get(f"tokenizer.ggml.{gguf_name}_token_id")
            if isinstance(token_id, int):
                tokens[name] = tokenizer.token_bytes.spell(token_id).decode(errors="replace")
    finally:
        file.close()
    template = ChatTemplate(source if isinstance(source, str) else None, tokens, renderers)
    return TextModel(tokenizer, template, read_image_processor(path))


def _from_folder(folder: Path, renderers: RendererFactory) -> TextModel:
    settings = {**read_json(folder / "special_tokens_map.json"), **read_json(folder / "tokenizer_config.json")}
    ranks_only = (folder / RANKS_FILE).is_file() and not (folder / "tokenizer.json").is_file()
    tokenizer = Tokenizer(tiktoken_parts(folder, settings) if ranks_only else hf_parts(folder, settings))
    named = {name: token_text(settings, name) for name in _NAMED}
    tokens = {name: text for name, text in named.items() if text is not None}
    template = ChatTemplate(_folder_template(folder, settings), tokens, renderers)
    return TextModel(tokenizer, template, read_image_processor(folder))


def _folder_template(folder: Path, settings: Json) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise BadCheckpoint(f"{file.name} is not UTF-8") from None
    source = settings.get("chat_template") or read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(source, list):  # several named templates
        entries = [entry for entry in source if isinstance(entry, dict)]
        source = next((entry.get("template") for entry in entries if entry.get("name") == "default"), None)
    return source if isinstance(source, str) else None
