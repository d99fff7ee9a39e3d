"""How the benchmark of copied values reads replies and compares the two modes."""

import json

import pytest

from benchmarks.copied_values import VALUES, Answer, Case, ask_for, cases, copied, lenient_values, ratio
from benchmarks.generation_apis import APIS, Got


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"name": "O\'Brien"}', "O'Brien"),
        ('Sure:\n```json\n{\n  "name": "a \\"b\\""\n}\n```\nDone.', 'a "b"'),
        ('{"name": "create_record", "arguments": {"name": "Zoë"}}', "Zoë"),
        ('{"name": "C:\\Users"}', "C:\\Users"),  # no JSON, but plain what is meant
        ("name: 42", "42"),
    ],
)
def test_a_free_reply_is_read_leniently(text: str, value: str) -> None:
    assert value in lenient_values(text)


def test_a_forced_reply_counts_only_as_what_it_says() -> None:
    case = Case("names", "Zoë", 0)
    assert copied(case, Got('{"name": "Zoë"}'), "forced")
    assert not copied(case, Got('{"name": "\'Zoë\'"}'), "forced")
    assert copied(case, Got(calls=[("create_record", '{"name":"Zoë"}')]), "forced")
    with pytest.raises(json.JSONDecodeError):
        copied(case, Got("Zoë"), "forced")


def test_numbers_are_compared_as_numbers() -> None:
    case = Case("numbers", "99.95", 0)
    assert case.scores(99.95)
    assert case.scores("99.950")
    assert not case.scores(99.9)
    assert not case.scores(None)
    assert not Case("numbers", "1", 0).scores(True)


def test_there_are_at_least_200_requests_and_both_modes_ask_the_same() -> None:
    todo = cases(3, None)
    assert len(todo) >= 200
    assert {case.kind for case in todo} == set(VALUES)
    for case in todo[:3]:
        asked = [ask_for("m", case, "tools", mode, seeded=True) for mode in ("free", "forced")]
        free, forced = (APIS["chat"].body(ask) for ask in asked)
        assert (free.pop("tool_choice"), forced.pop("tool_choice")) == ("auto", "required")
        assert free == forced
        assert case.value in free["messages"][0]["content"]


def test_the_ratio_and_its_interval() -> None:
    def answers(n_free: int, n_forced: int) -> list[Answer]:
        return [
            Answer(Case("names", f"v{n}", 0), mode, n < n_copied, "", 1)
            for mode, n_copied in (("free", n_free), ("forced", n_forced))
            for n in range(20)
        ]

    assert ratio(answers(20, 20)) == (1.0, 1.0, 1.0)
    value, low, high = ratio(answers(20, 10))
    assert value == 0.5
    assert 0.2 < low < 0.5 < high < 0.8
