"""Small models of the families that call tools: their special tokens, their templates' habits."""

from functools import cache

from emberline.text.text_model import TextModel
from tests.text.chats import CHATML, text_model
from tests.text.vocab import byte_level, sentencepiece

QWEN = """
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
    {{- '# Tools\n\n<tools>' }}
    {%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\n</tools>\n\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>' }}
    {{- '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(last=0) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}
        {%- if message.reasoning_content and loop.index0 > ns.last %}
            {{- '<think>\n' + message.reasoning_content.strip('\n') + '\n</think>\n\n' }}
        {%- endif %}
        {{- message.content.lstrip('\n') }}
        {%- for call in message.tool_calls or [] %}
            {%- if not loop.first or message.content %}{{- '\n' }}{%- endif %}
            {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}
"""
LLAMA3 = """
{{- bos_token }}
{%- if tools is not none %}
    {{- '<|start_header_id|>system<|end_header_id|>\n\nRespond in the format ' }}
    {{- '{"name": function name, "parameters": dictionary of argument name and its value}.\n' }}
    {%- for tool in tools %}{{- tool | tojson }}{{- '\n' }}{%- endfor %}{{- '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}{{- raise_exception('one call at a time') }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
        {{- '{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | tojson }}{{- '}<|eot_id|>' }}
    {%- else %}
        {%- set role = 'ipython' if message.role == 'tool' else message.role %}
        {{- '<|start_header_id|>' + role + '<|end_header_id|>\n\n' + message.content + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}
"""
_MISTRAL = """
{{- bos_token }}
{%- if tools %}{{- '[AVAILABLE_TOOLS]' }}{{- tools | tojson }}{{- '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{- '[INST]' + message.content + '[/INST]' }}
    {%- elif message.role == 'tool' %}
        {%- if message.tool_call_id | length != 9 %}{{- raise_exception('ids have 9 characters') }}{%- endif %}
        {{- '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}
    {%- elif message.tool_calls %}
        %CALLS%
        {{- eos_token }}
    {%- else %}{{- message.content + eos_token }}
    {%- endif %}
{%- endfor %}
"""
MISTRAL_LIST = _MISTRAL.replace(
    "%CALLS%",
    "{{- '[TOOL_CALLS][' }}{%- for call in message.tool_calls %}"
    "{%- if call.id | length != 9 %}{{- raise_exception('ids have 9 characters') }}{%- endif %}"
    '{{- \'{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- call.function.arguments | tojson }}{{- '}' }}"
    "{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}{{- ']' }}",
)
MISTRAL = _MISTRAL.replace(
    "%CALLS%",
    "{{- message.content }}{%- for call in message.tool_calls %}"
    "{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' }}{{- call.function.arguments | tojson }}{%- endfor %}",
)
KIMI = """
{%- if tools %}{{- '<|im_system|>tool_declare<|im_middle|>' }}{{- tools | tojson }}{{- '<|im_end|>' }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_assistant|>assistant<|im_middle|><think>' + (message.reasoning_content or '') + '</think>' }}
        {{- message.content }}
        {%- if message.tool_calls %}
            {{- '<|tool_calls_section_begin|>' }}
            {%- for call in message.tool_calls %}
                {{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' }}
                {{- call.function.arguments | tojson }}{{- '<|tool_call_end|>' }}
            {%- endfor %}
            {{- '<|tool_calls_section_end|>' }}
        {%- endif %}
        {{- '<|im_end|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_system|>tool<|im_middle|>## Return of ' + message.tool_call_id + '\n' + message.content }}
        {{- '<|im_end|>' }}
    {%- else %}
        {{- '<|im_' + message.role + '|>' + message.role + '<|im_middle|>' + message.content + '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_assistant|>assistant<|im_middle|>' }}
    {{- '<think></think>' if thinking is defined and not thinking else '<think>' }}
{%- endif %}
"""
R1 = """
{{- bos_token }}
{%- for message in messages %}
    {%- set content = message.content.split('</think>')[-1] if message.role == 'assistant' else message.content %}
    {{- '<|' + message.role + '|>' + content }}{%- if message.role == 'assistant' %}{{- eos_token }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|><think>\n' }}{%- endif %}
"""
_TURNS = """
{%- if tools %}{{- '<|system|>' }}{{- tools | tojson }}{%- endif %}
{%- for message in messages %}
    {{- '<|' + message.role + '|>' + message.content }}
    {%- if message.tool_calls %}%BEGIN%{%- for call in message.tool_calls %}
        {%- set args = call.function.arguments %}
        {%- if not loop.first %}{{- '%BETWEEN%' }}{%- endif %}%CALL%
    {%- endfor %}%CLOSE%{%- endif %}
    {%- if message.role == 'assistant' %}{{- eos_token }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
"""


