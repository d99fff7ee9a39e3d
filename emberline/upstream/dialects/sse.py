"""Server-sent events of an upstream server on their way to the client: whole lines, unchanged but for the usage.

Most lines are more of a text, told by their end, and passed on as they came. Only those with a usage or an error are
decoded.
"""

import contextlib
import re
from collections.abc import Callable
from typing import Any

import msgspec

from emberline.protocol.events import Usage

MAX_LINE_BYTES = 8 << 20
_MAX_TOKENS = 1 << 31
_USAGE = re.compile(rb'"usage"\s*:\s*\{')
_ERROR = b'"error"'  # never inside a text, where its quotes are escaped
_DONE = b"[DONE]"
_HEAD = ("id", "object", "created", "model")  # of a chunk
_UNFINISHED = b'"finish_reason":null'
_MORE_TEXT = _UNFINISHED + b"}]}"  # the end of most chunks, which need no further look
_MORE_EVENT = _MORE_TEXT + b"\n\n"
# The usage so far, in a chunk with choices: behind their list, as vLLM and SGLang write it.
_RUNNING_USAGE = re.compile(rb'\}\],"usage":(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})(?=[},])')
_FINISHED = re.compile(rb'"finish_reason"\s*:\s*"')

encode = msgspec.json.Encoder().encode


# --- usage objects ----------------------------------------------------------------------------------------------------


def usage_objects(answer: Any) -> list[dict[str, Any]]:
    """Every usage object of a body or an event: at its top, or in its message or response."""
    found: list[dict[str, Any]] = []
    if isinstance(answer, dict):
        for place in (answer, answer.get("message"), answer.get("response")):
            if isinstance(place, dict) and isinstance(usage := place.get("usage"), dict):
                found.append(usage)
    return found


def read_usage(usage: dict[str, Any]) -> Usage:
    """In the form of OpenAI's chat, OpenAI's responses or Anthropic's messages; anything but a count is 0."""
    if "prompt_tokens" in usage or "input_tokens" not in usage:
        prompt, details = token_count(usage.get("prompt_tokens")), usage.get("prompt_tokens_details")
        output = token_count(usage.get("completion_tokens"))
        reasoned = usage.get("completion_tokens_details")
    elif _is_responses(usage):
        prompt, details = token_count(usage.get("input_tokens")), usage.get("input_tokens_details")
        output, reasoned = token_count(usage.get("output_tokens")), usage.get("output_tokens_details")
    else:  # Anthropic: cached tokens are not part of input_tokens
        read, written = (
            token_count(usage.get("cache_read_input_tokens")),
            token_count(usage.get("cache_creation_input_tokens")),
        )
        prompt = token_count(usage.get("input_tokens")) + read + written
        thought = usage.get("output_tokens_details")
        reasoning = token_count(thought.get("thinking_tokens")) if isinstance(thought, dict) else 0
        return make_usage(prompt, read, token_count(usage.get("output_tokens")), reasoning)
    cached = token_count(details.get("cached_tokens")) if isinstance(details, dict) else 0
    reasoning = token_count(reasoned.get("reasoning_tokens")) if isinstance(reasoned, dict) else 0
    found = make_usage(prompt, cached, output, reasoning)
    found.image_tokens = token_count(details.get("image_tokens")) if isinstance(details, dict) else 0
    return found


def write_cached(usage: dict[str, Any], cached: int) -> None:
    """Replace the cached tokens: with KV transfer the decode server's own count says nothing about prefill."""
    if "prompt_tokens" in usage or "input_tokens" not in usage:
        cached = min(cached, token_count(usage.get("prompt_tokens")))
        usage["prompt_tokens_details"] = _with_cached(usage.get("prompt_tokens_details"), cached)
    elif _is_responses(usage):
        cached = min(cached, token_count(usage.get("input_tokens")))
        usage["input_tokens_details"] = _with_cached(usage.get("input_tokens_details"), cached)
    else:
        total = token_count(usage.get("input_tokens")) + token_count(usage.get("cache_read_input_tokens"))
        usage["cache_read_input_tokens"] = min(cached, total)
        usage["input_tokens"] = total - min(cached, total)


def cached_of(body: bytes) -> int:
    """The cached tokens of a whole body; 0 where it does not say."""
    try:
        answer = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return 0
    return max((read_usage(usage).cached_tokens for usage in usage_objects(answer)), default=0)


def _is_responses(usage: dict[str, Any]) -> bool:
    return "input_tokens_details" in usage or "total_tokens" in usage


def _with_cached(details: Any, cached: int) -> dict[str, Any]:
    return {**(details if isinstance(details, dict) else {}), "cached_tokens": cached}


