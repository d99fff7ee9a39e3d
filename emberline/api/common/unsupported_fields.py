"""Fields that change an answer and are not supported: known by name, so that they are refused and not ignored.

They are OpenAI's own and those of the servers that speak its API. A body's struct inherits them (`PeerFields`) and
declares those that it supports again. Fields that are in no struct have no effect on the answer, or nobody knows them
(`api/http/unknown_fields.py`).
"""

from collections.abc import Callable, Mapping
from functools import cache
from itertools import groupby
from operator import itemgetter
from typing import Annotated, Any, NamedTuple, get_args

import msgspec
from msgspec import Meta

from emberline.api.http.unknown_fields import UNSUPPORTED
from emberline.protocol.errors import Unsupported

EMPTY: list[Any] = [None, False, 0, "", [], {}]  # values that ask for nothing

NotDocumented = Meta(extra_json_schema={UNSUPPORTED: EMPTY})
UnsupportedField = Annotated[Any, NotDocumented]
ProviderMark = Annotated[Any, NotDocumented]  # of a message or tool: for providers, without effect here
# Fields that ask for nothing with other values than these.
NullField = Annotated[Any, Meta(extra_json_schema={UNSUPPORTED: [None]})]
TrueField = Annotated[Any, Meta(extra_json_schema={UNSUPPORTED: [None, True]})]
OneField = Annotated[Any, Meta(extra_json_schema={UNSUPPORTED: [1, None]})]  # reversed: [None, 1] == [None, True]
UnlimitedField = Annotated[Any, Meta(extra_json_schema={UNSUPPORTED: [None, 0, -1]})]
OnlyTextField = Annotated[Any, Meta(extra_json_schema={UNSUPPORTED: [None, [], ["text"]]})]
ParsedReasoning = Annotated[Any, Meta(extra_json_schema={UNSUPPORTED: [None, "auto", "deepseek", "parsed"]})]
ErrorField = Annotated[Any, Meta(extra_json_schema={UNSUPPORTED: [None, "error"]})]
DisabledField = Annotated[Any, Meta(extra_json_schema={UNSUPPORTED: [None, "disabled"]})]
DefaultTierField = Annotated[Any, Meta(extra_json_schema={UNSUPPORTED: [None, "auto", "default", "standard_only"]})]
AutoField = Annotated[Any, Meta(extra_json_schema={UNSUPPORTED: [None, "auto"]})]
StandardField = Annotated[Any, Meta(extra_json_schema={UNSUPPORTED: [None, "standard"]})]

# Key of a Meta's `extra`: what a client can send instead, where that is not another field of the body.
INSTEAD = "instead"

