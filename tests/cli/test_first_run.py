"""`emberline` alone: an offer on a terminal, the help everywhere else; service, completion, synonyms."""

import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from emberline.catalog.model_card import DEFAULT_MODEL
from emberline.catalog.model_store import ModelStore
from emberline.catalog.offers import ModelMemory, offers, recommended
from emberline.cli import service
from emberline.cli.completion import script
from emberline.config import resolve
from emberline.protocol.errors import BadInput
from tests.cli.console import emberline

GIB = 1 << 30


def alone(home: Path, typed: bytes, **env: str) -> str:
    """The output of `emberline` in a pseudo-terminal."""
    master, slave = pty.openpty()
    kept = {name: value for name, value in os.environ.items() if name != "CI" and not name.startswith("EMBERLINE_")}
    process = subprocess.Popen(
        [sys.executable, "-m", "emberline.cli.main"],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**kept, "EMBERLINE_HOME": str(home), "EMBERLINE_PORT": "1", "TERM": "dumb", **env},
    )
    os.close(slave)
    os.write(master, typed)
    seen, end_s = b"", time.monotonic() + 60
    while time.monotonic() < end_s and select.select([master], [], [], 60)[0]:
        try:
            seen += os.read(master, 65_536)
        except OSError:  # the process has ended
            break
    os.close(master)
    assert process.wait(60) == 0
    return seen.decode()


def test_a_terminal_is_offered_three_models(tmp_path: Path) -> None:
    shown = alone(tmp_path, b"nine\n\n")
    assert "Three models that fit this machine" in shown
    assert "smollm2" in shown
    assert "apache-2.0" in shown
    assert "a number from 1 to" in shown
    assert not (tmp_path / "models").exists()


def test_continuous_integration_and_pipes_are_not_asked(tmp_path: Path) -> None:
    assert "usage: emberline COMMAND" in alone(tmp_path, b"", CI="true")
    assert "usage: emberline COMMAND" in emberline(home=tmp_path).stdout


@pytest.mark.parametrize(
    ("memory", "names"),
    [
        (ModelMemory(12 * GIB, False, 2), ["qwen3:0.6b", "qwen2.5-coder:1.5b", "smollm2:135m"]),
        (ModelMemory(48 * GIB, False, 16), ["qwen3:14b", "qwen2.5-coder:14b", "smollm2:135m"]),
        (ModelMemory(141 * GIB, True), ["qwen3-coder:30b", "gpt-oss:120b", "qwen3:32b"]),
    ],
)
def test_recommended_models_fit_and_need_no_token(tmp_path: Path, memory: ModelMemory, names: list[str]) -> None:
    found = offers(ModelStore(tmp_path), memory)
    chosen = recommended(found, memory)
    assert [offer.name for offer in chosen] == names
    assert all(offer.fits and offer.card.license == "apache-2.0" for offer in chosen)
    assert (chosen[-1].card.id == DEFAULT_MODEL) != memory.on_gpu


def test_help_is_grouped_and_names_a_command(tmp_path: Path) -> None:
    lines = emberline("--help", home=tmp_path).stdout.splitlines()
    assert [line for line in lines if line.endswith(":")] == ["everyday:", "operate:", "manage:", "scale:"]
    assert emberline("help", "pull", home=tmp_path).stdout.startswith("usage: emberline pull")


@pytest.mark.parametrize(
    ("words", "same"),
    [(["list"], ["ls"]), (["gateway", "ls"], ["gateway", "list"]), (["key", "list"], ["key", "ls"])],
)
def test_other_words_for_a_command(tmp_path: Path, words: list[str], same: list[str]) -> None:
    found, wanted = (emberline(*given, "--json", home=tmp_path) for given in (words, same))
    assert found.returncode == wanted.returncode == 0
    assert found.stdout == wanted.stdout


@pytest.mark.parametrize(
    ("flag", "answer"),
    [
        ("--model", "emberline serve MODEL"),
        ("--dtype=auto", "the model's own files"),
        ("--api-key", "EMBERLINE_AUTH_KEY"),
    ],
)
def test_flags_of_vllm_without_a_counterpart_are_answered(tmp_path: Path, flag: str, answer: str) -> None:
    done = emberline("serve", flag, home=tmp_path)
    assert done.returncode == 2
    assert answer in done.stderr


def test_flags_of_vllm_are_accepted(tmp_path: Path) -> None:
    flags = ("--max-model-len", "4096", "--max-num-seqs=8", "--gpu-memory-utilization", "2")
    done = emberline("serve", *flags, home=tmp_path)
    assert "gpu-memory-share" in done.stderr  # the value out of range: all flags before it were read


def test_completion_knows_commands_actions_and_flags(tmp_path: Path) -> None:
    (tmp_path / "script").write_text(script("bash"))
    ask = (
        'source {}; complete_words() {{ COMP_WORDS=("$@"); COMP_CWORD=$(($#-1)); COMPREPLY=(); compopt() {{ :; }};'
        ' _emberline; echo "${{COMPREPLY[@]}}"; }};'
        " complete_words emberline la; complete_words emberline key ro; complete_words emberline serve m --context"
    )
    command = ["bash", "-c", ask.format(tmp_path / "script")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["launch", "rotate", "--context-len"]
    assert "complete -c emberline -n '__fish_seen_subcommand_from pull' -l json" in script("fish")


@pytest.mark.parametrize("is_root", [True, False])
def test_the_service_runs_this_installation(tmp_path: Path, is_root: bool) -> None:
    text = service.unit(resolve({}, {}, tmp_path), ["qwen3:8b"], is_root=is_root, has_gpu=True)
    assert f"ExecStart={Path(sys.executable).parent / 'emberline'} serve qwen3:8b\n" in text
    assert ("DynamicUser=yes" in text) == is_root
    assert ("PrivateDevices=no" in text) == is_root
    assert f"EMBERLINE_HOME={'/var/lib/emberline' if is_root else tmp_path} " in text


def test_a_service_has_words_as_they_were_given(tmp_path: Path) -> None:
    home, words = tmp_path / "a b%c", ["it's", 'a "b"', "$x", "100%", "back\\slash", "plain"]
    text = service.unit(resolve({}, {}, home), words, is_root=False, has_gpu=False)
    assert r""" serve "it's" "a \"b\"" $$x "100%%" "back\\slash" plain""" + "\n" in text
    assert f'Environment="EMBERLINE_HOME={tmp_path}/a b%%c" EMBERLINE_LOG_FORMAT=json\n' in text
    assert f"EnvironmentFile=-{tmp_path}/a b%%c/emberline.env\n" in text
    with pytest.raises(BadInput, match="not printable"):
        service.unit(resolve({}, {}, home), ["a\nb"], is_root=False, has_gpu=False)


def test_service_print_changes_nothing(tmp_path: Path) -> None:
    done = emberline("service", "install", "--print", home=tmp_path, XDG_CONFIG_HOME=str(tmp_path / "config"))
    assert "[Install]" in done.stdout
    assert not (tmp_path / "config").exists()
