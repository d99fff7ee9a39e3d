"""Validation of requests: every range in one place, for every API."""

import re
from math import isfinite
from typing import Any

import msgspec
import numpy as np

from emberline.protocol.errors import BadInput
from emberline.protocol.request import MAX_DRAFT_TOKENS, GenerateRequest, Message, SamplingParams, Tool, ToolChoice

MAX_TOOLS = 128
MAX_DEPTH = 64  # of a tool's parameters
NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


def validate_tools(request: GenerateRequest, are_encoded: bool) -> None:
    """Check the tools, which the caller has encoded already or not. Raises BadInput, with the field that is wrong."""
    if request.tools or request.tool_choice.mode == "required":
        _check_tools(request.tools, are_encoded)
        _check_choice(request.tool_choice, request.tools)
    if request.messages is not None:
        _check_results(request.messages)


def _check_tools(tools: tuple[Tool, ...], are_encoded: bool) -> None:
    if len(tools) > MAX_TOOLS:
        raise BadInput(f"a request may declare {MAX_TOOLS} tools, not {len(tools)}", param="tools")
    names: set[str] = set()
    for at, tool in enumerate(tools):
        if not NAME.fullmatch(tool.name):
            raise BadInput(
                f"a tool's name has 1 to 64 letters, digits, dots, dashes and underscores, unlike {tool.name[:80]!r}",
                param=f"tools[{at}].name",
            )
        if tool.name in names:
            raise BadInput(f"two tools are named {tool.name}: rename one", param=f"tools[{at}].name")
        names.add(tool.name)
        if tool.parameters.get("type", "object") != "object":
            message = f"tool {tool.name}: parameters must be the schema of an object, with type 'object'"
            raise BadInput(message, param=f"tools[{at}].parameters")
        if _deeper(tool.parameters, MAX_DEPTH):
            message = f"tool {tool.name}: parameters are nested deeper than {MAX_DEPTH}"
            raise BadInput(message, param=f"tools[{at}].parameters")
    try:
        if not are_encoded:
            msgspec.json.encode(tools)
    except UnicodeEncodeError:
        message = "the tools contain a lone surrogate (half of a UTF-16 pair), which is not Unicode"
        raise BadInput(message, param="tools") from None


def _check_choice(choice: ToolChoice, tools: tuple[Tool, ...]) -> None:
    if choice.mode == "required" and not tools:
        raise BadInput("tool_choice demands a call, but tools is empty: declare at least one", param="tool_choice")
    if choice.name is not None and choice.name not in {tool.name for tool in tools}:
        raise BadInput(f"tool_choice names {choice.name[:80]!r}, which is not among tools", param="tool_choice")


def _check_results(messages: tuple[Message, ...]) -> None:
    """A result without an id is taken as it stands: not every dialect has ids."""
    called: set[str] = set()
    for at, message in enumerate(messages):
        called.update(call.id for call in message.tool_calls)
        if message.role == "tool" and message.tool_call_id is not None and message.tool_call_id not in called:
            raise BadInput(
                f"a tool result answers {message.tool_call_id[:80]!r}, but no assistant message before it has a call "
                "with that id",
                param=f"messages[{at}].tool_call_id",
            )


def _deeper(value: Any, most: int) -> bool:
    """True if the value is nested deeper than `most`. Goes level by level, so that depth costs no stack."""
    level, depth = [value], 0
    while level and depth <= most:
        level = [
            child
            for item in level
            if isinstance(item, dict | list)
            for child in (item.values() if isinstance(item, dict) else item)
        ]
        depth += 1
    return bool(level)


MAX_CHOICES = 16
MAX_TEMPERATURE = 5
MAX_PENALTY = 2  # of frequency and presence, in either direction
MAX_REPETITION_PENALTY = 2
MAX_LOGIT_BIAS = 100  # in either direction
MAX_TOKENS = (1 << 31) - 1  # also of top_k
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_BAD_WORDS = 128
MAX_BIASES = 1024
MAX_LOGPROBS = 20
_U64 = (1 << 64) - 1


def validate(request: GenerateRequest, vocab_size: int, tools_encoded: bool = False) -> SamplingParams:
    """Check a request. Returns its sampling parameters, the seed as u64. Raises BadInput, with the field that is wrong.

    `tools_encoded`: the tools are known to be Unicode, because the caller has encoded them."""
    validate_prompt(request, vocab_size, tools_encoded)
    if not 1 <= request.n <= MAX_CHOICES:
        raise _out_of_range("n", request.n, 1, MAX_CHOICES)
    if (most := request.speculation.max_draft_tokens) is not None and not 0 <= most <= MAX_DRAFT_TOKENS:
        raise _out_of_range("speculation.max_draft_tokens", most, 0, MAX_DRAFT_TOKENS)
    budget = request.reasoning.budget_tokens
    if budget is not None and not 0 <= budget <= MAX_TOKENS:
        raise BadInput(
            f"the budget of reasoning is a number of tokens from 0 to {MAX_TOKENS}, not {budget}", param="reasoning"
        )
    if request.deadline_s is not None and not (isfinite(request.deadline_s) and request.deadline_s > 0):
        raise BadInput(f"deadline_s must be a positive number of seconds, not {request.deadline_s}", param="deadline_s")
    return validate_sampling(request.sampling, vocab_size)