# What a client can send instead: the first that the body's struct supports is part of the refusal's message. A path
# names a field inside another.
ALTERNATIVES: Mapping[str, tuple[str, ...]] = {
    "allowed_tokens": ("allowed_token_ids",),
    "ban_eos_token": ("ignore_eos",),
    "banned_strings": ("bad_words",),
    "candidate_count": ("n",),
    "chat_template": ("chat_template_kwargs",),
    "do_sample": ("temperature",),
    "ebnf": ("guided_grammar",),
    "enable_thinking": ("chat_template_kwargs", "reasoning", "thinking", "think"),
    "eos_token_id": ("stop_token_ids",),
    "format": ("response_format", "output_config", "text"),
    "frequency_penalty": ("options.frequency_penalty",),
    "function_call": ("tool_calls",),
    "functions": ("tools",),
    "grammar": ("guided_grammar",),
    "grammar_string": ("guided_grammar",),
    "guideline": ("messages", "instructions"),
    "guided_json": ("output_config", "text", "format"),
    "image": ("images", "messages[].images"),
    "images": ("messages[].images", "content[].image_url", "content[].source", "messages"),
    "input_ids": ("prompt",),
    "inputs": ("prompt", "messages", "input"),
    "instructions": ("system", "messages"),
    "json_schema": ("response_format", "output_config", "text", "format"),
    "logprobs": ("top_logprobs",),
    "max_completion_tokens": ("max_tokens", "max_output_tokens", "options.num_predict"),
    "max_length": ("max_tokens", "max_output_tokens", "options.num_predict"),
    "max_new_tokens": ("max_tokens", "max_output_tokens", "options.num_predict"),
    "max_output_tokens": ("max_tokens", "options.num_predict"),
    "max_tokens": ("max_output_tokens", "options.num_predict"),
    "max_tokens_to_sample": ("max_tokens", "max_output_tokens", "options.num_predict"),
    "messages": ("input", "prompt"),
    "min_p": ("options.min_p",),
    "min_new_tokens": ("min_tokens",),
    "n_cmpl": ("n",),
    "n_predict": ("max_tokens", "max_output_tokens", "options.num_predict"),
    "n_probs": ("top_logprobs", "logprobs"),
    "no_repeat_ngram_size": ("repetition_penalty", "frequency_penalty"),
    "no_stop_trim": ("include_stop_str_in_output",),
    "num_ctx": ("options.num_ctx",),
    "num_predict": ("max_tokens", "max_output_tokens", "options.num_predict"),
    "num_return_sequences": ("n",),
    "parameters": ("max_tokens", "max_output_tokens"),
    "prefix": ("continue_final_message",),
    "presence_penalty": ("options.presence_penalty",),
    "priority": ("service_tier",),
    "prompt": ("messages", "input"),
    "prompt_token_ids": ("prompt",),
    "random_seed": ("seed",),
    "reasoning_budget_tokens": ("thinking_token_budget", "thinking"),
    "reasoning": ("reasoning_effort", "think"),
    "reasoning_effort": ("reasoning", "output_config", "think"),
    "regex": ("guided_regex",),
    "regex_pattern": ("guided_regex",),
    "rep_pen": ("repetition_penalty",),
    "repeat_penalty": ("repetition_penalty", "options.repeat_penalty"),
    "repetition_penalty": ("options.repeat_penalty",),
    "response_format": ("output_config", "text", "format"),
    "response_mime_type": ("response_format", "output_config", "text", "format"),
    "response_schema": ("response_format", "output_config", "text", "format"),
    "return_logprob": ("logprobs", "top_logprobs"),
    "sampling_params": ("max_tokens", "max_output_tokens"),
    "sampling_seed": ("seed",),
    "seed": ("options.seed",),
    "stop": ("stop_sequences", "options.stop"),
    "stop_sequence": ("stop", "stop_sequences", "options.stop"),
    "stop_sequences": ("stop", "options.stop"),
    "stop_strings": ("stop", "stop_sequences"),
    "system": ("messages", "instructions"),
    "system_instruction": ("messages", "instructions", "system"),
    "system_prompt": ("messages", "instructions", "system"),
    "temperature": ("options.temperature",),
    "text": ("response_format", "output_config", "format"),
    "think": ("reasoning_effort", "reasoning", "thinking"),
    "thinking": ("reasoning_effort", "think"),
    "thinking_budget": ("thinking_token_budget", "thinking"),
    "thinking_token_budget": ("thinking",),
    "tokens_to_generate": ("max_tokens", "max_output_tokens", "options.num_predict"),
    "tool_calls": ("content",),
    "top_k": ("options.top_k",),
    "top_logprobs_num": ("top_logprobs",),
    "top_n_tokens": ("top_logprobs",),
    "top_p": ("options.top_p",),
}


class _Field(NamedTuple):
    name: str
    accepted: list[Any]
    alternative: str | None


def unsupported(field: str, alternative: str | None = None) -> Unsupported:
    hint = f"; use `{alternative}`" if alternative else ""
    return Unsupported(f"`{field}` is not supported{hint or ' yet'}", param=field)


def refuse_unsupported(body: msgspec.Struct, prefix: str = "") -> None:
    """Raise for the first unsupported field of `body` that asks for something; `prefix` is the path to `body`, with its
    dot."""
    select, absent = _unsupported_values(type(body))
    if select(msgspec.structs.astuple(body)) == absent:  # as in nearly every request, of the hundreds of fields
        return
    if (found := first_unsupported(body)) is not None:
        raise unsupported(prefix + found.name, found.alternative)


def first_unsupported(body: msgspec.Struct) -> _Field | None:
    """Returns the first unsupported field of `body` that asks for something; None if there is none."""
    for field in _unsupported_fields(type(body)):
        if (value := getattr(body, field.name)) is not None and not _asks_for_nothing(value, field.accepted):
            return field
    return None


@cache
def supported_fields(struct: type[msgspec.Struct]) -> tuple[str, ...]:
    return tuple(field.name for field in msgspec.structs.fields(struct) if _accepted(field.type) is None)


