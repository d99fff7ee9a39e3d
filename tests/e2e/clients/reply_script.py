"""What a scripted engine (scripted_engine.py) replies: texts and tool calls, chosen by what the prompt contains."""

from pathlib import Path

import msgspec

from emberline.protocol.request import ToolCall
from emberline.text.tool_calls.formats import GENERIC


class ScriptedReply(msgspec.Struct, frozen=True, kw_only=True):
    trigger: str = ""  # the reply is for prompts that contain this text
    say: str = ""
    calls: tuple[tuple[str, dict[str, object]], ...] = ()  # the tools to call after it: names and arguments

    @property
    def text(self) -> str:
        """The output of a model without a tool format of its own."""
        if not self.calls:
            return self.say
        calls = [ToolCall("", name, msgspec.json.encode(arguments).decode()) for name, arguments in self.calls]
        return self.say + GENERIC.write(calls)


class ReplyScript(msgspec.Struct, frozen=True):
    """The last reply whose trigger is in the prompt is given, so a trigger in a tool's result advances the script."""

    replies: tuple[ScriptedReply, ...]

    def index_for(self, prompt: str) -> int:
        return max(index for index, reply in enumerate(self.replies) if reply.trigger in prompt)

    def write(self, path: Path) -> None:
        path.write_bytes(msgspec.json.encode(self))

    @classmethod
    def read(cls, path: Path) -> "ReplyScript":
        return msgspec.json.decode(path.read_bytes(), type=cls)


def reply_script(*replies: ScriptedReply) -> ReplyScript:
    assert not replies[0].trigger, "the first reply is the default: it has no trigger"
    return ReplyScript(replies)


def tool_call(name: str, trigger: str = "", say: str = "", **arguments: object) -> ScriptedReply:
    return ScriptedReply(trigger=trigger, say=say, calls=((name, arguments),))


def text_reply(text: str, trigger: str = "") -> ScriptedReply:
    return ScriptedReply(trigger=trigger, say=text)
