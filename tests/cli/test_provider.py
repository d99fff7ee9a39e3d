"""`emberline provider` on the store of this machine, as where no server runs."""

import json
from pathlib import Path

import pytest

from .test_key import Run, emberline  # noqa: F401


def test_keys_of_providers(emberline: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:  # noqa: F811
    assert "No provider has a key" in emberline("provider", "ls")[1]
    monkeypatch.setenv("SOME_KEY", "sk-very-secret")
    status, output, error = emberline("provider", "add", "openai", "--key-env", "SOME_KEY")
    assert (status, error) == (0, "")
    words = ("--key-env", "SOME_KEY", "--url", "https://llm.example/v1", "--account", "alice")
    assert emberline("provider", "add", "mine", *words)[0] == 0
    listed = json.loads(emberline("provider", "list", "--json")[1])["data"]
    assert [(row["name"], row["account"], row["url"]) for row in listed] == [
        ("openai", None, None),
        ("mine", "alice", "https://llm.example/v1"),
    ]
    shown = output + emberline("provider", "ls")[1] + emberline("audit", "--json")[1]
    assert "sk-very-secret" not in shown
    assert "provider.add" in shown
    assert emberline("provider", "rm", "mine", "--account", "alice")[0] == 0
    assert emberline("provider", "rm", "mine", "--account", "alice")[0] == 1
    assert len(json.loads(emberline("provider", "ls", "--json")[1])["data"]) == 1


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("unknown", "--key-env", "SOME_KEY"), "needs a `url`"),
        (("openai", "--key-env", "NOT_SET"), "NOT_SET is not set"),
        (("Open AI", "--key-env", "SOME_KEY"), "name"),
        (("mine", "--key-env", "SOME_KEY", "--url", "ftp://x"), "http"),
        (("openai", "--key-env", "SOME_KEY", "--kind", "gemini"), "`kind` goes with a `url`"),
    ],
)
def test_what_cannot_be_stored(
    emberline: Run,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    part: str,
) -> None:
    monkeypatch.setenv("SOME_KEY", "sk-very-secret")
    status, _, error = emberline("provider", "add", *words)
    assert (status, part in error) == (1, True), error
