"""What the caller calls the parts of its request, for errors that come from behind the door.

The service speaks of the canonical request (`output`, `tools[2].parameters`, `messages[3]`). A door that names these
otherwise leaves a `Names` on the call, and an error on its way out is told in the caller's words.
"""

import re
from collections.abc import Sequence

from emberline.protocol.errors import EmberlineError

_TOOL = re.compile(r"tools\[(\d+)\](?:\.function)?(.*)")
_MESSAGE = re.compile(r"messages\[(\d+)\](.*)")
_OUTPUT = re.compile(r"output\b(.*)")
_CHOICE = "tool_choice"


class Names:
    def __init__(
        self,
        *,
        output: str | None = None,
        tools: Sequence[str] = (),  # of each canonical tool
        schema: str = "parameters",  # what a tool calls its schema
        messages: Sequence[str] = (),  # of each canonical message; none: as they are
        choice: str = _CHOICE,
    ) -> None:
        self._output = output
        self._tools = tools
        self._schema = schema
        self._messages = messages
        self._choice = choice

    def of(self, param: str) -> str:
        """The caller's name of a canonical parameter; one that has no other name is returned as it is."""
        if param == _CHOICE:
            return self._choice
        if param == "tools" and self._tools:
            return self._tools[0].partition("[")[0]
        if self._output and (found := _OUTPUT.fullmatch(param)):
            return self._output + found[1]
        if (found := _TOOL.fullmatch(param)) and int(found[1]) < len(self._tools):
            return self._tools[int(found[1])] + re.sub(r"^\.parameters\b", f".{self._schema}", found[2])
        if (found := _MESSAGE.fullmatch(param)) and int(found[1]) < len(self._messages):
            return self._messages[int(found[1])]  # what is inside has no twin there
        return param

    def retell(self, error: EmberlineError) -> EmberlineError:
        """The error, naming the field as the caller does, in its message too."""
        if error.param is not None and (name := self.of(error.param)) != error.param:
            error.message = error.message.replace(f"`{error.param}`", f"`{name}`")
            error.param = name
        return error