@cache
def _unsupported_fields(struct: type[msgspec.Struct]) -> tuple[_Field, ...]:
    found = ((field, _accepted(field.type)) for field in msgspec.structs.fields(struct))
    return tuple(
        _Field(field.name, accepted, _alternative(struct, field)) for field, accepted in found if accepted is not None
    )


def _alternative(struct: type[msgspec.Struct], field: msgspec.structs.FieldInfo) -> str | None:
    """Find what a client can send instead of an unsupported field. Returns None if there is nothing of the kind."""
    extras = (meta.extra or {} for meta in get_args(field.type)[1:] if isinstance(meta, Meta))
    named = next((extra[INSTEAD] for extra in extras if INSTEAD in extra), None)
    return named or next((path for path in ALTERNATIVES.get(field.name, ()) if _supports(struct, path)), None)


def _supports(struct: type[msgspec.Struct], path: str) -> bool:
    """True if the struct supports the field at a path such as `messages[].images`."""
    name, _, inner = path.partition(".")
    name = name.removesuffix("[]")
    if name not in supported_fields(struct):
        return False
    kind = next(field.type for field in msgspec.structs.fields(struct) if field.name == name)
    return not inner or any(_supports(one, inner) for one in _structs_in(kind))


def _structs_in(annotation: Any) -> list[type[msgspec.Struct]]:
    """The structs that a value of this type may be, or have as its elements."""
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return [annotation]
    return [struct for each in get_args(annotation) for struct in _structs_in(each)]


@cache
def _unsupported_values(struct: type[msgspec.Struct]) -> tuple[Callable[[tuple[Any, ...]], Any], Any]:
    """A function that selects the unsupported fields among a struct's values, and what it returns if all are absent.

    It selects runs of fields that follow each other: reading hundreds of fields by name takes four times as long."""
    names = {field.name for field in _unsupported_fields(struct)}
    runs, start = [slice(0), slice(0)], 0  # at least two: `itemgetter` makes a tuple then
    for is_unsupported, fields in groupby(struct.__struct_fields__, names.__contains__):
        end = start + len(list(fields))
        if is_unsupported:
            runs.append(slice(start, end))
        start = end
    return itemgetter(*runs), tuple((None,) * (run.stop - (run.start or 0)) for run in runs)


def _accepted(annotation: Any) -> list[Any] | None:
    """The values of an unsupported field that ask for nothing; None if the field is supported."""
    schemas = (meta.extra_json_schema or {} for meta in get_args(annotation)[1:] if isinstance(meta, Meta))
    return next((schema[UNSUPPORTED] for schema in schemas if UNSUPPORTED in schema), None)


def _asks_for_nothing(value: Any, accepted: list[Any]) -> bool:
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in accepted)


