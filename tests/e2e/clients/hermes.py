"""A part for actors: SmolLM2's tokenizer under a template of the Hermes family, which knows tools. It has no weights."""

from pathlib import Path

from gguf import GGUFReader, GGUFWriter

NAME = "hermes-like.gguf"
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
    """The file, made of another model's."""
    reader, path = GGUFReader(gguf), folder / NAME
    writer = GGUFWriter(path, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "tokenizer.chat_template"):
            writer.add_key_value(name, field.contents(), field.types[0], field.types[-1] if field.types[1:] else None)
    writer.add_chat_template(TEMPLATE)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path
