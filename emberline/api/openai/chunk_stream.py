"""The chunks of streamed chats and text completions, and the options of such streams."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

import msgspec

from emberline.api.common.response_body import usage_body
from emberline.api.http.errors import Dialect
from emberline.api.http.exchange import encode
from emberline.api.http.sse import EventEncoder, random_padding
from emberline.protocol.errors import BadInput, Unsupported
from emberline.protocol.events import ChoiceDone, OutputIds, PromptEcho, TextDelta, TextLogprob, Usage
from emberline.protocol.token_ids import unpack

_UNFINISHED = b',"finish_reason":null}]'
END = b"}\n\n"


class UsageOptions(msgspec.Struct):
    """OpenRouter's: with `include`, the usage has the request's cost."""

    include: bool | None = None


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: each chunk has the usage of its choice so far


class StreamedBody(Protocol):
    """A body whose answer may come as chunks."""

    @property
    def stream(self) -> bool | None: ...

    @property
    def stream_options(self) -> StreamOptions | None: ...

    @property
    def prompt_logprobs(self) -> int | None: ...

    @property
    def return_token_ids(self) -> bool | None: ...


def check_streaming(body: StreamedBody) -> None:
    """Refuse options of streams for an answer that comes whole, and what only whole answers have in a stream."""
    if body.stream_options is not None:
        check_options(body.stream)
    if body.stream and body.prompt_logprobs is not None:
        message = "`prompt_logprobs` come with whole answers alone: leave `stream` out"
        raise Unsupported(message, param="prompt_logprobs")


def check_options(stream: bool | None) -> None:
    """Refuse options of streams for an answer that comes whole."""
    if not stream:
        message = "`stream_options` are for streams: send `stream: true`, or leave them out"
        raise BadInput(message, param="stream_options")


def wants_ids(body: StreamedBody) -> bool:
    """True if the answer, or the usage of its chunks, is made of token ids as well."""
    options = body.stream_options
    return bool(body.return_token_ids or (options is not None and options.continuous_usage_stats))


class ChunkStream(EventEncoder):
    """All of a chunk but its text is encoded once per stream: a chunk costs one small encode and a concatenation.

    A stream that fails ends without [DONE], so that it does not look complete.
    """

    before_text: ClassVar[bytes]  # between a choice's index and its text
    after_text: ClassVar[bytes]
    last: ClassVar[bytes]  # what a choice's last chunk has in place of text

    def __init__(
        self,
        request_id: str,
        dialect: Dialect,
        head: Mapping[str, Any],
        n_choices: int,
        options: StreamOptions | None,
        returns_ids: bool = False,
    ) -> None:
        super().__init__(request_id, dialect)
        self._head = b"data: " + encode(head)[:-1] + b',"choices":['
        self._choices = [self._head + b'{"index":%d,' % index for index in range(n_choices)]
        self._prefixes = [choice + self.before_text for choice in self._choices]
        self._suffix = self.after_text + b',"logprobs":null' + _UNFINISHED + END
        # Cloudflare's clients get the usage of every stream, OpenAI's only on request.
        self._with_usage = dialect is Dialect.OPENAI_ENVELOPED or bool(options and options.include_usage)
        self._paddings = random_padding() if options and options.include_obfuscation else None
        self._returns_ids = returns_ids
        self._counts_usage = bool(options and options.continuous_usage_stats)
        self._is_plain = not (self._paddings or returns_ids or self._counts_usage)  # chunks have nothing but text
        self._new_ids = defaultdict[int, list[int]](list)  # by choice: those that no chunk has had yet
        self._n_prompt, self._n_tokens = [0] * n_choices, [0] * n_choices

    def logprobs(self, index: int, tokens: list[TextLogprob]) -> dict[str, Any]:
        """The `logprobs` object of one chunk."""
        raise NotImplementedError

    def prompt_echo(self, event: PromptEcho) -> bytes:
        self._n_prompt[event.index] = len(event.prompt.ids) // 4
        return b""

    def output_ids(self, event: OutputIds) -> bytes:
        ids = unpack(event.token_ids)
        self._n_tokens[event.index] += len(ids)
        self._new_ids[event.index] += ids
        return b""

    def text_delta(self, event: TextDelta) -> bytes:
        if event.logprobs is None and self._is_plain:
            return self._prefixes[event.index] + encode(event.text) + self._suffix
        logprobs = b"null" if event.logprobs is None else encode(self.logprobs(event.index, event.logprobs))
        text = self._prefixes[event.index] + encode(event.text) + self.after_text
        return text + b',"logprobs":' + logprobs + self._unfinished(event.index)

    def choice_done(self, event: ChoiceDone) -> bytes:
        finish = b',"finish_reason":"' + self.finish_reason(event).encode() + b'"}]'
        last = self._choices[event.index] + self.last + b',"logprobs":null'
        if self._is_plain:
            return last + finish + END
        return last + self._token_ids(event.index) + finish + self._usage_so_far(event.index) + END

    def finish_reason(self, event: ChoiceDone) -> str:
        return event.finish

    def completed(self, usage: Usage) -> bytes:
        if not self._with_usage and usage.cost is None:
            return b"data: [DONE]\n\n"
        return self._head + b'],"usage":' + encode(usage_body(usage)) + END + b"data: [DONE]\n\n"

    def _delta_chunk(self, index: int, delta: dict[str, Any]) -> bytes:
        """A chat chunk with anything but text."""
        end = _UNFINISHED + END if self._is_plain else self._unfinished(index)
        return self._choices[index] + b'"delta":' + encode(delta) + b',"logprobs":null' + end

    def _unfinished(self, index: int) -> bytes:
        """The end of a chunk that is not its choice's last."""
        padding = b"" if self._paddings is None else b',"obfuscation":"' + next(self._paddings) + b'"'
        return self._token_ids(index) + _UNFINISHED + padding + self._usage_so_far(index) + END

    def _token_ids(self, index: int) -> bytes:
        """The field with the token ids that no chunk has had yet; empty if the client does not want it."""
        if not self._returns_ids:
            return b""
        ids, self._new_ids[index] = self._new_ids[index], []
        return b',"token_ids":' + encode(ids)

    def _usage_so_far(self, index: int) -> bytes:
        """The field with the usage of a choice so far; empty if the client does not want it."""
        if not self._counts_usage:
            return b""
        n_prompt, n_tokens = self._n_prompt[index], self._n_tokens[index]
        usage = {"prompt_tokens": n_prompt, "completion_tokens": n_tokens, "total_tokens": n_prompt + n_tokens}
        return b',"usage":' + encode(usage)