def _turns(call: str, begin: str = "", close: str = "", between: str = "") -> str:
    source = _TURNS.replace("%CALL%", call).replace("%BETWEEN%", between)
    return source.replace("%BEGIN%", f"{{{{- '{begin}' }}}}").replace("%CLOSE%", f"{{{{- '{close}' }}}}")


DEEPSEEK = _turns(
    "{{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.function.name + '\\n```json\\n' }}{{- args | tojson }}"
    "{{- '\\n```<｜tool▁call▁end｜>' }}",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "\\n",
)
DEEPSEEK_V31 = _turns(
    "{{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' }}{{- args | tojson }}"
    "{{- '<｜tool▁call▁end｜>' }}",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
)
_VALUE = "{{- value if value is string else value | tojson }}"
GLM = _turns(
    "{{- '<tool_call>' + call.function.name }}{%- for key, value in args.items() %}<arg_key>{{ key }}</arg_key>"
    f"<arg_value>{_VALUE}</arg_value>{{%- endfor %}}{{{{- '</tool_call>' }}}}"
)
GLM_LINES = _turns(
    "{{- '<tool_call>' + call.function.name }}\n{% for key, value in args.items() %}<arg_key>{{ key }}</arg_key>\n"
    f"<arg_value>{_VALUE}</arg_value>\n{{% endfor %}}</tool_call>",
    between="\\n",
)
QWEN3_CODER = _turns(
    "{{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}{%- for key, value in args.items() %}"
    f"{{{{- '<parameter=' + key + '>\\n' }}}}{_VALUE}{{{{- '\\n</parameter>\\n' }}}}{{%- endfor %}}"
    "{{- '</function>\\n</tool_call>' }}",
    between="\\n",
)
_TURN_TOKENS = ("<eos>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
_DEEPSEEK = (
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
)
_GLM = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_THINK = ("<think>", "</think>")
_CALL = ("<tool_call>", "</tool_call>")
_KIMI = (
    *("[EOS]", "<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
    *("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
)
_INST = ("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]")
_INST += ("[/TOOL_RESULTS]", "[TOOL_CALLS]")


@cache
def model(name: str) -> TextModel:
    if name == "qwen":  # `<tool_call>` and `<think>` are tokens and text at once, as in Qwen's own tokenizers
        return text_model(byte_level("qwen2", _CHATML, (*_THINK, *_CALL)), QWEN)
    if name == "hermes-special":
        return text_model(byte_level("qwen2", (*_CHATML, *_THINK, *_CALL)), QWEN)
    if name == "hermes-text":
        return text_model(byte_level("qwen2", _CHATML), QWEN)
    if name == "generic":
        return text_model(byte_level("qwen2", _CHATML), CHATML)
    if name == "llama3":
        special = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>")
        return text_model(byte_level("llama-bpe", special), LLAMA3, bos_token="<|begin_of_text|>")
    if name == "mistral-list":
        return text_model(sentencepiece(_INST, bos_token_id=1), MISTRAL_LIST, bos_token="<s>", eos_token="</s>")
    if name == "mistral-spaced":
        spaced = MISTRAL_LIST.replace("[TOOL_CALLS]", "[TOOL_CALLS] ")
        return text_model(sentencepiece(_INST, bos_token_id=1), spaced, bos_token="<s>", eos_token="</s>")
    if name == "mistral":
        return text_model(byte_level("tekken", (*_INST, "[ARGS]")), MISTRAL, bos_token="<s>", eos_token="</s>")
    if name == "kimi":
        return text_model(byte_level("qwen2", (*_KIMI, *_THINK)), KIMI)
    if name == "deepseek":
        return text_model(byte_level("qwen2", (*_TURN_TOKENS, *_DEEPSEEK)), DEEPSEEK, eos_token="<eos>")
    if name == "deepseek-v3.1":
        return text_model(byte_level("qwen2", (*_TURN_TOKENS, *_DEEPSEEK)), DEEPSEEK_V31, eos_token="<eos>")
    if name == "glm":
        return text_model(byte_level("qwen2", _TURN_TOKENS, (*_CALL, *_GLM)), GLM, eos_token="<eos>")
    if name == "glm-lines":
        return text_model(byte_level("qwen2", (*_TURN_TOKENS, *_CALL, *_GLM)), GLM_LINES, eos_token="<eos>")
    if name == "qwen3-coder":
        return text_model(byte_level("qwen2", _TURN_TOKENS, _CALL), QWEN3_CODER, eos_token="<eos>")
    assert name == "r1"
    special = ("<bos>", "<eos>", "<|user|>", "<|assistant|>", "<|system|>")
    return text_model(byte_level("qwen2", special, _THINK), R1, bos_token="<bos>", eos_token="<eos>")


CALLERS = (
    "qwen",
    "hermes-special",
    "hermes-text",
    "generic",
    "llama3",
    "mistral-list",
    "mistral-spaced",
    "mistral",
    "kimi",
    "deepseek",
    "deepseek-v3.1",
    "glm",
    "glm-lines",
    "qwen3-coder",
)
