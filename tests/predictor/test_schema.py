"""The schema of a predictor, from its syntax tree alone."""

import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberline.predictor.schema import Signature, openapi, read_signature
from emberline.protocol.errors import BadInput, PredictionFailed, Unsupported
from emberline.protocol.prediction import check_input, check_output

HEAD = (
    "from cog import *\nimport cog\nfrom typing import *\nSIZES = [1, 2]\nNAMES = {'a': 1, 'b': 2}\n"
    "class Mode(str, Enum):\n    FAST = 'fast'\n    SLOW = 'slow'\n"
)


def signature(arguments: str, returns: str = "str", before: str = "", head: str = "") -> Signature:
    method = f"    {before}\n    def run(self, {arguments}) -> {returns}:\n        ..."
    return read_signature(f"{HEAD}{head}\nclass Runner(BaseRunner):\n{method}".encode(), "run.py:Runner")


@pytest.mark.parametrize(
    ("arguments", "field", "is_required"),
    [
        ("a: str", {"type": "string"}, True),
        ("a: int = 3", {"type": "integer", "default": 3}, False),
        ("a: float = Input(ge=0, le=1)", {"type": "number", "minimum": 0, "maximum": 1}, True),
        ("a: bool = Input(description='d')", {"type": "boolean", "description": "d"}, True),
        ("a: cog.Path", {"type": "string", "format": "uri"}, True),
        ("a: Optional[str]", {"type": "string", "nullable": True}, False),
        ("a: str | None = None", {"type": "string", "nullable": True}, False),
        ("a: 'str'", {"type": "string"}, True),
        ("a: list[Path]", {"type": "array", "items": {"type": "string", "format": "uri"}}, True),
        ("a: Literal['x', 'y']", {"type": "string", "enum": ["x", "y"]}, True),
        ("a: int = Input(choices=SIZES)", {"type": "integer", "enum": [1, 2]}, True),
        ("a: str = Input(choices=list(NAMES.keys()))", {"type": "string", "enum": ["a", "b"]}, True),
        ("a: str = Input(regex='^x')", {"type": "string", "pattern": "^x"}, True),
        ("a: str = Input(min_length=1, max_length=9)", {"type": "string", "minLength": 1, "maxLength": 9}, True),
        ("a: dict", {"type": "object"}, True),
        ("a: Any", {}, True),
        ("*, a: str", {"type": "string"}, True),
        ("a: str = Input(default=os.environ['X'])", {"type": "string"}, False),
        ("a: str = str(uuid4())", {"type": "string"}, False),
        ("a: str = Input(description=f'one of {SIZES}')", {"type": "string"}, True),
        ("a: Mode = Input(default=Mode.FAST)", {"type": "string", "enum": ["fast", "slow"]}, False),
    ],
)  # fmt: skip
def test_inputs(arguments: str, field: dict[str, Any], is_required: bool) -> None:
    found = signature(arguments).input
    (own,) = found["properties"].values()
    assert {name: value for name, value in own.items() if name not in ("title", "x-order")} == field
    assert ("a" in found.get("required", ())) == is_required


def test_outputs_streaming_and_concurrency() -> None:
    assert signature("", "Path").output == {"title": "Output", "type": "string", "format": "uri"}
    text = signature("", "ConcatenateIterator[str]", "@cog.streaming")
    assert text.streams
    assert text.output["x-cog-array-display"] == "concatenate"
    assert openapi(text)["paths"]["/predictions"]["post"]["x-cog-streaming"] is True
    assert signature("", "Iterator[str]").streams, "as on Replicate, without the decorator"
    assert "x-cog-streaming" not in openapi(signature(""))["paths"]["/predictions"]["post"]
    assert signature("", "str", "@concurrent(max=4)").slots == 4
    model = signature("", "Out", head="class Out(BaseModel):\n    a: str\n    b: int = 3")
    assert model.output["properties"] == {"a": {"type": "string"}, "b": {"type": "integer"}}
    assert read_signature(b"def run(a: str) -> str: ...", "run.py:run").input["required"] == ["a"]


def test_types_and_choices_of_other_files_of_the_project(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "types.py").write_text("class Inner: b: int\nclass Out(BaseModel):\n    a: Inner\n")
    (tmp_path / "constants.py").write_text("SIZES = ['s', 'm']\n")
    source = b"from parts.types import Out as Result\nfrom constants import *\nfrom numpy import x\n"
    source += b"def run(a: str = Input(choices=SIZES)) -> Result: ..."
    found = read_signature(source, "run.py:run", tmp_path)
    assert found.input["properties"]["a"]["enum"] == ["s", "m"]
    assert found.output["properties"]["a"]["properties"] == {"b": {"type": "integer"}}
    with pytest.raises(Unsupported, match="Result, has no schema here"):
        read_signature(source.replace(b"SIZES", b"['s']"), "run.py:run")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("a", "the input `a` has no type"),
        ("a: np.ndarray", r"the type of `a`, np.ndarray, has no schema here"),
        ("*a: str", "`\\*` arguments have no schema"),
        ("a: str = Input(choices=load())", "or is computed \\(load\\(\\)\\)"),
        ("a: str = Input(choices=[1j])", "a value of `a` is no JSON"),
        ("a: Optional[()]", r"the type Optional\[\(\)\] of `a` has no schema"),
        (f"a: '{'-' * 100_000}1'", "the type of `a` cannot be read"),
        ("a: int = Input(ge='x')", r"`Input\(ge='x'\)` of `a` is no limit"),
        ("a: Me", "contain themselves"),
        ("a: T8", "contain themselves, or too many"),
        ("a: str = Input(ge=1" + " + 1" * 1500 + ")", "nested too deeply|is computed"),
    ],
)
def test_what_has_no_schema_is_refused_by_name(arguments: str, message: str) -> None:
    classes = ["class Me(BaseModel):\n    me: 'Me'", "class T0(BaseModel):\n    a: int"]
    classes += [
        f"class T{n}(BaseModel):\n" + "".join(f"    {name}: T{n - 1}\n" for name in "abcd") for n in range(1, 9)
    ]
    with pytest.raises((BadInput, Unsupported), match=message):
        signature(arguments, head="\n".join(classes))


