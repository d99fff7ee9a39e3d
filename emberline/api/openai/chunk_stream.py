"""The stream of chunks that OpenAI's chat and text completions share."""

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from emberline.api.common.answer import usage_body
from emberline.api.http.call import encode
from emberline.api.http.errors import Dialect
from emberline.api.http.sse import EventEncoder, random_padding
from emberline.protocol.events import ChoiceDone, TextDelta, TextLogprob, Usage

_UNFINISHED = b',"finish_reason":null}]'
_END = b"}\n\n"


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


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
    ) -> None:
        super().__init__(request_id, dialect)
        self._head = b"data: " + encode(head)[:-1] + b',"choices":['
        self._choices = [self._head + b'{"index":%d,' % index for index in range(n_choices)]
        self._prefixes = [choice + self.before_text for choice in self._choices]
        self._suffix = self.after_text + b',"logprobs":null' + _UNFINISHED + _END
        # Cloudflare's clients get the usage of every stream, OpenAI's only on request.
        self._with_usage = dialect is Dialect.OPENAI_ENVELOPED or bool(options and options.include_usage)
        self._paddings = random_padding() if options and options.include_obfuscation else None

    def logprobs(self, index: int, tokens: list[TextLogprob]) -> dict[str, Any]:
        """The `logprobs` object of one chunk."""
        raise NotImplementedError

    def text_delta(self, event: TextDelta) -> bytes:
        if event.logprobs is None and self._paddings is None:
            return self._prefixes[event.index] + encode(event.text) + self._suffix
        logprobs = b"null" if event.logprobs is None else encode(self.logprobs(event.index, event.logprobs))
        text = self._prefixes[event.index] + encode(event.text) + self.after_text
        return text + b',"logprobs":' + logprobs + _UNFINISHED + self._padding() + _END

    def choice_done(self, event: ChoiceDone) -> bytes:
        finish = self.last + b',"logprobs":null,"finish_reason":"' + self.finish_reason(event).encode() + b'"}]'
        return self._choices[event.index] + finish + _END

    def finish_reason(self, event: ChoiceDone) -> str:
        return event.finish

    def completed(self, usage: Usage) -> bytes:
        if not self._with_usage:
            return b"data: [DONE]\n\n"
        return self._head + b'],"usage":' + encode(usage_body(usage)) + _END + b"data: [DONE]\n\n"

    def _delta_chunk(self, index: int, delta: dict[str, Any]) -> bytes:
        """A chat chunk with anything but text."""
        return b"".join(
            (self._choices[index], b'"delta":', encode(delta), b',"logprobs":null', _UNFINISHED, self._padding(), _END)
        )

    def _padding(self) -> bytes:
        return b"" if self._paddings is None else b',"obfuscation":"' + next(self._paddings) + b'"'
