"""Resuming a stream whose server was lost: another server continues the prompt and what was delivered so far.

Only plain text of one choice can be resumed: what a server has parsed (tool calls, reasoning) or constrained cannot be
put back into a prompt. A vLLM server gives token ids with the text: then the next server gets just these ids, and under
greedy sampling the text is what it would have been. Otherwise it gets the text, which it tokenizes again: the
continuation is a fair one, but may differ from an unbroken stream.
"""

import re
from typing import Any

import msgspec

from emberline.upstream.dialects.dialect import CHAT, COMPLETIONS
from emberline.upstream.dialects.sse import data_of, encode
from emberline.upstream.upstream_request import UpstreamRequest, continuation_fields

MAX_TRANSCRIPT_BYTES = 4 << 20
_NOT_WITH = (
    *("tools", "functions", "response_format", "structured_outputs", "logprobs", "echo", "suffix"),
    *("best_of", "continue_final_message"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "regex", "ebnf", "stop"),
)
CAN_CONTINUE = ("vllm", "sglang")  # kinds of servers that continue a text
_CHAT_ONLY = frozenset(  # not known to text completions
    {
        *("messages", "chat_template_kwargs", "reasoning_effort", "thinking_token_budget", "max_completion_tokens"),
        *("tool_choice", "parallel_tool_calls", "top_logprobs"),
    }
)
_MEDIA = re.compile(rb'"(?:\w+_url|(?:input|image|video|audio)_\w+|file)"')  # names in parts of a message
_TOKEN_IDS = re.compile(rb',\s*"(?:prompt_)?token_ids"\s*:\s*(?:\[[0-9,\s]*\]|null)')


def can_resume(request: UpstreamRequest, kind: str) -> bool:
    """True if a stream of the request on a server of this kind could be resumed, as far as that is known before."""
    return (
        request.stream
        and kind in CAN_CONTINUE
        and request.route.n == 1
        and (request.path == CHAT or "max_tokens" in request.fields)  # else it has 16 tokens at most
        and not any(name in request.fields for name in _NOT_WITH)
    )


def gives_token_ids(request: UpstreamRequest, kind: str) -> bool:
    """True if the server is asked for token ids. A prompt with media could not be put together from them."""
    messages = request.fields.get("messages", b"")
    raw = messages if isinstance(messages, msgspec.Raw) else encode(messages)
    return kind == "vllm" and _MEDIA.search(raw) is None


def without_token_ids(lines: bytes) -> bytes:
    """The lines as a client gets them, who has not asked for token ids."""
    return _TOKEN_IDS.sub(b"", lines)


class Transcript:
    """The lines that the client has seen, unless they are not to be kept; parsed only when the stream breaks."""

    def __init__(self, keep: bool = True, max_bytes: int = MAX_TRANSCRIPT_BYTES) -> None:
        self.keep = keep
        self._blocks: list[bytes] = []
        self._n_bytes = 0
        self._max_bytes = max_bytes if keep else -1

    def add(self, lines: bytes) -> None:
        """Keep more lines; once there are too many to keep, none are kept."""
        self._n_bytes += len(lines)
        if self._n_bytes <= self._max_bytes:
            self._blocks.append(lines)
        else:
            self._blocks.clear()

    @property
    def n_kept_bytes(self) -> int:
        """Bytes of the lines in memory."""
        return sum(map(len, self._blocks))

    def chunks(self) -> list[dict[str, Any]] | None:
        """Parse the lines. Returns None if they are not kept, are too many to keep, or some cannot be read."""
        if self._n_bytes > self._max_bytes:
            return None
        lines = b"".join(self._blocks).splitlines()
        try:
            found = [msgspec.json.decode(data) for line in lines if (data := data_of(line))]
        except (msgspec.DecodeError, RecursionError):
            return None
        return found if all(isinstance(chunk, dict) for chunk in found) else None

    def replace(self, chunks: list[dict[str, Any]]) -> None:
        self._blocks = [b"data: " + encode(chunk) + b"\n\n" for chunk in chunks]
        self._n_bytes = self.n_kept_bytes


class Continuation:
    """The request that resumes a stream, and what makes its chunks look like the first stream's.

    `complete`: all its tokens were delivered and only its end is missing. Servers generate one token at least, which is
    dropped.
    """

    def __init__(
        self,
        path: str,
        fields: dict[str, Any],
        first: dict[str, Any],
        n_tokens: int,
        prompt_tokens: int | None,
        complete: bool = False,
    ) -> None:
        self._complete = complete
        self.path = path
        self.fields = fields
        self.n_tokens = n_tokens  # of the reply, delivered before
        self.prompt_tokens = prompt_tokens  # of the first request; None: unknown
        self._head = {name: first[name] for name in ("id", "object", "created") if name in first}

    def edit(self, lines: bytes) -> bytes:
        return b"".join(self._line(line) for line in lines.splitlines(keepends=True))

    def adjust_usage(self, usage: dict[str, Any]) -> None:
        """Count as output what was delivered before, which is part of this server's prompt."""
        prompt, output = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if isinstance(prompt, int) and isinstance(output, int):
            known = self.prompt_tokens
            usage["prompt_tokens"] = max(0, prompt - self.n_tokens) if known is None else known
            usage["completion_tokens"] = self.n_tokens + (0 if self._complete else output)
            usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]

    def _line(self, line: bytes) -> bytes:
        try:
            chunk = msgspec.json.decode(data_of(line) or b"null")
        except (msgspec.DecodeError, RecursionError):
            return line
        if not isinstance(chunk, dict):
            return line
        chunk.pop("prompt_token_ids", None)
        for choice in chunk.get("choices") or ():
            if isinstance(choice, dict):
                self._edit_choice(choice)
        return b"data: " + encode({**chunk, **self._head}) + b"\n"

    def _edit_choice(self, choice: dict[str, Any]) -> None:
        choice.pop("prompt_token_ids", None)
        if self._head.get("object") == "chat.completion.chunk" and "text" in choice:
            choice["delta"] = {"content": choice.pop("text")}
        if isinstance(delta := choice.get("delta"), dict):
            delta.pop("role", None)
        if self._complete:
            if "text" in choice:
                choice["text"] = ""
            elif isinstance(delta, dict):
                delta["content"] = ""
            if choice.get("finish_reason"):
                choice["finish_reason"] = "length"


