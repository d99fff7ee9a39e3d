"""Every field that OpenAI, its compatible servers, Anthropic and Workers AI know is supported, refused by name, or in
the list of fields that change nothing: none is ignored by accident."""

import re
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from emberline.api.anthropic.message_request import CountRequest, MessagesRequest
from emberline.api.common.unsupported_fields import ALTERNATIVES, PeerFields, PeerMessageFields, supported_fields
from emberline.api.http.unknown_fields import NO_EFFECT
from emberline.api.ollama.chat_request import OllamaChat, OllamaPrompt
from emberline.api.openai.chat import ChatRequest
from emberline.api.openai.completions import CompletionRequest
from emberline.api.openai.responses.request import ResponsesRequest
from emberline.api.workers_ai.run_request import RunRequest
from tests.api.fake_service import MODEL, FakeService

_DOCS = Path(__file__).parents[3] / "docs" / "api.md"
_TABLE = _DOCS.read_text().partition("| accepted without an effect | why |\n")[2].partition("\n\n")[0]
DOCUMENTED = set(re.findall(r"^\| `([\w.]+)` \| \S", _TABLE, re.MULTILINE))  # fields that the documentation explains
MESSAGES = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

# Each with a value that asks for something.
PEERS: dict[str, dict[str, Any]] = {
    "OpenAI chat": {
        "messages": MESSAGES, "model": MODEL, "audio": {"voice": "alloy"}, "frequency_penalty": 1,
        "function_call": {"name": "f"}, "functions": [{"name": "f"}], "logit_bias": {"5": 1}, "logprobs": True,
        "max_completion_tokens": 5, "max_tokens": 5, "metadata": {"a": "b"}, "modalities": ["text", "audio"], "n": 2,
        "parallel_tool_calls": False, "prediction": {"type": "content", "content": "x"}, "presence_penalty": 1,
        "prompt_cache_key": "k", "prompt_cache_retention": "24h", "reasoning_effort": "low",
        "response_format": {"type": "json_object"}, "safety_identifier": "s", "seed": 1, "service_tier": "flex",
        "stop": ["x"], "store": True, "stream": False, "stream_options": {"include_usage": True}, "temperature": 0.5,
        "tool_choice": "required", "tools": [TOOL], "top_logprobs": 2, "top_p": 0.5, "user": "u", "verbosity": "low",
        "web_search_options": {"a": 1}, "moderation": {"model": "m"}, "data_sources": [{}],
    },
    "OpenAI completions": {"prompt": "Hi", "best_of": 3, "echo": True, "suffix": "s", "logprobs": 2},
    "OpenAI responses": {
        "input": "Hi", "background": True, "context_management": [{"type": "compaction"}], "conversation": "conv_1",
        "include": ["reasoning.encrypted_content"], "instructions": "Be brief.", "max_output_tokens": 5,
        "max_tool_calls": 3, "previous_response_id": "resp_1", "prompt": {"id": "pmpt_1"},
        "reasoning": {"effort": "low"},
        "text": {"verbosity": "low"}, "truncation": "auto",
    },
    "vLLM": {
        "use_beam_search": True, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2, "length_penalty": 0.5,
        "early_stopping": True, "stop_token_ids": [5], "include_stop_str_in_output": True, "ignore_eos": True,
        "min_tokens": 3, "skip_special_tokens": False, "spaces_between_special_tokens": False,
        "truncate_prompt_tokens": 5, "truncation_side": "left", "prompt_logprobs": 0, "prompt_embeds": "AAAA",
        "allowed_token_ids": [5], "bad_words": ["no"], "add_generation_prompt": False, "continue_final_message": True,
        "documents": [{"text": "x"}], "chat_template": "{{ x }}",
        "chat_template_kwargs": {"enable_thinking": False}, "media_io_kwargs": {"a": 1},
        "mm_processor_kwargs": {"a": 1},
        "structured_outputs": {"regex": "a"}, "guided_json": {"type": "object"}, "guided_regex": "a",
        "guided_choice": ["a"],
        "guided_grammar": "root ::= \"a\"", "guided_decoding_backend": "auto", "guided_whitespace_pattern": "x",
        "structural_tag": "x", "priority": 3, "request_id": "r", "return_tokens_as_token_ids": True,
        "return_token_ids": True, "cache_salt": "s", "kv_transfer_params": {"a": 1}, "vllm_xargs": {"a": 1},
        "logits_processors": ["x"], "logprob_token_ids": [5], "thinking_token_budget": 0, "include_reasoning": False,
        "repetition_detection": {"a": 1}, "lora_request": {"lora_name": "a"}, "prompt_adapter_request": {"a": 1},
        "extra_args": {"a": 1}, "prompt_token_ids": [5], "max_repetition_pattern_size": 5, "guided_json_object": True,
        "min_repetition_pattern_size": 2, "repetition_min_count": 3, "detokenize": False,
        "skip_reading_prefix_cache": True,
    },
    "SGLang": {
        "no_stop_trim": True, "regex": "a", "ebnf": "a", "stop_regex": "a", "min_new_tokens": 3,
        "separate_reasoning": False, "stream_reasoning": False, "lora_path": "x", "session_params": {"a": 1},
        "return_hidden_states": True, "return_routed_experts": True, "custom_logit_processor": "x",
        "custom_params": {"a": 1}, "rid": "r", "extra_key": "k", "sampling_seed": 1, "input_ids": [5],
        "sampling_params": {"max_new_tokens": 5}, "input_embeds": [[0.5]], "return_logprob": True,
        "logprob_start_len": 5, "top_logprobs_num": 2, "token_ids_logprob": [5], "return_text_in_logprobs": True,
        "return_cached_tokens_details": True, "max_dynamic_patch": 5, "min_dynamic_patch": 1, "bootstrap_host": "h",
        "bootstrap_port": 1, "bootstrap_room": 0, "routed_dp_rank": 0, "disagg_prefill_dp_rank": 0,
        "data_parallel_rank": 0, "task": "domain", "routed_experts_start_len": 5, "custom_labels": {"a": "b"},
        "use_audio_in_video": True,
    },
    "llama.cpp": {
        "dynatemp_range": 0.5, "dynatemp_exponent": 2, "n_predict": 5, "n_indent": 1, "n_keep": 5, "n_cmpl": 2,
        "t_max_predict_ms": 5, "typical_p": 0.5, "repeat_penalty": 1.2, "repeat_last_n": 5, "dry_multiplier": 0.5,
        "dry_base": 2, "dry_allowed_length": 3, "dry_penalty_last_n": 5, "dry_sequence_breakers": ["\n"],
        "xtc_probability": 0.5, "xtc_threshold": 0.2, "mirostat": 2, "mirostat_tau": 4, "mirostat_eta": 0.2,
        "grammar": "root ::= \"a\"", "grammar_lazy": True, "json_schema": {"type": "object"}, "n_probs": 3,
        "min_keep": 2, "id_slot": 1, "cache_prompt": False, "return_tokens": True, "return_progress": True,
        "samplers": ["top_k"], "timings_per_token": True, "post_sampling_probs": True, "response_fields": ["content"],
        "reasoning_format": "none", "thinking_forced_open": True, "reasoning_budget_tokens": 5,
        "image_data": [{"id": 1}],
        "top_n_sigma": 1.5, "lora": [{"id": 0, "scale": 0.5}], "tfs_z": 0.5, "penalize_nl": True,
        "adaptive_target": 0.5, "adaptive_decay": 0.5, "t_max_prompt_ms": 5, "grammar_type": "tool_calls",
        "grammar_triggers": [{}], "preserved_tokens": ["<x>"], "chat_format": 1, "chat_parser": "x",
        "parse_tool_calls": True, "generation_prompt": "x", "reasoning_budget": 5, "reasoning_loop_guard": "on",
        "reasoning_in_content": True, "system_prompt": "Be brief.", "input_prefix": "a", "input_suffix": "b",
        "input_extra": [{}], "n_discard": 5, "n_cache_reuse": 5, "backend_sampling": True, "speculative.n_max": 5,
        "speculative.n_min": 1, "speculative.p_min": 0.5,
    },
    "Ollama, text-generation-inference": {
        "format": "json", "system": "Be brief.", "template": "{{ .Prompt }}", "context": [5], "images": ["AAAA"],
        "think": False, "options": {"num_ctx": 4096}, "keep_alive": "5m", "raw": True, "num_predict": 5, "num_ctx": 5,
        "do_sample": False, "max_new_tokens": 5, "max_length": 5, "adapter_id": "a", "return_full_text": True,
        "watermark": True, "inputs": "Hi", "parameters": {"max_new_tokens": 5}, "decoder_input_details": True,
        "details": True, "top_n_tokens": 2, "truncate": 5, "tool_prompt": "x", "guideline": "x",
    },
    "transformers": {
        "eos_token_id": 0, "num_beams": 4, "num_return_sequences": 2, "encoder_repetition_penalty": 1.2,
        "no_repeat_ngram_size": 3, "epsilon_cutoff": 0.1, "eta_cutoff": 0.1, "penalty_alpha": 0.6,
        "bad_words_ids": [[5]], "max_time": 5, "stop_strings": ["x"], "guidance_scale": 1.5, "negative_prompt": "x",
        "generation_config": {"temperature": 0}, "pad_token_id": 0,
    },
    "text-generation-webui, KoboldCpp, TabbyAPI": {
        "tfs": 0.5, "rep_pen": 1.2, "smoothing_factor": 0.3, "dynamic_temperature": True, "dynatemp_low": 0.5,
        "dynatemp_high": 1.5, "repetition_penalty_range": 1024, "temperature_last": True, "sampler_priority": ["top_k"],
        "sampler_order": [6, 0], "ban_eos_token": True, "banned_tokens": "5", "banned_strings": ["no"],
        "allowed_tokens": [5], "custom_token_bans": "5", "token_healing": True, "grammar_string": "root ::= \"a\"",
        "regex_pattern": "a", "truncation_length": 2048, "cfg_scale": 1.5, "smoothing_curve": 1,
    },
    "TensorRT-LLM, LMDeploy, MLX, NIM": {
        "top_p_min": 0.1, "top_p_decay": 0.9, "prompt_ignore_length": 5, "disaggregated_params": {"a": 1},
        "migration_request": {"a": 1}, "nvext": {"a": 1}, "draft_model": "m", "adapters": "a",
        "role_mapping": {"a": "b"}, "repetition_context_size": 20, "tokens_to_generate": 5, "num_draft_tokens": 3,
        "session_id": 1,
    },
    "Mistral": {
        "random_seed": 1, "safe_prompt": True, "prompt_mode": "reasoning", "guardrails": [{}],
        "document_image_limit": 5, "document_page_limit": 5,
    },
    "Fireworks, Together": {
        "prompt_truncate_len": 1024, "context_length_exceeded_behavior": "truncate", "mirostat_target": 1.5,
        "mirostat_lr": 0.1, "raw_output": True, "perf_metrics_in_response": True, "echo_last": 5,
        "sampling_mask": "count", "reasoning_history": "preserved", "safe_tokenization": True,
        "prompt_cache_isolation_key": "k", "prompt_cache_max_len": 5, "safety_model": "m", "compliance": "hipaa",
    },
    "Groq, xAI, Cerebras, Perplexity, MiniMax": {
        "citation_options": "enabled", "compound_custom": {"a": 1}, "search_settings": {"country": "US"},
        "include_domains": ["a.b"], "exclude_domains": ["a.b"], "disable_tool_validation": True,
        "disable_reasoning": True, "clear_thinking": True, "reasoning_split": True, "search_parameters": {"mode": "on"},
        "deferred": True, "search_domain_filter": ["a.b"], "search_recency_filter": "day", "search_mode": "academic",
        "return_images": True, "return_related_questions": True, "queue_threshold": 5,
    },
    "DashScope, GLM, SiliconFlow": {
        "enable_thinking": False, "thinking_budget": 0, "enable_search": True, "search_options": {"a": 1},
        "enable_code_interpreter": True, "translation_options": {"a": "b"}, "tool_stream": True,
    },
    "Gemini, Cohere": {
        "candidate_count": 2, "response_schema": {"type": "object"}, "response_mime_type": "application/json",
        "safety_settings": [{}], "cached_content": "c", "thinking_config": {"a": 1}, "system_instruction": "Be brief.",
        "contents": [{}], "tool_config": {"a": 1}, "safety_mode": "NONE", "strict_tools": True,
        "citation_quality": "fast", "connectors": [{}],
    },
    "TensorRT-LLM": {"beam_width": 4},
    "Anthropic, older": {"stop_sequence": "x", "max_tokens_to_sample": 5},
    "LiteLLM": {"fallbacks": ["m"], "mock_response": "x", "extra_body": {"top_k": 5}},
    "OpenRouter": {
        "models": ["a"], "route": "fallback", "provider": {"order": ["x"]}, "plugins": [{"id": "web"}],
        "transforms": ["middle-out"], "top_a": 0.5, "usage": {"include": True}, "trace": {"trace_id": "t"},
        "preset": "p", "image_config": {"a": 1},
    },
    "Anthropic": {
        "stop_sequences": ["x"], "mcp_servers": [{"name": "x"}], "container": "c", "inference_geo": "us",
        "speed": "fast", "thinking": {"type": "disabled"}, "output_format": {"type": "json_schema", "schema": {}},
        "output_config": {"effort": "low"}, "cache_control": {"type": "ephemeral"},
    },
    "Workers AI": {"image": [1], "requests": [{"prompt": "a"}]},
}  # fmt: skip
ENDPOINTS: dict[str, tuple[type[PeerFields], dict[str, Any]]] = {
    "/v1/chat/completions": (ChatRequest, {"model": MODEL, "messages": MESSAGES}),
    "/v1/completions": (CompletionRequest, {"model": MODEL, "prompt": "Hi"}),
    "/v1/responses": (ResponsesRequest, {"model": MODEL, "input": "Hi", "store": False}),
    "/v1/messages": (MessagesRequest, {"model": MODEL, "messages": MESSAGES, "max_tokens": 5}),
    "/v1/messages/count_tokens": (CountRequest, {"model": MODEL, "messages": MESSAGES}),
    f"/client/v4/accounts/a/ai/run/{MODEL}": (RunRequest, {"messages": MESSAGES}),
    "/api/chat": (OllamaChat, {"model": MODEL, "messages": MESSAGES, "stream": False}),
    "/api/generate": (OllamaPrompt, {"model": MODEL, "prompt": "Hi", "stream": False}),
}


