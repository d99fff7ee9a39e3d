"""A model for scripted engines: SmolLM2's tokenizer under a template of the Hermes family, which knows tools."""

from pathlib import Path

NAME = "hermes-like"
ALIGNMENT = 32  # of GGUF's data, unless a file says otherwise
_KEY = b"tokenizer.chat_template" + (8).to_bytes(4, "little")  # 8: a string follows, its length first
TEMPLATE = """\
{%- if tools -%}
<|im_start|>system
Tools: {% for tool in tools %}{{ tool | tojson }}
{% endfor %}Call one as <tool_call>{"name": "...", "arguments": {...}}</tool_call>.<|im_end|>
{% endif -%}
{%- for message in messages -%}
{%- if message.role == "tool" -%}
<|im_start|>user
<tool_response>{{ message.content }}</tool_response>
{%- else -%}
<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor -%}
{%- endif -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


def hermes(gguf: Path, folder: Path) -> Path:
    """The file: the other, with the template in its place. What follows it stays aligned."""
    data = gguf.read_bytes()
    at = data.index(_KEY) + len(_KEY)
    end = at + 8 + int.from_bytes(data[at : at + 8], "little")
    template = TEMPLATE.encode()
    template += b" " * ((end - at - 8 - len(template)) % ALIGNMENT)  # after a tag that strips white space
    path = folder / f"{NAME}.gguf"
    path.write_bytes(data[:at] + len(template).to_bytes(8, "little") + template + data[end:])
    return path
