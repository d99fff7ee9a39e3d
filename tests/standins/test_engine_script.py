import pytest

from emberline.protocol.errors import BadInput
from emberline.protocol.token_ids import pack
from standins.engine_script import EngineScript, counting_token, of_request, parse
from tests.engine.fakes import request


def test_session_overrides_the_base_script():
    base = parse("say=count,itl_ms=2.5")
    assert base == EngineScript(say="count", itl_ms=2.5)
    assert of_request(request("a", [1]), base) is base
    special = of_request(request("a", [1], session="acme/standin:die_after=3,refuse=true"), base)
    assert special == EngineScript(say="count", itl_ms=2.5, die_after=3, refuse=True)


@pytest.mark.parametrize("text", ["say=shout", "say=", "nonsense=1", "itl_ms=soon", "say=1.x"])
def test_invalid_script_is_refused(text):
    with pytest.raises(BadInput, match="not a script"):
        parse(text)


def test_output():
    assert parse("").output(pack([5, 2, 6]), (2,)) == [5, 6]
    assert parse("say=17.4.9").output(pack([5]), (2,)) == [17, 4, 9]
    assert parse("say=count").output(pack([5]), (2,)) == []


def test_several_turns():
    script = parse("say=17.4/9")
    assert [script.output(pack([5]), (2,), turn) for turn in range(3)] == [[17, 4], [9], [9]]


def test_counting_skips_eos():
    assert [counting_token(n, 6, (2, 3)) for n in range(6)] == [0, 1, 4, 5, 0, 1]