def continuation(
    request: UpstreamRequest, kind: str, transcript: Transcript, n_tokens: int, prompt_tokens: int | None
) -> Continuation | None:
    """None where the stream cannot be resumed. `n_tokens` of the reply were delivered; `prompt_tokens` where known."""
    chunks = transcript.chunks() if can_resume(request, kind) else None
    if chunks is None:
        return None
    pieces = [piece for chunk in chunks if (piece := _text(chunk)) is not None]
    if len(pieces) != len(chunks):
        return None
    first = chunks[0] if chunks else {}
    # Tokens behind the last text are the beginning of a character that was never delivered: they are computed again.
    delivered = chunks[: max((at + 1 for at, piece in enumerate(pieces) if piece), default=0)]
    path, fields = request.path, dict(request.fields)
    if (ids := _token_ids(delivered)) is not None:
        prompt_ids, output_ids = ids
        n_tokens = len(output_ids)
        path, fields = COMPLETIONS, _completion_fields(request, prompt_ids + output_ids)
        transcript.replace(delivered)
    elif delivered:
        continued = _continued(request, kind, "".join(pieces))
        if continued is None:
            return None
        fields = continued
    else:
        n_tokens = 0
        transcript.replace([])
    complete = False
    for name in ("max_tokens", "max_completion_tokens", "min_tokens"):
        if isinstance(most := fields.get(name), int):
            complete = complete or (name != "min_tokens" and most <= n_tokens)
            fields[name] = max(0 if name == "min_tokens" else 1, most - n_tokens)
    return Continuation(path, fields, first, n_tokens, prompt_tokens, complete)


def _text(chunk: dict[str, Any]) -> str | None:
    """Text that the chunk adds. Returns None if the chunk adds anything else."""
    choices = chunk.get("choices")
    if not isinstance(choices, list) or any(not isinstance(choice, dict) for choice in choices):
        return None
    text = ""
    for choice in choices:
        delta = choice.get("delta") or {}
        if any(delta.get(name) for name in ("tool_calls", "function_call", "reasoning_content", "reasoning")):
            return None
        if choice.get("finish_reason"):
            return None
        text += delta.get("content") or choice.get("text") or ""
    return text


def _token_ids(chunks: list[dict[str, Any]]) -> tuple[list[int], list[int]] | None:
    """Token ids of the prompt and of the text in the chunks. Returns None unless all are known."""
    prompt_ids: list[int] | None = None
    output_ids: list[int] = []
    for chunk in chunks:
        for part in (chunk, *chunk["choices"]):
            prompt_ids = prompt_ids or part.get("prompt_token_ids")
        ids = [number for choice in chunk["choices"] for number in choice.get("token_ids") or ()]
        if _text(chunk) and not ids:
            return None
        output_ids += ids
    return (prompt_ids, output_ids) if prompt_ids and output_ids else None


def _completion_fields(request: UpstreamRequest, prompt_ids: list[int]) -> dict[str, Any]:
    """A text completion of these ids, whatever the request was."""
    fields = {name: value for name, value in request.fields.items() if name not in _CHAT_ONLY}
    limits = [request.fields.get(name) for name in ("max_completion_tokens", "max_tokens")]
    if request.path == CHAT:  # without a limit it may fill the context; a text completion only if it says so
        fields["max_tokens"] = next((limit for limit in limits if limit is not None), None)
    return {**fields, "prompt": prompt_ids}


def _continued(request: UpstreamRequest, kind: str, text: str) -> dict[str, Any] | None:
    fields = dict(request.fields)
    if request.path != CHAT:
        prompt = fields.get("prompt")
        if isinstance(prompt, msgspec.Raw):
            prompt = msgspec.json.decode(prompt)
        return {**fields, "prompt": prompt + text} if isinstance(prompt, str) else None
    partial = encode({"role": "assistant", "content": text})
    messages = fields["messages"]
    listed = bytes(messages if isinstance(messages, msgspec.Raw) else encode(messages)).rstrip()
    fields["messages"] = msgspec.Raw(listed[:-1] + b"," + partial + b"]")
    return fields | continuation_fields(kind)