def validate_prompt(request: GenerateRequest, vocab_size: int, tools_encoded: bool = False) -> None:
    given = [name for name in ("messages", "prompt", "prompt_ids") if getattr(request, name) is not None]
    if len(given) != 1:
        raise BadInput(
            f"exactly one of messages and prompt is needed, not {' and '.join(given) or 'none'}", param="prompt"
        )
    if request.messages is not None and not request.messages:
        raise BadInput("messages must not be empty", param="messages")
    for param, given_ids in (("prompt", request.prompt_ids), ("context", request.context_ids)):
        if given_ids:
            _check_prompt_ids(given_ids, vocab_size, param)
    if request.suffix is not None and request.prompt is None:
        raise BadInput("a suffix needs a prompt that is text: what stands before the gap", param="suffix")
    if request.continue_final and not _continuable(request.messages):
        message = "to be continued, the last message must be the assistant's, without tool calls"
        raise BadInput(message, param="messages")
    validate_tools(request, tools_encoded)


def _check_prompt_ids(given: bytes, vocab_size: int, param: str) -> None:
    if len(given) % 4:
        raise BadInput(f"{param} token ids are u32: their bytes must be a multiple of 4", param=param)
    highest = int(np.frombuffer(given, "<u4").max())
    if highest >= vocab_size:
        raise BadInput(f"{param} token id {highest} is beyond the vocabulary of {vocab_size}", param=param)


def _continuable(messages: tuple[Message, ...] | None) -> bool:
    last = messages[-1] if messages else None
    return last is not None and last.role == "assistant" and not last.tool_calls


def validate_sampling(sampling: SamplingParams, vocab_size: int) -> SamplingParams:
    if sampling == _DEFAULTS:
        return sampling
    for name, (low, high) in _RANGES.items():
        value = getattr(sampling, name)
        if value is not None and (not low <= value <= high or (value == 0 and name in _NOT_ZERO)):
            raise _out_of_range(name, value, low, high)
    if sampling.max_tokens is not None and sampling.min_tokens > sampling.max_tokens:
        raise BadInput(
            f"min_tokens ({sampling.min_tokens}) must not be above max_tokens ({sampling.max_tokens})",
            param="min_tokens",
        )
    if sampling.logit_bias or sampling.stop_ids or sampling.allowed_ids:
        _check_ids(sampling, vocab_size)
    if sampling.stop:
        _check_stops(sampling.stop)
    if sampling.bad_words:
        _check_bad_words(sampling.bad_words)
    return sampling if sampling.seed is None else _with_u64_seed(sampling)


_DEFAULTS = SamplingParams()
_RANGES: dict[str, tuple[float, float]] = {  # the least and the most; NaN is in none
    "temperature": (0, MAX_TEMPERATURE),
    "top_p": (0, 1),
    "top_k": (0, MAX_TOKENS),
    "min_p": (0, 1),
    "repetition_penalty": (0, MAX_REPETITION_PENALTY),
    "frequency_penalty": (-MAX_PENALTY, MAX_PENALTY),
    "presence_penalty": (-MAX_PENALTY, MAX_PENALTY),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
    "max_tokens": (0, MAX_TOKENS),
    "min_tokens": (0, MAX_TOKENS),
}
_NOT_ZERO = ("top_p", "repetition_penalty")


def _out_of_range(param: str, value: float, low: float, high: float) -> BadInput:
    least = f"above {low}" if param in _NOT_ZERO else f"at least {low}"
    return BadInput(f"{param} must be {least} and at most {high}, not {value}", param=param)


def _check_ids(sampling: SamplingParams, vocab_size: int) -> None:
    if len(sampling.logit_bias) > MAX_BIASES:
        raise BadInput(f"logit_bias may have {MAX_BIASES} entries, not {len(sampling.logit_bias)}", param="logit_bias")
    for token_id, bias in sampling.logit_bias.items():
        if not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:
            message = f"logit_bias: the bias of token {token_id} must be from -{MAX_LOGIT_BIAS} to {MAX_LOGIT_BIAS}"
            raise BadInput(f"{message}, not {bias}", param="logit_bias")
        _check_id("logit_bias", token_id, vocab_size)
    for token_id in sampling.stop_ids:
        _check_id("stop_token_ids", token_id, vocab_size)
    for token_id in sampling.allowed_ids:
        _check_id("allowed_token_ids", token_id, vocab_size)


def _check_id(param: str, token_id: int, vocab_size: int) -> None:
    if not 0 <= token_id < vocab_size:
        raise BadInput(f"{param}: token id {token_id} is not in the vocabulary of {vocab_size}", param=param)


def _check_stops(stops: tuple[str, ...]) -> None:
    if len(stops) > MAX_STOPS:
        raise BadInput(f"stop may have {MAX_STOPS} strings, not {len(stops)}", param="stop")
    for stop in stops:
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise BadInput(f"a stop string has 1 to {MAX_STOP_CHARS} characters, not {len(stop)}", param="stop")


def _check_bad_words(words: tuple[str, ...]) -> None:
    if len(words) > MAX_BAD_WORDS:
        raise BadInput(f"bad_words may have {MAX_BAD_WORDS} strings, not {len(words)}", param="bad_words")
    for word in words:
        if not word.strip() or len(word) > MAX_STOP_CHARS:
            message = f"a bad word has 1 to {MAX_STOP_CHARS} characters, and not only white space"
            raise BadInput(message, param="bad_words")


def _with_u64_seed(sampling: SamplingParams) -> SamplingParams:
    seed = sampling.seed
    assert seed is not None
    if 0 <= seed <= _U64:
        return sampling
    if seed < -(1 << 63) or seed > _U64:
        raise BadInput(f"seed must fit into 64 bits, not {seed}", param="seed")
    return msgspec.structs.replace(sampling, seed=seed & _U64)
