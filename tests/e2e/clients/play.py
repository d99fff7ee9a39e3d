"""What actors say (actor.py): lines, each with its cue."""

from pathlib import Path

import msgspec

from emberline.protocol.request import ToolCall
from emberline.text.tool_calls.formats import GENERIC


class Line(msgspec.Struct, frozen=True, kw_only=True):
    cue: str = ""  # the line is for prompts with this text in them
    say: str = ""
    calls: tuple[tuple[str, dict[str, object]], ...] = ()  # then these tools are called: names and arguments

    @property
    def text(self) -> str:
        """As a model without a tool format of its own writes it."""
        if not self.calls:
            return self.say
        calls = [ToolCall("", name, msgspec.json.encode(arguments).decode()) for name, arguments in self.calls]
        return self.say + GENERIC.write(calls)


class Play(msgspec.Struct, frozen=True):
    """Of the lines whose cue has come, the last is said: a cue from a tool's result moves the play on."""

    lines: tuple[Line, ...]

    def place(self, prompt: str) -> int:
        """Which line is next after this prompt."""
        return max(place for place, line in enumerate(self.lines) if line.cue in prompt)

    def write(self, path: Path) -> None:
        path.write_bytes(msgspec.json.encode(self))

    @classmethod
    def read(cls, path: Path) -> "Play":
        return msgspec.json.decode(path.read_bytes(), type=cls)


def play(*lines: Line) -> Play:
    assert not lines[0].cue, "the first line is for whatever comes"
    return Play(lines)


def calling(name: str, cue: str = "", say: str = "", **arguments: object) -> Line:
    return Line(cue=cue, say=say, calls=((name, arguments),))


def saying(text: str, cue: str = "") -> Line:
    return Line(cue=cue, say=text)
