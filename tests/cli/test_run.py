"""`emberline run`, `ps` and `bench` against a scripted server."""

import json
import os
from pathlib import Path

import pytest

from tests.cli.console import Terminal, emberline
from tests.cli.scripted import MODEL, Scripted


def test_one_prompt_from_arguments(tmp_path: Path, scripted: Scripted) -> None:
    done = emberline("run", "--port", str(scripted.port), "say", "hello", "--seed", "7", home=tmp_path)
    assert (done.returncode, done.stdout) == (0, "Hello!\n")
    (asked,) = scripted.asked
    assert asked["messages"] == [{"role": "user", "content": "say hello"}]
    assert (asked["model"], asked["seed"], asked["stream"]) == (MODEL, 7, True)
    assert "max_tokens" not in asked


def test_a_prompt_and_a_document_on_stdin(tmp_path: Path, scripted: Scripted) -> None:
    words = ("run", "--port", str(scripted.port), "--system", "Be brief.", "Summarise:")
    done = emberline(*words, home=tmp_path, stdin="a long text\n")
    assert done.returncode == 0
    assert scripted.asked[0]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Summarise:\n\na long text"},
    ]


def test_figures_go_to_stderr(tmp_path: Path, scripted: Scripted) -> None:
    done = emberline("run", "--port", str(scripted.port), "-v", "x", home=tmp_path)
    assert done.stdout == "Hello!\n"
    assert "3 tokens at" in done.stderr
    assert "7 in the prompt (5 cached)" in done.stderr


def test_the_servers_error_is_the_message(tmp_path: Path, scripted: Scripted) -> None:
    scripted.error = (429, "too many requests, come back later")
    done = emberline("run", "--port", str(scripted.port), "x", home=tmp_path)
    assert (done.returncode, done.stderr) == (1, "emberline: too many requests, come back later\n")


def test_a_missing_key_is_named(tmp_path: Path, scripted: Scripted) -> None:
    scripted.error = (401, "send it as `Authorization: Bearer <key>`")
    done = emberline("run", "--port", str(scripted.port), "x", home=tmp_path)
    assert done.returncode == 1
    assert "EMBERLINE_AUTH_KEY" in done.stderr


def test_the_key_is_sent(tmp_path: Path, scripted: Scripted) -> None:
    emberline("run", "--port", str(scripted.port), "x", home=tmp_path, EMBERLINE_AUTH_KEY="my-key")
    assert {headers.get("Authorization") for headers in scripted.headers} == {"Bearer my-key"}


def test_ps(tmp_path: Path, scripted: Scripted) -> None:
    done = emberline("ps", "--port", str(scripted.port), home=tmp_path)
    head, row = done.stdout.splitlines()
    assert head.split() == ["MODEL", "WORKER", "ROLE", "DEVICE", "STATE", "RUNS", "WAITS", "KV", "USED", "TOKENS/S"]
    assert row.split()[:9] == [MODEL, "0", "cpu", "native", "ok", "1", "2", "25", "%"]
    report = json.loads(emberline("ps", "--json", "--port", str(scripted.port), home=tmp_path).stdout)
    assert 50 < report["engines"][0]["output_tokens_per_s"] <= 100


def test_bench(tmp_path: Path, scripted: Scripted) -> None:
    done = emberline("bench", "--json", "--input", "9", "--port", str(scripted.port), home=tmp_path)
    runs = json.loads(done.stdout)["runs"]
    assert [row["streams"] for row in runs] == [1, 8]
    assert all(row["tokens_per_s"] > 0 and row["prompt_tokens"] == 7 for row in runs)
    prompts = [asked["messages"][0]["content"] for asked in scripted.asked]
    assert len(set(prompts)) == 9
    assert all(asked["ignore_eos"] for asked in scripted.asked)


def test_bench_says_what_went_wrong(tmp_path: Path, scripted: Scripted) -> None:
    scripted.error = (400, "the prompt is too long")
    done = emberline("bench", "--port", str(scripted.port), home=tmp_path)
    assert (done.returncode, done.stderr) == (1, "emberline: the prompt is too long\n")


@pytest.fixture
def terminal(tmp_path: Path, scripted: Scripted) -> Terminal:
    return Terminal(scripted.port, tmp_path)


def test_a_conversation(terminal: Terminal, scripted: Scripted, tmp_path: Path) -> None:
    terminal.expect(MODEL)
    terminal.expect(">>> ")
    terminal.type("first\n")
    terminal.expect("Hello!")
    terminal.expect(">>> ")
    terminal.type('"""two\nlines"""\n')
    terminal.expect("Hello!")
    terminal.expect(">>> ")
    terminal.type("/clear\n")
    terminal.expect("forgotten")
    terminal.type("third\n")
    terminal.expect("Hello!")
    terminal.type("/nonsense\n")
    terminal.expect("There is no command /nonsense")
    terminal.type("/exit\n")
    assert terminal.close() == 0
    conversations = [[message["content"] for message in asked["messages"]] for asked in scripted.asked]
    assert conversations == [["first"], ["first", "Hello!", "two\nlines"], ["third"]]
    history = tmp_path / "history"
    assert "first" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0


def test_ctrl_c_stops_the_answer_and_not_the_program(terminal: Terminal, scripted: Scripted) -> None:
    scripted.pieces = ["word "] * 1000
    scripted.pause_s = 0.02
    terminal.expect(">>> ")
    terminal.type("go on\n")
    terminal.expect("word word")
    os.kill(terminal.process.pid, 2)
    terminal.expect(">>> ")
    assert scripted.left.wait(10)
    scripted.pieces = ["done"]
    terminal.type("and now?\n")
    terminal.expect("done")
    terminal.expect(">>> ")
    terminal.type("\x04")
    assert terminal.close() == 0
    said = scripted.asked[1]["messages"][1]["content"]
    assert said.startswith("word ")
    assert len(said) < 5000


def test_an_error_leaves_the_conversation_as_it_was(terminal: Terminal, scripted: Scripted) -> None:
    terminal.expect(">>> ")
    scripted.error = (503, "the engine is starting")
    terminal.type("lost\n")
    terminal.expect("emberline: the engine is starting")
    scripted.error = None
    terminal.type("kept\n")
    terminal.expect("Hello!")
    terminal.expect(">>> ")
    terminal.type("\x04")
    assert terminal.close() == 0
    assert scripted.asked[1]["messages"] == [{"role": "user", "content": "kept"}]


def test_a_model_cannot_steer_the_terminal(terminal: Terminal, scripted: Scripted) -> None:
    scripted.pieces = ["\x1b]0;owned\x07safe\x9b2J"]
    terminal.expect(">>> ")
    terminal.type("x\n")
    terminal.expect("]0;ownedsafe2J")
    terminal.expect(">>> ")
    terminal.type("\x04")
    assert terminal.close() == 0