class PeerFields(msgspec.Struct, kw_only=True):
    # OpenAI
    audio: UnsupportedField = None
    modalities: OnlyTextField = None
    web_search_options: UnsupportedField = None
    moderation: UnsupportedField = None
    data_sources: UnsupportedField = None  # Azure
    # OpenAI: of its other endpoints
    messages: UnsupportedField = None
    prompt: UnsupportedField = None
    input: UnsupportedField = None
    instructions: UnsupportedField = None
    best_of: OneField = None
    echo: UnsupportedField = None
    suffix: UnsupportedField = None
    tools: UnsupportedField = None
    tool_choice: UnsupportedField = None
    functions: UnsupportedField = None
    function_call: UnsupportedField = None
    top_logprobs: UnsupportedField = None
    max_output_tokens: UnsupportedField = None
    reasoning: UnsupportedField = None
    reasoning_effort: UnsupportedField = None
    text: UnsupportedField = None
    include: UnsupportedField = None
    background: UnsupportedField = None
    conversation: UnsupportedField = None
    previous_response_id: UnsupportedField = None
    truncation: DisabledField = None
    # vLLM
    use_beam_search: UnsupportedField = None
    length_penalty: OneField = None
    bad_words: UnsupportedField = None
    include_stop_str_in_output: UnsupportedField = None
    truncate_prompt_tokens: UnsupportedField = None
    prompt_logprobs: NullField = None
    prompt_embeds: UnsupportedField = None
    allowed_token_ids: UnsupportedField = None
    logits_processors: UnsupportedField = None
    logprob_token_ids: UnsupportedField = None
    repetition_detection: UnsupportedField = None
    skip_special_tokens: TrueField = None
    add_special_tokens: UnsupportedField = None
    add_generation_prompt: TrueField = None
    continue_final_message: UnsupportedField = None
    chat_template: UnsupportedField = None
    chat_template_kwargs: UnsupportedField = None
    thinking_token_budget: NullField = None
    include_reasoning: TrueField = None
    documents: UnsupportedField = None
    media_io_kwargs: UnsupportedField = None
    mm_processor_kwargs: UnsupportedField = None
    structural_tag: UnsupportedField = None
    priority: UnsupportedField = None
    cache_salt: UnsupportedField = None
    kv_transfer_params: UnsupportedField = None
    return_token_ids: UnsupportedField = None
    return_tokens_as_token_ids: UnsupportedField = None
    vllm_xargs: UnsupportedField = None
    lora_request: UnsupportedField = None
    prompt_adapter_request: UnsupportedField = None
    extra_args: UnsupportedField = None
    prompt_token_ids: UnsupportedField = None
    max_repetition_pattern_size: UnsupportedField = None
    min_repetition_pattern_size: UnsupportedField = None
    repetition_min_count: UnsupportedField = None
    guided_json_object: UnsupportedField = None
    detokenize: TrueField = None
    skip_reading_prefix_cache: UnsupportedField = None
    # SGLang
    regex: UnsupportedField = None
    ebnf: UnsupportedField = None
    stop_regex: UnsupportedField = None
    no_stop_trim: UnsupportedField = None
    min_new_tokens: UnsupportedField = None
    separate_reasoning: TrueField = None
    stream_reasoning: TrueField = None
    lora_path: UnsupportedField = None
    session_params: UnsupportedField = None
    return_hidden_states: UnsupportedField = None
    return_routed_experts: UnsupportedField = None
    custom_logit_processor: UnsupportedField = None
    custom_params: UnsupportedField = None
    extra_key: UnsupportedField = None
    sampling_seed: NullField = None
    sampling_params: UnsupportedField = None
    input_ids: UnsupportedField = None
    input_embeds: UnsupportedField = None
    return_logprob: UnsupportedField = None
    logprob_start_len: UnsupportedField = None
    top_logprobs_num: UnsupportedField = None
    token_ids_logprob: UnsupportedField = None
    return_text_in_logprobs: UnsupportedField = None
    return_cached_tokens_details: UnsupportedField = None
    max_dynamic_patch: UnsupportedField = None
    min_dynamic_patch: UnsupportedField = None
    bootstrap_host: UnsupportedField = None
    bootstrap_port: UnsupportedField = None
    bootstrap_room: NullField = None
    routed_dp_rank: NullField = None
    disagg_prefill_dp_rank: NullField = None
    data_parallel_rank: NullField = None
    task: UnsupportedField = None
    # llama.cpp
    grammar: UnsupportedField = None
    grammar_lazy: UnsupportedField = None
    json_schema: UnsupportedField = None
    mirostat: UnsupportedField = None
    dynatemp_range: UnsupportedField = None
    typical_p: OneField = None
    top_n_sigma: UnlimitedField = None
    dry_multiplier: UnsupportedField = None
    xtc_probability: UnsupportedField = None
    repeat_penalty: OneField = None
    samplers: UnsupportedField = None
    min_keep: UnsupportedField = None
    n_predict: UnlimitedField = None
    n_indent: UnsupportedField = None
    n_keep: UnsupportedField = None
    n_cmpl: OneField = None
    n_probs: UnsupportedField = None
    post_sampling_probs: UnsupportedField = None
    t_max_predict_ms: UnsupportedField = None
    return_tokens: UnsupportedField = None
    return_progress: UnsupportedField = None
    timings_per_token: UnsupportedField = None
    response_fields: UnsupportedField = None
    reasoning_format: ParsedReasoning = None
    reasoning_budget_tokens: UnlimitedField = None
    thinking_forced_open: UnsupportedField = None
    image_data: UnsupportedField = None
    tfs_z: OneField = None
    penalize_nl: UnsupportedField = None
    adaptive_target: UnsupportedField = None
    t_max_prompt_ms: UnsupportedField = None
    grammar_type: UnsupportedField = None
    grammar_triggers: UnsupportedField = None
    preserved_tokens: UnsupportedField = None
    chat_format: UnsupportedField = None
    chat_parser: UnsupportedField = None
    parse_tool_calls: UnsupportedField = None
    generation_prompt: UnsupportedField = None
    reasoning_budget: UnlimitedField = None
    reasoning_loop_guard: UnsupportedField = None
    reasoning_in_content: UnsupportedField = None
    system_prompt: UnsupportedField = None
    input_prefix: UnsupportedField = None
    input_suffix: UnsupportedField = None
    input_extra: UnsupportedField = None
    # Ollama and text-generation-inference
    format: UnsupportedField = None
    system: UnsupportedField = None
    template: UnsupportedField = None
    context: UnsupportedField = None
    images: UnsupportedField = None
    think: NullField = None
    options: UnsupportedField = None
    num_predict: UnlimitedField = None
    num_ctx: UnsupportedField = None
    do_sample: NullField = None
    max_new_tokens: UnsupportedField = None
    max_length: UnsupportedField = None
    adapter_id: UnsupportedField = None
    return_full_text: UnsupportedField = None
    watermark: UnsupportedField = None
    inputs: UnsupportedField = None
    parameters: UnsupportedField = None
    decoder_input_details: UnsupportedField = None
    details: UnsupportedField = None
    top_n_tokens: UnsupportedField = None
    truncate: UnsupportedField = None
    tool_prompt: UnsupportedField = None
    guideline: UnsupportedField = None
    # transformers
    eos_token_id: NullField = None
    num_beams: OneField = None
    beam_width: OneField = None  # TensorRT-LLM's name
    num_return_sequences: OneField = None
    encoder_repetition_penalty: OneField = None
    no_repeat_ngram_size: UnsupportedField = None
    epsilon_cutoff: UnsupportedField = None
    eta_cutoff: UnsupportedField = None
    penalty_alpha: UnsupportedField = None
    bad_words_ids: UnsupportedField = None
    max_time: UnsupportedField = None
    stop_strings: UnsupportedField = None
    guidance_scale: OneField = None
    negative_prompt: UnsupportedField = None
    generation_config: UnsupportedField = None
    # text-generation-webui, KoboldCpp, TabbyAPI, Aphrodite
    tfs: OneField = None
    rep_pen: OneField = None
    smoothing_factor: UnsupportedField = None
    dynamic_temperature: UnsupportedField = None
    dynatemp_low: UnsupportedField = None
    dynatemp_high: UnsupportedField = None
    repetition_penalty_range: UnsupportedField = None
    temperature_last: UnsupportedField = None
    sampler_priority: UnsupportedField = None
    sampler_order: UnsupportedField = None
    ban_eos_token: UnsupportedField = None
    banned_tokens: UnsupportedField = None
    banned_strings: UnsupportedField = None
    allowed_tokens: UnsupportedField = None
    custom_token_bans: UnsupportedField = None
    token_healing: UnsupportedField = None
    grammar_string: UnsupportedField = None
    regex_pattern: UnsupportedField = None
    truncation_length: UnsupportedField = None
    cfg_scale: OneField = None
    # TensorRT-LLM, LMDeploy, MLX, NIM
    top_p_min: UnsupportedField = None
    top_p_decay: UnsupportedField = None
    prompt_ignore_length: UnsupportedField = None
    disaggregated_params: UnsupportedField = None
    migration_request: UnsupportedField = None
    nvext: UnsupportedField = None
    draft_model: UnsupportedField = None
    adapters: UnsupportedField = None
    role_mapping: UnsupportedField = None
    repetition_context_size: UnsupportedField = None
    tokens_to_generate: UnsupportedField = None
    # OpenRouter
    models: UnsupportedField = None
    route: UnsupportedField = None
    provider: UnsupportedField = None
    plugins: UnsupportedField = None
    transforms: UnsupportedField = None
    top_a: UnsupportedField = None
    preset: UnsupportedField = None
    image_config: UnsupportedField = None
    # Mistral
    random_seed: NullField = None
    safe_prompt: UnsupportedField = None
    prompt_mode: UnsupportedField = None
    guardrails: UnsupportedField = None
    document_image_limit: UnsupportedField = None
    document_page_limit: UnsupportedField = None
    # Fireworks, Together
    prompt_truncate_len: NullField = None
    context_length_exceeded_behavior: ErrorField = None
    mirostat_target: UnsupportedField = None
    raw_output: UnsupportedField = None
    perf_metrics_in_response: UnsupportedField = None
    echo_last: UnsupportedField = None
    sampling_mask: UnsupportedField = None
    reasoning_history: UnsupportedField = None
    safe_tokenization: UnsupportedField = None
    prompt_cache_isolation_key: UnsupportedField = None
    safety_model: UnsupportedField = None
    compliance: UnsupportedField = None
    # Groq, xAI, Cerebras, Perplexity, MiniMax
    citation_options: UnsupportedField = None
    compound_custom: UnsupportedField = None
    search_settings: UnsupportedField = None
    include_domains: UnsupportedField = None
    exclude_domains: UnsupportedField = None
    disable_tool_validation: UnsupportedField = None
    disable_reasoning: UnsupportedField = None
    clear_thinking: UnsupportedField = None
    reasoning_split: UnsupportedField = None
    search_parameters: UnsupportedField = None
    deferred: UnsupportedField = None
    search_domain_filter: UnsupportedField = None
    search_recency_filter: UnsupportedField = None
    search_mode: UnsupportedField = None
    return_images: UnsupportedField = None
    return_related_questions: UnsupportedField = None
    # Qwen (DashScope), GLM, SiliconFlow
    enable_thinking: NullField = None
    thinking_budget: NullField = None
    enable_search: UnsupportedField = None
    search_options: UnsupportedField = None
    enable_code_interpreter: UnsupportedField = None
    translation_options: UnsupportedField = None
    # Gemini and Cohere, through their OpenAI APIs
    candidate_count: OneField = None
    response_schema: UnsupportedField = None
    response_mime_type: UnsupportedField = None
    safety_settings: UnsupportedField = None
    cached_content: UnsupportedField = None
    thinking_config: UnsupportedField = None
    system_instruction: UnsupportedField = None
    contents: UnsupportedField = None
    tool_config: UnsupportedField = None
    safety_mode: UnsupportedField = None
    strict_tools: UnsupportedField = None
    citation_quality: UnsupportedField = None
    connectors: UnsupportedField = None
    # LiteLLM; and the argument of OpenAI's client, sent by mistake
    fallbacks: UnsupportedField = None
    mock_response: UnsupportedField = None
    extra_body: UnsupportedField = None
    # Anthropic, older names too
    stop_sequences: UnsupportedField = None
    stop_sequence: UnsupportedField = None
    max_tokens_to_sample: UnsupportedField = None
    mcp_servers: UnsupportedField = None
    container: UnsupportedField = None
    inference_geo: UnsupportedField = None
    speed: StandardField = None
    thinking: NullField = None
    output_config: UnsupportedField = None
    output_format: UnsupportedField = None
    # Workers AI
    lora: UnsupportedField = None
    image: UnsupportedField = None
    raw: UnsupportedField = None
    requests: UnsupportedField = None


