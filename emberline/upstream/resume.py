"""A stream whose server was lost goes on at another: the prompt and the text so far, to be continued.

Only plain text of one choice can be: what a server has parsed (calls, reasoning) or constrained cannot be put back into
a prompt. Under greedy sampling the text is what it would have been; otherwise it is a fair continuation.
"""

from typing import Any

import msgspec

from emberline.upstream.request import CHAT, UpstreamRequest
from emberline.upstream.sse import encode

MAX_KEPT_BYTES = 4 << 20
_NOT_WITH = (
    *("tools", "functions", "response_format", "structured_outputs", "logprobs", "echo", "suffix", "best_of"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "regex", "ebnf", "stop"),
)
_CAN_CONTINUE = ("vllm", "sglang")


class Kept:
    """What the client has seen, as bytes; read only when the stream breaks."""

    def __init__(self) -> None:
        self._blocks: list[bytes] = []
        self._n_bytes = 0

    def add(self, block: bytes) -> None:
        self._n_bytes += len(block)
        if self._n_bytes <= MAX_KEPT_BYTES:
            self._blocks.append(block)

    @property
    def n_events(self) -> int:
        """About as many tokens have come."""
        return sum(block.count(b"data:") for block in self._blocks)

    def chunks(self) -> list[dict[str, Any]] | None:
        """The events so far; None where there are too many to keep, or some cannot be read."""
        if self._n_bytes > MAX_KEPT_BYTES:
            return None
        lines = [line[5:].strip() for line in b"".join(self._blocks).splitlines() if line.startswith(b"data:")]
        try:
            found = [msgspec.json.decode(line) for line in lines if line and line != b"[DONE]"]
        except (msgspec.DecodeError, RecursionError):
            return None
        return found if all(isinstance(chunk, dict) for chunk in found) else None


def continuation(parcel: UpstreamRequest, kind: str, kept: Kept) -> "tuple[dict[str, Any], Splice] | None":
    """The body that goes on where the stream broke, and what makes its chunks fit; None: it cannot be done."""
    if kind not in _CAN_CONTINUE or parcel.n != 1 or any(name in parcel.fields for name in _NOT_WITH):
        return None
    chunks = kept.chunks()
    if chunks is None:
        return None
    pieces = [piece for chunk in chunks if (piece := _text(chunk)) is not None]
    if len(pieces) != len(chunks):
        return None
    text, n_tokens = "".join(pieces), sum(bool(piece) for piece in pieces)
    fields = _continued(parcel, kind, text) if text else dict(parcel.fields)
    if fields is None:
        return None
    for name in ("max_tokens", "max_completion_tokens", "min_tokens"):
        if isinstance(most := fields.get(name), int):
            fields[name] = max(0 if name == "min_tokens" else 1, most - n_tokens)
    return fields, Splice(chunks[0] if chunks else {}, n_tokens)


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


def _continued(parcel: UpstreamRequest, kind: str, text: str) -> dict[str, Any] | None:
    fields = dict(parcel.fields)
    if parcel.path != CHAT:
        prompt = fields.get("prompt")
        if isinstance(prompt, msgspec.Raw):
            prompt = msgspec.json.decode(prompt)
        if not isinstance(prompt, str):
            return None
        return {**fields, "prompt": prompt + text}
    so_far = encode({"role": "assistant", "content": text})
    messages = fields["messages"]
    listed = bytes(messages if isinstance(messages, msgspec.Raw) else encode(messages)).rstrip()
    fields["messages"] = msgspec.Raw(listed[:-1] + b"," + so_far + b"]")
    fields["continue_final_message"] = True
    if kind == "vllm":
        fields["add_generation_prompt"] = False
    return fields


class Splice:
    """Chunks of the continuation, as if they were the first stream's."""

    def __init__(self, first: dict[str, Any], n_tokens: int) -> None:
        self._head = {name: first[name] for name in ("id", "created") if name in first}
        self._n_tokens = n_tokens

    def edit(self, lines: bytes) -> bytes:
        return b"".join(self._line(line) for line in lines.splitlines(keepends=True))

    def _line(self, line: bytes) -> bytes:
        payload = line[5:].strip() if line.startswith(b"data:") else b""
        try:
            chunk = msgspec.json.decode(payload) if payload and payload != b"[DONE]" else None
        except (msgspec.DecodeError, RecursionError):
            return line
        if not isinstance(chunk, dict):
            return line
        for choice in chunk.get("choices") or ():
            if isinstance(choice, dict) and isinstance(delta := choice.get("delta"), dict):
                delta.pop("role", None)
        return b"data: " + encode({**chunk, **self._head}) + b"\n"

    def count(self, usage: dict[str, Any]) -> None:
        """What the first server wrote was this one's prompt."""
        prompt, output = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if isinstance(prompt, int) and isinstance(output, int):
            moved = min(prompt, self._n_tokens)
            usage["prompt_tokens"], usage["completion_tokens"] = prompt - moved, output + moved
