"""The fields of a conversation that OpenAI's and Cloudflare's bodies share: tools, and how to think."""

from typing import Any

from emberline.api.common.reasoning import Thoughtful
from emberline.api.common.tools import DeclaredTools, Picked, Toolset, toolset
from emberline.api.common.unsupported import refuse_unsupported
from emberline.api.http.call import Call
from emberline.api.http.field_names import Names
from emberline.protocol.request import OutputFormat


class Conversation(Thoughtful, kw_only=True):
    tools: DeclaredTools | None = None
    tool_choice: Picked | None = None
    parallel_tool_calls: bool | None = None

    def toolset(self) -> Toolset:
        return toolset(self.tools, self.tool_choice)

    def agency(self, call: Call) -> dict[str, Any]:
        """What the canonical request has beside messages and sampling; the call learns the caller's names of it."""
        refuse_unsupported(self)
        output, field = self.output()
        found = self.toolset()
        call.names = Names(output=field, tools=found.where)
        return {
            "tools": found.tools,
            "tool_choice": found.choice,
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "output": output,
            "reasoning": self.how_to_think(),
            "template_kwargs": self.template_kwargs,
        }


def is_json(output: OutputFormat | None) -> bool:
    return output is not None and output.kind in ("json_object", "json_schema")