class NoSamplingFields(PeerFields, kw_only=True):
    """Fields that only chats and completions have, for the APIs that lack most of the sampling parameters."""

    max_completion_tokens: UnsupportedField = None
    min_tokens: UnsupportedField = None
    top_k: UnlimitedField = None
    min_p: UnsupportedField = None
    repetition_penalty: OneField = None
    frequency_penalty: UnsupportedField = None
    presence_penalty: UnsupportedField = None
    logit_bias: UnsupportedField = None
    seed: NullField = None
    stop: UnsupportedField = None
    stop_token_ids: UnsupportedField = None
    ignore_eos: UnsupportedField = None
    n: OneField = None
    logprobs: UnsupportedField = None
    response_format: UnsupportedField = None
    guided_json: UnsupportedField = None
    guided_regex: UnsupportedField = None
    guided_choice: UnsupportedField = None
    guided_grammar: UnsupportedField = None
    guided_whitespace_pattern: UnsupportedField = None
    structured_outputs: UnsupportedField = None
    speculation: UnsupportedField = None


class OptionsFields(NoSamplingFields, kw_only=True):
    """Fields of the other APIs, for Ollama's, which has the sampling parameters in `options`."""

    max_tokens: NullField = None
    temperature: NullField = None
    top_p: NullField = None
    service_tier: DefaultTierField = None
    tool_choice: AutoField = None
    top_k: NullField = None
    repetition_penalty: NullField = None


class PeerMessageFields(msgspec.Struct, kw_only=True):
    """Fields of messages that would change the prompt: a message's struct declares those that its API has."""

    images: UnsupportedField = None  # Ollama
    prefix: UnsupportedField = None  # Mistral, DeepSeek
