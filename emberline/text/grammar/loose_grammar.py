"""The grammar of calls that a model writes beside its format (`tool_calls.loose_calls`).

Free text goes on through every object whose first key is "name", unless the name is a tool's and `"arguments"` follows.
The text before the name does not depend on the tools, so reading it costs the same with two hundred tools as with one.
"""

from collections.abc import Iterable, Mapping

from emberline.protocol.grammar import Chars, Expression, Free, Text
from emberline.text.grammar.expressions.builder import Builder, choice, optional, repeat, sequence
from emberline.text.tool_calls.loose_calls import FENCE, MAX_LANGUAGE_CHARS, SPACES, WRAPPERS

_SPACE = Chars(tuple((ord(space), ord(space)) for space in sorted(SPACES)))
_GAP = repeat(_SPACE)
_LANGUAGE = repeat(Chars(((ord("a"), ord("z")),)), 0, MAX_LANGUAGE_CHARS)
_MAX_SPACES = 24  # in a row after the arguments, where only white space may follow
_END_GAP = repeat(_SPACE, 0, _MAX_SPACES)
_KEY = sequence(_GAP, Text('"name"'), _GAP, Text(":"), _GAP, Text('"'))
BEFORE_NAME = sequence(Text("{"), _KEY)
_AFTER_NAME = sequence(Text('"'), _GAP, Text(","), _GAP, Text('"arguments"'), _GAP, Text(":"))


def text_or_calls(
    builder: Builder, openings: Iterable[str], arguments: Mapping[str, Expression], calls: Expression, most: int
) -> Expression:
    """Text, then calls or none. `calls` are in the model's format, and text contains none of its `openings`. The calls
    beside the format are up to `most`, of tools with these arguments."""
    names = choice(map(Text, arguments))
    text = Free((*openings, BEFORE_NAME), (sequence(names, _AFTER_NAME),))
    named = sequence(text, BEFORE_NAME)
    ends = choice([text, sequence(text, calls)])
    return choice([sequence(repeat(named), ends), sequence(repeat(named, 1), _loose_calls(builder, arguments, most))])


def _loose_calls(builder: Builder, arguments: Mapping[str, Expression], most: int) -> Expression:
    """Return the grammar from the name in the first call to the end of the reply."""
    rests = choice(sequence(Text(name), _AFTER_NAME, _GAP, value) for name, value in arguments.items())
    wrapper = choice(Text(end) for end in (*WRAPPERS.values(), ","))
    end = sequence(_END_GAP, Text("}"), optional(Text("}")), repeat(_SPACE, 0, 2), optional(wrapper))
    call = builder.add(sequence(rests, end))
    begins = choice(sequence(Text(begin), _LANGUAGE) if begin == FENCE else Text(begin) for begin in WRAPPERS)
    more = sequence(_END_GAP, optional(sequence(begins, _END_GAP)), Text("{"), optional(Text("{")), _KEY, call)
    return sequence(call, repeat(more, 0, most - 1), repeat(_SPACE, 0, 2))