def message_of(answer: httpx.Response) -> str:
    found = answer.json()
    if isinstance(found.get("error"), str):  # Ollama's
        return str(found["error"])
    return str(found["errors"][0]["message"] if "errors" in found else found["error"]["message"])


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_no_field_is_ignored_by_accident(client: httpx.AsyncClient, service: FakeService, path: str) -> None:
    struct, whole = ENDPOINTS[path]
    # Sampling has no effect on a count of tokens.
    supported = supported_fields(MessagesRequest if struct is CountRequest else struct)
    ignored = []
    for peer, fields in PEERS.items():
        for name, value in fields.items():
            if name in supported or name in whole:
                continue
            answer = await client.post(path, json=whole | {name: value})
            if answer.status_code == 200 and name not in NO_EFFECT:
                ignored.append(f"{peer}: {name}")
            elif answer.status_code != 200:
                assert answer.status_code == 400, answer.text
                assert f"`{name}`" in message_of(answer), (name, answer.text)
    assert not ignored, "\n".join(ignored)


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_values_that_ask_for_nothing_are_accepted(client: httpx.AsyncClient, path: str) -> None:
    """Clients with a form for every parameter send all of them."""
    _, whole = ENDPOINTS[path]
    neutral = {
        "modalities": ["text"], "mirostat": 0, "mirostat_tau": 5.0, "typical_p": 1.0, "repeat_penalty": 1.0,
        "top_n_sigma": -1, "grammar": "", "skip_special_tokens": True, "use_beam_search": False, "documents": None,
        "reasoning_format": "auto", "n_predict": -1, "dry_multiplier": 0.0, "add_generation_prompt": True,
    }  # fmt: skip
    answer = await client.post(path, json=whole | neutral)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(("path", "default"), [("/v1/chat/completions", False), ("/v1/completions", True)])
