"""The Markdown renderer and the schema checker, as the browser runs them."""

import random
from typing import Any

import pytest

from emberline.api.playground import assets
from tests.api.playground.browser import Stage

DRAW = """async ([module, texts]) => {
  const { MarkdownWriter } = await import(module);
  return texts.map((pieces) => {
    const root = document.createElement("div");
    const writer = new MarkdownWriter(root);
    for (const piece of pieces) writer.write(piece);
    writer.end();
    for (const block of root.querySelectorAll(".block:empty")) block.remove();
    return [...root.children].map((block) => block.innerHTML).join("");
  });
}"""
CHECK = """async ([module, name, texts]) => {
  const checks = await import(module);
  return texts.map((text) => checks[name](text).problem ?? null);
}"""
CASES = {
    "Hello *you* and **me**, _us_, __all__, ~~none~~": (
        "<p>Hello <em>you</em> and <strong>me</strong>, <em>us</em>, <strong>all</strong>, <del>none</del></p>"
    ),
    "snake_case_name and 2 * 3 * 4 and **open": "<p>snake_case_name and 2 * 3 * 4 and **open</p>",
    "***both***": "<p><strong><em>both</em></strong></p>",
    "`a*b*` and ``c`d``": "<p><code>a*b*</code> and <code>c`d</code></p>",
    "two\nlines\n\nnext": "<p>two<br>lines</p><p>next</p>",
    "# Title ##  ": '<h3 class="h1">Title</h3>',
    "# ##": '<h3 class="h1">##</h3>',
    "# One\n## Two": '<h3 class="h1">One</h3><h4 class="h2">Two</h4>',
    "> quoted\n> more\n\nnot": "<blockquote><p>quoted<br>more</p></blockquote><p>not</p>",
    "a\n\n---\n\nb": "<p>a</p><hr><p>b</p>",
    "- one\n- two\n  - inner\n\n  more\n- three": (
        "<ul><li><p>one</p></li><li><p>two</p><ul><li><p>inner</p></li></ul><p>more</p></li><li><p>three</p></li></ul>"
    ),
    "3. three\n4. four": '<ol start="3"><li><p>three</p></li><li><p>four</p></li></ol>',
    "\\*not\\* \\`code\\`": "<p>*not* `code`</p>",
    "<b>text</b> & more": "<p>&lt;b&gt;text&lt;/b&gt; &amp; more</p>",
    "| a | b |\n|:-:|--:|\n| 1 | 2 |": (
        '<div class="table" tabindex="0" role="region" aria-label="Table"><table><thead><tr><th class="center">a</th>'
        '<th class="end">b</th></tr></thead><tbody><tr><td class="center">1</td><td class="end">2</td></tr></tbody>'
        "</table></div>"
    ),
}
DOCUMENT = """# Title

Text with **bold**, `code` and [a link](https://ok.test).

```python
def f(x):
    # comment

    return "string"
```
- one
- two
  1. inner
  2. inner

     ```
     fenced
     ```

> quote
> - list in it

| a | b |
|---|---|
| 1 | 2 |
| 3 | 4 |

The *end*
"""


@pytest.fixture(scope="module")
def module(stage: Stage) -> str:
    stage.page.goto(stage.url)
    return f"/assets/{assets.load().digest}"


def draw(stage: Stage, module: str, *texts: list[str]) -> list[str]:
    found: list[str] = stage.page.evaluate(DRAW, [f"{module}/markdown.js", list(texts)])
    return found


def test_cases(stage: Stage, module: str) -> None:
    found = draw(stage, module, *([text] for text in CASES))
    assert dict(zip(CASES, found, strict=True)) == CASES


def test_code_block_at_the_beginning(stage: Stage, module: str) -> None:
    text = "```py\nx\n```\n\n```\ny\n```"
    whole, pieces = draw(stage, module, [text], [*text])
    assert whole == pieces
    assert pieces.count("<figure") == 2


def test_code_block(stage: Stage, module: str) -> None:
    (found,) = draw(stage, module, ["```py\nif x < 1:\n```\nafter"])
    assert '<span class="t-keyword">if</span> x &lt; <span class="t-number">1</span>:' in found
    assert found.endswith("<p>after</p>")