def make_usage(prompt: int, cached: int, output: int, reasoning: int) -> Usage:
    tiers = {"device": min(cached, prompt)} if cached else {}
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=output,
        reasoning_tokens=min(reasoning, output),
        cached_by_tier=tiers,
    )


def token_count(value: Any) -> int:
    """0 for anything but a plausible count."""
    return value if type(value) is int and 0 <= value < _MAX_TOKENS else 0


# --- lines ------------------------------------------------------------------------------------------------------------


def data_of(line: bytes) -> bytes:
    """The payload of a data line; empty for any other line, and for the end marker."""
    payload = line[5:].strip() if line.startswith(b"data:") else b""
    return b"" if payload == _DONE else payload


class StreamError(Exception):
    """The server sent an error inside the stream. Its message is not cut yet: it may repeat the key that was used."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.message = message
        self.code = code


class MalformedLine(Exception):
    """A line that no client could read: of more than MAX_LINE_BYTES, or data that is no JSON."""


class StreamEditor:
    """Cuts one attempt's stream into whole lines and rewrites them for the client."""

    _may_skip = True  # events without usage, error, finish reason or end marker say nothing that has to be read

    def __init__(self, *, hides_usage: bool = False, running_usage: bool = False) -> None:
        self.cached: int | None = None  # tokens, as the prefill server counted; None: leave the decode server's count
        self.adjust: Callable[[dict[str, Any]], None] | None = None  # a further change to each usage object
        self.ended = False  # the end marker was seen
        self.finished = False  # a finish reason was seen
        self.n_events = 0  # in the lines edited last
        self._tail: list[bytes] = []  # the pieces of a line that has not ended yet
        self._n_tail_bytes = 0
        self._usage: Usage | None = None  # the last one seen, rewritten
        self._untold: dict[str, Any] | None = None  # the same, where the client has not seen it
        self._last = b""  # the lines edited last
        self._running = b""  # a newer one, as the server wrote it,
        self._next_running = b""  # and that of the lines being edited
        self._running_usage = running_usage  # we have asked for the usage so far in every chunk
        self._hides_usage = hides_usage  # the client has not asked for the usage that we need
        self._drops_blank = False  # the blank line behind an event that was dropped

    @property
    def usage(self) -> Usage | None:
        """Usage as the server stated it last, decoded only when it is needed."""
        if self._running:
            with contextlib.suppress(msgspec.DecodeError):
                usage = msgspec.json.decode(self._running)
                self._rewrite(usage)
                self._usage, self._untold = read_usage(usage), usage
            self._running = b""
        return self._usage

    def closing(self) -> bytes:
        """SSE lines to add if the server closed after a complete reply: its usage, if known, and `[DONE]`."""
        lines = b"" if self._last.endswith((b"\n\n", b"\n\r\n")) else b"\n"
        if self.usage is not None and self._untold is not None and not self._hides_usage:
            last = next((data for line in reversed(self._last.splitlines()) if (data := data_of(line))), b"{}")
            head = {name: value for name, value in _decode(last).items() if name in _HEAD}
            lines += b"data: " + encode({**head, "choices": [], "usage": self._untold}) + b"\n\n"
        return lines + b"data: [DONE]\n\n"

    def feed(self, piece: bytes) -> bytes:
        """Return the lines that are complete now as the client gets them; the beginning of the next line is kept. An
        empty piece ends the stream. Sets `n_events`; raises as `edit` does.

        Most pieces are whole events with nothing but more text, or begin with such events. These are counted and passed
        on as they are.
        """
        if self._may_skip and piece.startswith(b"data:") and not (self._tail or self._drops_blank):
            end = piece.rfind(_MORE_EVENT) + len(_MORE_EVENT)
            n_events = piece.count(_MORE_EVENT, 0, end)
            # Each line is more of a text if all line ends belong to such events.
            if not n_events or piece.count(b"\n", 0, end) != 2 * n_events:
                end, n_events = len(piece), piece.count(b"}\n\ndata:") + 1
                if (
                    not piece.endswith(b"}\n\n")
                    or piece.count(b"\n") != 2 * n_events
                    or _ERROR in piece
                    or (b'"usage"' in piece and _USAGE.search(piece) is not None)
                    or _FINISHED.search(piece) is not None
                ):
                    end = 0
            if end:
                rest = piece[end:]
                lines = piece[:end] + self.edit(self.whole(rest)) if rest else piece
                self.n_events = self.n_events + n_events if rest else n_events
                self._last = lines
                return lines
        return self.edit(self.whole(piece)) if piece else self.flush()

    def whole(self, data: bytes) -> bytes:
        """Return the lines that are complete now; the beginning of the next is kept."""
        cut = data.rfind(b"\n") + 1
        if cut == len(data) and not self._tail:
            return data
        lines = b""
        if cut:
            lines = b"".join((*self._tail, data[:cut]))
            self._tail, self._n_tail_bytes = [], 0
        if cut < len(data):
            self._tail.append(data[cut:])
            self._n_tail_bytes += len(data) - cut
            if self._n_tail_bytes > MAX_LINE_BYTES:
                raise MalformedLine(f"a line of more than {MAX_LINE_BYTES >> 20} MiB")
        return lines

    def needs_cached(self, piece: bytes) -> bool:
        """True if the next lines have a usage object, which needs `cached` set first."""
        if piece and b"\n" not in piece:
            return False
        lines = b"".join((*self._tail, piece))
        return b'"usage"' in lines and _USAGE.search(lines) is not None

    def edit(self, lines: bytes) -> bytes:
        """Return whole lines as the client gets them; sets `n_events`. Raises StreamError if the server reports one,
        MalformedLine if no client could read a line: then none of the lines count."""
        self._next_running = b""
        if self._drops_blank and lines:
            self._drops_blank = False
            lines = lines[lines.find(b"\n") + 1 :] if lines.startswith((b"\n", b"\r\n")) else lines
        parts = lines.split(b"\n")
        self.n_events, changed, dropped = 0, False, []
        for at, line in enumerate(parts):
            if line.endswith(_MORE_TEXT):
                self.n_events += 1
            elif line.startswith(b"data:"):
                self.n_events += 1
                edited = self._data(line)
                if edited is None:
                    dropped.append(at)
                elif edited is not line:
                    parts[at], changed = edited, True
        for at in reversed(dropped):
            self._drop(parts, at)
        self._running = self._next_running or self._running
        self._last = b"\n".join(parts) if changed or dropped else lines
        return self._last

    def flush(self) -> bytes:
        """Return the last line of a stream that ended without a line end."""
        tail = b"".join(self._tail)
        self._tail, self._n_tail_bytes = [], 0
        self.n_events = 0
        return self.edit(tail) if tail else b""

    def _drop(self, parts: list[bytes], at: int) -> None:
        """An event, with the blank line behind it, which may not have come yet. The last part is no line."""
        self.n_events -= 1
        has_blank = at + 2 < len(parts) and not parts[at + 1].strip()
        self._drops_blank = at + 2 == len(parts)
        del parts[at : at + 1 + has_blank]

    def _data(self, line: bytes) -> bytes | None:
        """A data line as the client gets it; None: not at all."""
        if self._running_usage and (found := _RUNNING_USAGE.match(line, line.rfind(b'}],"usage":{'))) is not None:
            self._next_running = found[1]
            self.finished = self.finished or _UNFINISHED not in line
            return line[: found.start() + 2] + line[found.end() :]
        payload = line[5:].strip()
        if payload == _DONE:
            self.ended = True
            return line
        if not self.finished and _FINISHED.search(payload) is not None:
            self.finished = True
        if _ERROR not in payload and not (b'"usage"' in payload and _USAGE.search(payload) is not None):
            if not payload.endswith(b"}"):
                _decode(payload)
            return line
        event = _decode(payload)
        _raise_error(event)
        return self._event(line, event)

    def _event(self, line: bytes, event: Any) -> bytes | None:
        usages = usage_objects(event)
        if not usages:
            return line
        if self.cached is not None or self.adjust is not None:
            for usage in usages:
                self._rewrite(usage)
        self._usage, self._untold, self._running, self._next_running = read_usage(usages[-1]), None, b"", b""
        if self._hides_usage and event.get("choices") == []:
            return None
        if self._hides_usage or (self._running_usage and event.get("choices")):
            event.pop("usage", None)
        elif self.cached is None and self.adjust is None:
            return line
        return b"data: " + encode(event) + (b"\r" if line.endswith(b"\r") else b"")

    def _rewrite(self, usage: dict[str, Any]) -> None:
        if self.cached is not None:
            write_cached(usage, self.cached)
        if self.adjust is not None:
            self.adjust(usage)


def _decode(payload: bytes) -> Any:
    try:
        return msgspec.json.decode(payload)
    except (msgspec.DecodeError, RecursionError) as error:
        raise MalformedLine(f"a chunk that cannot be read: {error}") from None


def _raise_error(event: Any) -> None:
    if not isinstance(event, dict) or "choices" in event or not event.get("error"):
        return
    error = event["error"]
    if not isinstance(error, dict):
        raise StreamError(str(error), 500)
    code = error.get("code")
    raise StreamError(str(error.get("message", "")), code if type(code) is int else 500)
