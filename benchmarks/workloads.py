"""The workloads, each a function from a running server to figures. Every server gets the same prompts."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.client import Reply, RequestFailed, stream
from benchmarks.prompts import Message, Prompts

CHAT_PATH = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes in tokens; `quick` is for trying things out, not for figures to state."""

    prompt: int = 512
    output: int = 128
    streams: int = 8
    prefill: int = 4000
    sessions: int = 8
    turns: int = 6
    system: int = 1000
    turn_prompt: int = 200
    turn_output: int = 64

    @classmethod
    def quick(cls) -> "Shape":
        return cls(output=48, streams=4, prefill=1500, sessions=4, turns=3, turn_output=24)


@dataclass(frozen=True, slots=True)
class Target:
    """A server to be measured."""

    port: int
    model: str
    adapt: Callable[[dict[str, Any]], dict[str, Any]] = lambda body: body  # to this server's API


@dataclass(slots=True)
class Result:
    """One run of one workload: its figures, and the token counts that the server reported."""

    figures: dict[str, float]
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, replies: Sequence[Reply], figures: dict[str, float]) -> "Result":
        return cls(
            figures=figures,
            prompt_tokens=sum(reply.prompt_tokens for reply in replies),
            cached_tokens=sum(reply.cached_tokens for reply in replies),
            output_tokens=sum(reply.output_tokens for reply in replies),
        )


Workload = Callable[[Target, Prompts, Shape], Awaitable[Result]]


async def ask(target: Target, messages: Sequence[Message], output: int, session: str | None = None) -> Reply:
    """One greedy chat completion of exactly `output` tokens."""
    body = {
        "model": target.model,
        "messages": list(messages),
        "max_tokens": output,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        # Only the length ends a reply. Some servers mask EOS, others ignore it: with both fields every one of them
        # generates all tokens.
        "ignore_eos": True,
        "min_tokens": output,
    }
    headers = {"x-session-affinity": session} if session else {}
    return await stream(target.port, CHAT_PATH, target.adapt(body), headers)


async def one_stream(target: Target, prompts: Prompts, shape: Shape) -> Result:
    reply = await ask(target, [prompts.user(shape.prompt)], shape.output)
    result = Result.of(
        [reply],
        {
            "prefill_tok_s": _computed(reply) / reply.ttft_s,
            "decode_tok_s": (reply.output_tokens - 1) / reply.decode_s,
            "ttft_s": reply.ttft_s,
        },
    )
    return _checked(result, shape.prompt, shape.output)


async def streams_at_once(target: Target, prompts: Prompts, shape: Shape) -> Result:
    asked = [[prompts.user(shape.prompt)] for _ in range(shape.streams)]
    began = time.perf_counter()
    replies = await asyncio.gather(*(ask(target, messages, shape.output) for messages in asked))
    took_s = time.perf_counter() - began
    outputs = sum(reply.output_tokens for reply in replies)
    figures = {"aggregate_tok_s": outputs / took_s, "ttft_max_s": max(reply.ttft_s for reply in replies)}
    return _checked(Result.of(replies, figures), shape.prompt * shape.streams, shape.output * shape.streams)


async def agent_replay(target: Target, prompts: Prompts, shape: Shape) -> Result:
    """Concurrent sessions with one system prompt; each turn waits for its reply and sends the whole history."""
    system = prompts.system(shape.system)
    asked = [[prompts.user(shape.turn_prompt, [system]) for _ in range(shape.turns)] for _ in range(shape.sessions)]
    began = time.perf_counter()
    sessions = await asyncio.gather(
        *(_session(target, f"bench-{began:.6f}-{i}", system, users, shape) for i, users in enumerate(asked))
    )
    took_s = time.perf_counter() - began
    replies = [reply for session in sessions for reply in session]
    result = Result.of(replies, {"replay_s": took_s})
    result.figures["cached_share"] = result.cached_tokens / max(1, result.prompt_tokens)
    result.figures["turn_ttft_s"] = sorted(reply.ttft_s for reply in replies)[len(replies) // 2]
    return _checked(result, None, shape.turn_output * shape.turns * shape.sessions)


async def _session(target: Target, name: str, system: Message, users: Sequence[Message], shape: Shape) -> list[Reply]:
    history = [system]
    replies: list[Reply] = []
    for user in users:
        history.append(user)
        reply = await ask(target, history, shape.turn_output, session=name)
        history.append({"role": "assistant", "content": reply.text})
        replies.append(reply)
    return replies


async def long_prefill(target: Target, prompts: Prompts, shape: Shape) -> Result:
    reply = await ask(target, [prompts.user(shape.prefill)], 1)
    return _checked(Result.of([reply], {"long_prefill_tok_s": _computed(reply) / reply.ttft_s}), shape.prefill, 1)


def _computed(reply: Reply) -> int:
    """Prompt tokens that the server computed, without its cached prefix."""
    return reply.prompt_tokens - reply.cached_tokens


def _checked(result: Result, prompt_tokens: int | None, output_tokens: int) -> Result:
    if prompt_tokens is not None and result.prompt_tokens != prompt_tokens:
        result.notes.append(f"{result.prompt_tokens} prompt tokens counted by the server, {prompt_tokens} meant")
    if result.output_tokens != output_tokens:
        result.notes.append(f"{result.output_tokens} output tokens, {output_tokens} meant")
    return result


async def first_token(target: Target, prompts: Prompts, give_up_at: float, alive: Callable[[], None]) -> Reply:
    """Retries until the server generates a token, whatever its health endpoint says.

    `alive` raises when there is nothing left to wait for.
    """
    messages = [prompts.user(48)]
    while True:
        try:
            return await ask(target, messages, 1)
        except RequestFailed:
            alive()
            if time.perf_counter() > give_up_at:
                raise
            await asyncio.sleep(0.05)