def test_sources_that_are_no_predictor() -> None:
    for source in (
        b"",
        b"\0",
        b"class Other: ...",
        b"class Runner: ...",
        b"(" * 100_000,
        b"x = " + b"-" * 50_000 + b"1",
    ):
        with pytest.raises(BadInput):
            read_signature(source, "run.py:Runner")


_VALUES = st.one_of(st.none(), st.booleans(), st.integers(), st.text(), st.lists(st.integers()))


@given(st.dictionaries(st.sampled_from(["a", "b", "c", "d"]), _VALUES))
def test_an_input_is_accepted_or_refused_by_name(values: dict[str, Any]) -> None:
    schema = signature("a: str, b: int = Input(default=1, ge=0, le=9), c: Path = None").input
    is_right = (
        isinstance(values.get("a"), str)
        and type(values.get("b", 1)) is int
        and 0 <= values.get("b", 1) <= 9
        and (values.get("c") is None or (isinstance(values["c"], str) and values["c"].startswith("data:")))
        and "d" not in values
    )
    if is_right:
        check_input(values, schema)
        return
    with pytest.raises(BadInput) as caught:
        check_input(values, schema)
    assert caught.value.param in ("a", "b", "c", "d")


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({}, "a"),
        ({"a": 1}, "a"),
        ({"a": "x", "b": True}, "b"),
        ({"a": "x", "b": 10}, "b"),
        ({"a": "x", "c": "/etc/passwd"}, "c"),
        ({"a": "x", "d": 1}, "d"),
    ],
)
def test_a_wrong_input_names_its_field(values: dict[str, Any], param: str) -> None:
    with pytest.raises(BadInput) as caught:
        check_input(values, signature("a: str, b: int = Input(default=1, le=9), c: Path = None").input)
    assert caught.value.param == param


def test_checking_takes_linear_time() -> None:
    schema = signature("a: list[int]").input
    began = time.process_time()
    check_input({"a": list(range(200_000))}, schema)
    assert time.process_time() - began < 5


OUT = "class Out(BaseModel):\n    a: int\n    b: list[Path]\n    c: Optional[str]\n    d: str = None"


@pytest.mark.parametrize(
    ("returns", "output"),
    [
        ("str", b'"x"'),
        ("str", b"null"),
        ("float", b"1"),
        ("int", b"3.0"),
        ("list[int]", b"[1.0, 2]"),
        ("Path", b'"data:image/png;base64,AA=="'),
        ("Optional[Path]", b"null"),
        ("Any", b'{"a": [1]}'),
        ("Union[str, int]", b"3"),
        ("dict", b"{}"),
        ("tuple[int, str]", b'[1, "x"]'),
        ("tuple[int, ...]", b"[1, 2]"),
        ("ConcatenateIterator[str]", b'["a", "b"]'),
        ("Out", b'{"a": 1, "b": [], "c": null, "d": null, "e": 1}'),
        ("Out", b'{"a": 1.0, "b": []}'),
        ("None", b"null"),
    ],
)
def test_outputs_that_are_what_the_schema_says(returns: str, output: bytes) -> None:
    check_output(output, signature("", returns, head=OUT).output)


@pytest.mark.parametrize(
    ("returns", "output", "problem"),
    [
        ("str", b"1", "`output` must be of type string"),
        ("list[str]", b"[null]", "`output` must be of type string"),
        ("int", b"true", "`output` must be of type integer"),
        ("int", b"1.5", "`output` must be of type integer"),
        ("Path", b"null", "`output` is no file"),
        ("Path", b'"/etc/passwd"', "`output` is no file"),
        ("Literal['x', 'y']", b'"z"', "`output` must be one of x, y"),
        ("Union[str, int]", b"[]", "`output` has none of its types"),
        ("tuple[int, ...]", b'[1, "x"]', "`output` must be of type integer"),
        ("list[str]", b'["a", 1]', "`output` must be of type string"),
        ("Out", b'{"b": [], "c": ""}', "`output.a` is missing"),
        ("Out", b'{"a": null, "b": [], "c": ""}', "`output.a` must be of type integer"),
        ("Out", b'{"a": 1, "b": ["/src/x"], "c": ""}', "`output.b` is no file"),
        ("Any", b"[" * 100_000, "nested too deeply"),
        ("str", b"", "no JSON"),
    ],
)
def test_outputs_that_are_not_what_the_schema_says(returns: str, output: bytes, problem: str) -> None:
    with pytest.raises(PredictionFailed, match=problem):
        check_output(output, signature("", returns, head=OUT).output)