async def test_special_tokens_are_added_as_by_default(client: httpx.AsyncClient, path: str, default: bool) -> None:
    """vLLM's default differs between chats, whose template has them, and completions."""
    for value in (default, not default):
        answer = await client.post(path, json=ENDPOINTS[path][1] | {"add_special_tokens": value})
        assert answer.status_code == (200 if value is default else 400), answer.text


async def test_a_refusal_names_the_field_to_use_instead(client: httpx.AsyncClient) -> None:
    for path, field, instead in (
        ("/v1/chat/completions", "random_seed", "seed"),
        ("/v1/messages", "enable_thinking", "thinking"),
        ("/v1/chat/completions", "grammar", "guided_grammar"),
        ("/v1/chat/completions", "stop_sequences", "stop"),
        ("/v1/messages", "stop", "stop_sequences"),
        ("/v1/responses", "max_tokens", "max_output_tokens"),
        ("/v1/chat/completions", "max_tokens_to_sample", "max_tokens"),
        ("/v1/chat/completions", "stop_sequence", "stop"),
        ("/api/chat", "images", "messages[].images"),
        ("/api/chat", "response_format", "format"),
        ("/api/chat", "max_tokens", "options.num_predict"),
        ("/api/chat", "temperature", "options.temperature"),
        ("/api/chat", "system", "messages"),
        ("/api/chat", "raw", "/api/generate"),
        ("/api/chat", "suffix", "/api/generate"),
        ("/api/generate", "messages", "prompt"),
    ):
        answer = await client.post(path, json=ENDPOINTS[path][1] | {field: "x"})
        assert message_of(answer) == f"`{field}` is not supported; use `{instead}`"


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("/v1/chat/completions", "messages[0]"),
        ("/v1/messages", "messages[0]"),
        ("/v1/responses", "input[0]"),
        ("/api/chat", "messages[0]"),
    ],
)
async def test_fields_of_a_message_in_other_apis(client: httpx.AsyncClient, path: str, place: str) -> None:
    whole, supported = ENDPOINTS[path][1], {"/v1/chat/completions": ("tool_calls",), "/api/chat": ("images",)}
    for name, value in (("images", ["iVBORw0KGgo="]), ("prefix", True), ("tool_calls", [{"id": "c", "name": "f"}])):
        name_of_messages = "input" if path == "/v1/responses" else "messages"
        for given in (value, None):
            body = whole | {name_of_messages: [MESSAGES[0] | {name: given}]}
            answer = await client.post(path, json=body)
            if given is None or name in supported.get(path, ()) or (path, name) == ("/api/chat", "tool_calls"):
                assert answer.status_code == 200, answer.text
            else:
                assert answer.status_code == 400, answer.text
                assert f"`{place}.{name}` is not supported" in message_of(answer)


