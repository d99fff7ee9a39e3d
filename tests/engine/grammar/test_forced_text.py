"""Where a grammar leaves one text only, a reply has the tokens that the model's own tokenizer gives that text."""

import pytest

from emberline.engine.grammar.guide import GrammarGuide
from emberline.engine.grammar.vocabulary import Vocabulary
from emberline.protocol.frames import Vocabulary as Frame
from emberline.protocol.grammar import Grammar, Repeat, Text
from emberline.protocol.request import GenerateRequest, Tool, ToolCall, ToolChoice
from emberline.protocol.token_ids import unpack
from emberline.text.grammar.reply_grammar import build
from emberline.text.prompt import grammar_spec
from emberline.text.text_model import TextModel
from tests.engine.grammar.bench import compiler
from tests.engine.grammar.samples import frame
from tests.engine.grammar.test_guide import allowed, compiled
from tests.text.tool_calls.models import CALLERS, model

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
ARGUMENTS = '{"city": "Paris"}'


def guide_of(text: TextModel, grammar: Grammar) -> GrammarGuide:
    with compiler(text.vocab_size, text.vocabulary) as engine:
        return compiled(engine, grammar).guide()


@pytest.mark.parametrize("name", CALLERS)
def test_a_required_call_begins_with_the_tokenizer_s_tokens(name: str) -> None:
    text = model(name)
    request = GenerateRequest(
        id="r", model="m", prompt="", tools=(Tool("get_weather", "", CITY),), tool_choice=ToolChoice("required")
    )
    spec = grammar_spec(text, request, False)
    assert spec is not None
    guide = guide_of(text, build(spec))
    call = text.tool_format.write([ToolCall("", "get_weather", ARGUMENTS)])
    ids = unpack(text.encode(call, special=True))
    n_head = len(unpack(text.encode(call.partition("city")[0], special=True)))
    n_forced = 0
    for place, token_id in enumerate(ids):
        tokens = allowed(guide)
        assert token_id in tokens, "the tokenizer's own token is always among those allowed"
        n_forced += len(tokens) == 1 and place < n_head
        assert guide.accept(token_id)
    assert guide.complete
    assert n_forced >= n_head - 4, "before the arguments little is left to choose"


JSON_WORDS = ('":', '":"', "na", "me", "name")  # tokens 256 to 260


@pytest.mark.parametrize(
    ("text", "cut", "first"),
    [
        (b'name":', True, 260),  # decided: no token joins `name` with what follows
        (b'":', True, None),  # `":"` may follow
        (b'":', False, 256),  # a special token follows
        (b"nam", True, None),  # `name` may follow
        (b"nam", False, 258),
    ],
)
def test_the_end_of_a_forced_text_may_become_part_of_a_longer_token(text: bytes, cut: bool, first: int | None) -> None:
    assert Vocabulary(frame(JSON_WORDS), 302).first_token(text, cut=cut) == first


def test_added_tokens_are_found_before_bytes_are_merged() -> None:
    words = ("<call>", "-", "ca", "ll", "call", "<call>\n")
    plain = frame(words)
    merged = Vocabulary(plain, 302)
    assert merged.tokenize(b"<call>") == [ord("<"), 260, ord(">")]  # no two tokens merge to `<call>`
    added = Vocabulary(Frame(plain.tokens, plain.special, [256]), 302)
    assert added.tokenize(b"a<call>call<call>") == [ord("a"), 256, 260, 256]
    assert added.first_token(b"<call>", cut=True) == 256, "nothing joins an added token"


def test_a_word_that_the_vocabulary_cannot_spell_ends_what_is_forced() -> None:
    tokens = [b"", *(bytes([byte]) for byte in range(1, 256)), *([b""] * 46)]
    assert Vocabulary(Frame(tokens, {}), 302).tokenize(b"a b\0 c") == [ord("a")]


def test_an_endless_forced_text_is_followed_a_little_way() -> None:
    endless = Repeat(Repeat(Repeat(Text("ab"), 999, 999), 999, 999), 999, 999)
    guide = guide_of(model("qwen"), Grammar((endless,)))
    assert 40 < len(guide.forced()) <= 96
    assert len(allowed(guide)) == 1


@pytest.mark.parametrize("before", [[], [b"<pad>", b"\n", b"  "]], ids=["Llama 2", "Gemma"])
def test_byte_fallback_tokens_spell_only_what_no_other_token_does(before: list[bytes]) -> None:
    fallback = [bytes([byte]) for byte in range(256)]
    tokens = [*before, *fallback, b"\n", b"a"]
    vocabulary = Vocabulary(Frame(tokens, {}), len(tokens))
    first_line_break = before.index(b"\n") if before else len(fallback)
    assert vocabulary.tokenize(b"\na\x07") == [first_line_break, len(tokens) - 1, len(before) + 7]


def test_calls_among_many_tools_can_be_written_in_each_form() -> None:
    """With many different schemas, some recursive, the matcher splits a grammar: not where a call begins."""
    text = model("hermes-text")
    tree = {"type": "object", "properties": {"of": {"$ref": "#"}, "any": {}}}
    fields = [{f"p{n}_{k}": {"type": "string", "maxLength": 9 + n} for k in range(4)} for n in range(60)]
    tools = [Tool(f"f{n}", "", {"type": "object", "properties": each}) for n, each in enumerate(fields)]
    tools += [Tool(f"tree{n}", "", tree) for n in range(20)]
    request = GenerateRequest(id="r", model="m", prompt="", tools=tuple(tools))
    spec = grammar_spec(text, request, False)
    assert spec is not None
    with compiler(text.vocab_size, text.vocabulary) as engine:
        grammar = compiled(engine, build(spec))
        for call in (
            '<tool_call>\n{"name": "f7", "arguments": {"p7_1": "a"}}\n</tool_call>',
            '<tool_call>\n{"name": "tree3", "arguments": {"of": {"any": [1]}}}\n</tool_call>',
            '```json\n{\n  "name": "f59",\n  "arguments": {"p59_3": "b"}\n}\n```',
            '[{"name": "Ann"}, {"name": "f7", "x": 1}] {"name":"tree19","arguments":{}}',
        ):
            guide = grammar.guide()
            for token_id in unpack(text.encode(f"I see.\n{call}", special=True)):
                assert token_id in allowed(guide)
                assert guide.accept(token_id)
            assert guide.complete
            assert not guide.accept(unpack(text.encode("x", special=False))[0]), "nothing follows a call"
