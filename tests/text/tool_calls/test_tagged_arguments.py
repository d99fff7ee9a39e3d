"""Arguments written as tagged keys and values, read as they arrive."""

from emberline.text.tool_calls.tagged_arguments import TaggedScanner, Tags

GLM = Tags("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n")


def test_white_space_between_arguments_is_read_once():
    """A model that goes on writing it must not cost more with every token."""
    scanner = TaggedScanner(GLM, {})
    held, arguments = "", ""
    for piece in (*["\n    "] * 1000, "<arg_", "key>n</arg_key>\n<arg_value>1</arg_value>\n", *["\n "] * 1000):
        held += piece
        read = scanner.push(held, final=False)
        held, arguments = held[read.n :], arguments + read.json
        assert len(held) < 64
    read = scanner.push(held + "</tool_call>", final=False)
    assert read.ended
    assert arguments + read.json == '{"n":1}'