async def test_embeddings_refuse_what_only_chats_have(client: httpx.AsyncClient) -> None:
    for path, body in (("/api/embed", {"input": "Hi"}), ("/api/embeddings", {"prompt": "Hi"})):
        for field in ("images", "messages", "instruction"):
            answer = await client.post(path, json={"model": MODEL, **body, field: ["x"]})
            assert (answer.status_code, f"`{field}`" in answer.text) == (400, True), answer.text


def test_the_lists_are_disjoint() -> None:
    refused = {field.name for field in msgspec.structs.fields(PeerFields)}
    assert not refused & NO_EFFECT
    everything = {name for struct, _ in ENDPOINTS.values() for name in struct.__struct_fields__}
    assert ALTERNATIVES.keys() <= everything | {"tool_calls", *PeerMessageFields.__struct_fields__}
    named = {name.partition("[")[0].partition(".")[0] for names in ALTERNATIVES.values() for name in names}
    assert named <= everything | {"content", "tool_calls"}


def test_the_documentation_lists_the_fields_without_effect() -> None:
    assert DOCUMENTED == NO_EFFECT


def test_every_refused_field_has_a_value_above() -> None:
    """So that the first test asks every API about each."""
    asked = {"add_special_tokens", *(name for fields in PEERS.values() for name in fields)}  # it has a test of its own
    assert {field.name for field in msgspec.structs.fields(PeerFields)} <= asked