def test_long_lines_take_linear_time(stage: Stage, module: str) -> None:
    """Half a megabyte, where quadratic time would be a quarter of an hour."""
    gap = " " * 250_000
    lines = [f"#{gap}a{gap}b", f"```{gap}{gap}`", "~" * 500_000 + "`", f"| a |\n--{gap}{gap}x", f"a | b\n{gap}{gap}"]
    drawn = draw(stage, module, *([f"{line}\n\nend"] for line in lines), [f"[a]({' ' * 3600}" * 140])
    assert all(found.endswith("<p>end</p>") for found in drawn[:-1])


def test_links(stage: Stage, module: str) -> None:
    texts = [
        "[a](https://ok.test/x)",
        "https://ok.test/a_b_c.",
        "[b](javascript:alert(1))",
        "![c](http://ok.test/i.png)",
    ]
    a, bare, bad, image = draw(stage, module, *([text] for text in texts))
    assert 'href="https://ok.test/x"' in a
    assert ">https://ok.test/a_b_c</a>." in bare
    assert "href" not in bad
    assert "<img" not in image


def test_pieces_make_the_same_document(stage: Stage, module: str) -> None:
    """However the text is cut, the result is that of the whole."""
    draws = random.Random(1)
    cuts = [[*DOCUMENT], DOCUMENT.splitlines(keepends=True)]
    for _ in range(40):
        ends = sorted(draws.sample(range(len(DOCUMENT)), 12))
        cuts.append([DOCUMENT[a:b] for a, b in zip([0, *ends], [*ends, len(DOCUMENT)], strict=True)])
    whole, *others = draw(stage, module, [DOCUMENT], *cuts)
    assert "<table>" in whole
    assert whole.count("<li>") == 5
    for pieces, other in zip(cuts, others, strict=True):
        assert other == whole, pieces


@pytest.mark.parametrize(
    "text", ["*", "[", "`", "_a", "![](", "<", "- ", "> ", "| ", "#", "~~", "**a ", "1. ", "```\n", "\\"]
)
def test_no_text_takes_long(stage: Stage, module: str, text: str) -> None:
    """Delimiters without partners, 40 KB at a time: the page's time limit is the test's."""
    whole = (text * 40_000)[:40_000]
    draw(stage, module, [whole[start : start + 4000] for start in range(0, len(whole), 4000)])


def check(stage: Stage, module: str, name: str, *texts: str) -> list[Any]:
    found: list[Any] = stage.page.evaluate(CHECK, [f"{module}/json_schema.js", name, list(texts)])
    return found


def test_schemas(stage: Stage, module: str) -> None:
    valid = [
        "{}",
        "true",
        '{"type": ["string", "null"], "enum": ["a", null]}',
        '{"$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}, "$ref": "#/$defs/a"}',
        '{"anyOf": [{"type": "integer", "minimum": 0}, {"pattern": "^a+$"}]}',
    ]
    assert check(stage, module, "parseSchema", *valid) == [None] * len(valid)
    wrong = {
        "": "empty",
        "{": "JSON",
        "[]": "must be an object",
        '{"type": "text"}': "text",
        '{"properties": {"a": {"required": "b"}}}': "properties.a",
        '{"items": [1]}': "items",
        '{"$ref": "#/$defs/none"}': "leads nowhere",
        '{"pattern": "("}': "regular expression",
        '{"enum": []}': "enum",
        '{"minLength": -1}': "minLength",
        "[" * 50_000: "",
        '{"not":' * 500 + "{}" + "}" * 500: "nested",
    }
    for (text, part), problem in zip(wrong.items(), check(stage, module, "parseSchema", *wrong), strict=True):
        assert problem, text[:100]
        assert part in problem, text[:100]


def test_tools(stage: Stage, module: str) -> None:
    one = '{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}'
    texts = [
        "",
        one,
        f"[{one}]",
        f"[{one}, {one}]",
        '{"name": "f"}',
        one.replace('"f"', '"a b"'),
        one.replace("object", "x"),
    ]
    found = check(stage, module, "parseTools", *texts)
    assert [problem is None for problem in found] == [True, True, True, False, False, False, False]
