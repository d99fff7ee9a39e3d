"""Resuming a stream whose server was lost: another server continues the prompt and the text delivered so far.

Only plain text of one choice can be resumed: what a server has parsed (tool calls, reasoning) or constrained cannot be
put back into a prompt. Under greedy sampling the text is what it would have been; otherwise it is a fair continuation.
"""

from typing import Any

import msgspec

from emberline.upstream.request import CHAT, UpstreamRequest
from emberline.upstream.sse import data_of, encode

MAX_TRANSCRIPT_BYTES = 4 << 20
_NOT_WITH = (
    *("tools", "functions", "response_format", "structured_outputs", "logprobs", "echo", "suffix", "best_of"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "regex", "ebnf", "stop"),
)
_CAN_CONTINUE = ("vllm", "sglang")


class Transcript:
    """The lines that the client has seen; parsed only when the stream breaks. Counted only, if not to be kept."""

    def __init__(self, keep: bool = True) -> None:
        self.n_events = 0
        self.n_events_of_attempt = 0  # reset by the transport
        self._blocks: list[bytes] = []
        self._n_bytes = 0
        self._max_bytes = MAX_TRANSCRIPT_BYTES if keep else -1

    def add(self, lines: bytes) -> None:
        n_events = lines.count(b"data:")
        self.n_events += n_events
        self.n_events_of_attempt += n_events
        self._n_bytes += len(lines)
        if self._n_bytes <= self._max_bytes:
            self._blocks.append(lines)
        else:
            self._blocks.clear()

    def chunks(self) -> list[dict[str, Any]] | None:
        """None where they are not kept, are too many to keep, or some cannot be read."""
        if self._n_bytes > self._max_bytes:
            return None
        lines = b"".join(self._blocks).splitlines()
        try:
            found = [msgspec.json.decode(data) for line in lines if (data := data_of(line))]
        except (msgspec.DecodeError, RecursionError):
            return None
        return found if all(isinstance(chunk, dict) for chunk in found) else None


class Continuation:
    """The body that resumes a stream, and what makes its chunks look like the first stream's."""

    def __init__(self, fields: dict[str, Any], first: dict[str, Any], n_tokens: int) -> None:
        self.fields = fields
        self.n_tokens = n_tokens  # of the reply, delivered before
        self._head = {name: first[name] for name in ("id", "created") if name in first}

    def edit(self, lines: bytes) -> bytes:
        return b"".join(self._line(line) for line in lines.splitlines(keepends=True))

    def adjust_usage(self, usage: dict[str, Any]) -> None:
        """What was delivered before is part of this server's prompt."""
        prompt, output = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if isinstance(prompt, int) and isinstance(output, int):
            moved = min(prompt, self.n_tokens)
            usage["prompt_tokens"], usage["completion_tokens"] = prompt - moved, output + moved

    def _line(self, line: bytes) -> bytes:
        try:
            chunk = msgspec.json.decode(data_of(line) or b"null")
        except (msgspec.DecodeError, RecursionError):
            return line
        if not isinstance(chunk, dict):
            return line
        for choice in chunk.get("choices") or ():
            if isinstance(choice, dict) and isinstance(delta := choice.get("delta"), dict):
                delta.pop("role", None)
        return b"data: " + encode({**chunk, **self._head}) + b"\n"


def continuation(request: UpstreamRequest, kind: str, transcript: Transcript) -> Continuation | None:
    """None where the stream cannot be resumed."""
    if kind not in _CAN_CONTINUE or request.route.n != 1 or any(name in request.fields for name in _NOT_WITH):
        return None
    chunks = transcript.chunks()
    if chunks is None:
        return None
    pieces = [piece for chunk in chunks if (piece := _text(chunk)) is not None]
    if len(pieces) != len(chunks):
        return None
    text, n_tokens = "".join(pieces), sum(bool(piece) for piece in pieces)
    fields = _continued(request, kind, text) if text else dict(request.fields)
    if fields is None:
        return None
    for name in ("max_tokens", "max_completion_tokens", "min_tokens"):
        if isinstance(most := fields.get(name), int):
            fields[name] = max(0 if name == "min_tokens" else 1, most - n_tokens)
    return Continuation(fields, chunks[0] if chunks else {}, n_tokens)


def _text(chunk: dict[str, Any]) -> str | None:
    """What the chunk adds to the text; None where it adds anything else."""
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
    fields["continue_final_message"] = True
    if kind == "vllm":
        fields["add_generation_prompt"] = False
    return fields
