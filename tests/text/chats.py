"""Text models of the families that are served, small: their tokenizers' kinds and their templates' habits."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from emberline.text.chat_template import ChatTemplate
from emberline.text.text_model import TextModel
from emberline.text.tokenizers.gguf_tokenizer import gguf_parts
from emberline.text.tokenizers.tokenizer import Tokenizer
from tests.text.vocab import byte_level, sentencepiece

CHATML = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Drops the reasoning of every turn before the last user message, as Qwen 3 does.
REASONING = """
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' and '</think>' in content and loop.index0 < ns.last %}
        {%- set content = content.split('</think>')[-1] %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim"
    " + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}"
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}"
    "{% else %}{% set role = message['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)
LLAMA2 = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'system' %}{{ message['content'] + ' ' }}"
    "{% else %}{{ ' ' + message['content'] | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)
PHI = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def text_model(metadata: Mapping[str, Any], template: str | None, **tokens: str) -> TextModel:
    return TextModel(Tokenizer(gguf_parts(metadata)), ChatTemplate(template, tokens))


def _chatml(template: str | None) -> TextModel:
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    return text_model(byte_level("qwen2", special, ("<think>", "</think>")), template)


@cache
def family(name: str) -> TextModel:
    if name == "chatml":
        return _chatml(CHATML)
    if name == "reasoning":
        return _chatml(REASONING)
    if name == "plain":
        return _chatml(None)
    if name == "llama3":
        special = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
        metadata = byte_level("llama-bpe", special, add_bos_token=True)
        metadata["tokenizer.ggml.bos_token_id"] = metadata["tokenizer.ggml.tokens"].index("<|begin_of_text|>")
        return text_model(metadata, LLAMA3, bos_token="<|begin_of_text|>")
    if name == "gemma":
        special = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")
        metadata = sentencepiece(special, ("  ", "   ", "\n", "\n\n"), bos_token_id=1, add_space_prefix=False)
        return text_model(metadata, GEMMA, bos_token="<bos>", eos_token="<eos>")
    if name == "phi":
        special = ("<s>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
        return text_model(sentencepiece(special, bos_token_id=1), PHI)
    assert name == "llama2"
    metadata = sentencepiece(("<s>", "</s>"), bos_token_id=1, eos_token_id=2)
    return text_model(metadata, LLAMA2, bos_token="<s>", eos_token="</s>")


FAMILIES = ("chatml", "reasoning", "plain", "llama3", "gemma", "phi", "llama2")
