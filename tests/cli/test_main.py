"""The command line: help, errors and the model commands."""

import argparse
import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from emberline import __version__
from emberline.catalog.model_card import describe_path
from emberline.catalog.model_store import ModelEntry
from emberline.cli import common, doctor, serve
from emberline.cli.main import COMMANDS, main
from emberline.config import resolve
from emberline.protocol.errors import BadInput
from emberline.server.http_worker import load_models
from tests.catalog.tiny_models import gguf_bytes
from tests.cli.console import emberline, emberline_process
from tests.soak.server_process import free_port


@pytest.mark.parametrize("words", [["--help"], ["-h"], []])
def test_help_lists_every_command(tmp_path: Path, words: list[str]) -> None:
    done = emberline(*words, home=tmp_path)
    assert done.returncode == 0
    for command in COMMANDS:
        assert f"\n  {command}" in done.stdout


def test_the_process_ends_with_the_status_of_the_command(tmp_path: Path) -> None:
    done = emberline_process("version", home=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"emberline {__version__}\n")
    done = emberline_process("sevre", home=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == emberline("sevre", home=tmp_path).stderr


def test_each_command_has_help_and_none_imports_torch() -> None:
    """One process asks for all of them: a process for each would take seconds."""
    commands = sorted(set(COMMANDS) - {"worker"})
    script = (
        "import sys\nfrom emberline.cli.main import main\n"
        f"for command in {commands!r}:\n"
        "    try: main([command, '--help'])\n    except SystemExit: pass\n"
        "    assert 'torch' not in sys.modules, command\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    missing = [command for command in commands if f"usage: emberline {command}" not in done.stdout]
    assert not missing


def test_plain_help_imports_next_to_nothing() -> None:
    script = (
        "import sys\nfrom emberline.cli.main import main\nmain(['--help'])\n"
        "heavy = {'torch', 'numpy', 'msgspec', 'rich', 'asyncio', 'uvicorn', 'tokenizers', 'http.client'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_misspelt_command_gets_a_hint(tmp_path: Path) -> None:
    done = emberline("sevre", home=tmp_path)
    assert done.returncode == 2
    assert "did you mean `emberline serve`?" in done.stderr


@pytest.mark.parametrize("command", ["key", "account", "batch", "cluster", "model"])
def test_a_command_alone_shows_its_actions(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: emberline {command} [-h] ACTION ...")
    assert len(re.findall(r"^    [a-z-]+ {2,}[a-z]", shown, re.MULTILINE)) >= 2


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["serve", "smollm2", "--replica", "2"], "--replica 2; did you mean --replicas?"),
        (["key", "ls", "--acount=acme"], "--acount=acme; did you mean --account?"),
        (["ps", "--jsno"], "--jsno; did you mean --json?"),
        (["ps", "-jsno"], "-jsno; did you mean --json?"),
        (["run", "smollm2", "--zzzz", "hi"], "--zzzz hi\n"),
        (["cluster", "plan", "--bla"], "--bla\n"),
    ],
)
def test_a_misspelt_flag_gets_a_hint(words: list[str], hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert f"unrecognized arguments: {hint}" in capsys.readouterr().err


def test_version(tmp_path: Path) -> None:
    assert emberline("version", home=tmp_path).stdout == f"emberline {__version__}\n"
    assert emberline("--version", home=tmp_path).stdout == f"emberline {__version__}\n"
    assert json.loads(emberline("version", "--json", home=tmp_path).stdout) == {"version": __version__}


def test_no_models_installed(tmp_path: Path) -> None:
    assert "emberline pull" in emberline("ls", home=tmp_path).stdout
    assert json.loads(emberline("ls", "--json", home=tmp_path).stdout) == []
    done = emberline("rm", "smollm2", home=tmp_path)
    assert done.returncode == 1
    assert "not pulled" in done.stderr


def test_unknown_model_is_refused_with_the_choices(tmp_path: Path) -> None:
    done = emberline("pull", "no-such-model", home=tmp_path)
    assert done.returncode == 1
    assert "no-such-model" in done.stderr
    assert "hf:org/repo" in done.stderr
    assert "Traceback" not in done.stderr


def test_truncated_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "half.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")
    done = emberline("pull", str(tmp_path / "half.gguf"), home=tmp_path / "home")
    assert done.returncode == 1
    assert "half.gguf" in done.stderr
    assert "Traceback" not in done.stderr


def test_ps_without_a_server(tmp_path: Path) -> None:
    port = str(free_port())
    done = emberline("ps", "--port", port, home=tmp_path)
    assert done.returncode == 1
    assert f"http://127.0.0.1:{port}" in done.stderr
    assert "emberline serve" in done.stderr


def test_run_refuses_an_empty_prompt(tmp_path: Path) -> None:
    done = emberline("run", home=tmp_path, stdin="  \n", EMBERLINE_PORT=str(free_port()))
    assert done.returncode == 2
    assert "the prompt is empty" in done.stderr


def test_port_in_use_is_reported_before_any_download(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = emberline("serve", "--port", str(port), home=tmp_path)
    assert done.returncode == 1
    assert f"127.0.0.1:{port} is in use" in done.stderr
    assert f"--port {port + 1}" in done.stderr
    assert not (tmp_path / "models").exists()


def test_listening_beyond_loopback_needs_a_key(tmp_path: Path) -> None:
    done = emberline("serve", "--host", "0.0.0.0", home=tmp_path)
    assert done.returncode == 1
    assert "refusing to listen on 0.0.0.0 without keys" in done.stderr
    assert "export EMBERLINE_AUTH_KEY=" in done.stderr


def test_commands_that_do_not_listen_need_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBERLINE_SERVER_HOST", "0.0.0.0")
    assert emberline("ls", home=tmp_path).returncode == 0


def test_invalid_setting_is_one_line(tmp_path: Path) -> None:
    done = emberline("serve", "--port", "many", home=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("emberline: bad value 'many' for port in [server] (flag --port)")
    assert "Traceback" not in done.stderr


def test_flags_cannot_be_abbreviated(tmp_path: Path) -> None:
    for words in (["serve", "--http", "2"], ["batch", "ls", "--por", "1"], ["worker", "--sock", "x"]):
        done = emberline(*words, home=tmp_path)
        assert done.returncode == 2
        assert words[-2] in done.stderr or "required" in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serve", "--model", "smollm2"], "--model: give the model without a flag"),
        (["run", "-m", "smollm2", "hi"], "unrecognized arguments: -m"),
    ],
)
def test_models_are_positional(tmp_path: Path, words: list[str], message: str) -> None:
    done = emberline(*words, home=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr


def test_serve_takes_several_models(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)

    def models(*words: str) -> tuple[str, ...]:
        args = parser.parse_intermixed_args([*words, "--data-dir", str(tmp_path)])
        return common.config_of(args).engine.models

    assert models("a", "--port", "1", "hf:b/c") == ("a", "hf:b/c")
    (tmp_path / "emberline.toml").write_text('[engine]\nmodels = ["d"]\n')
    assert models() == ("d",)
    assert models("a") == ("a",)


def test_an_unknown_model_is_refused_by_serve(tmp_path: Path) -> None:
    done = emberline("serve", "--port", "0", "no-such-model", home=tmp_path)
    assert done.returncode == 1
    assert "no-such-model" in done.stderr


def test_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mute.gguf"
    path.write_bytes(gguf_bytes(tmp_path))
    done = emberline("pull", str(path), home=tmp_path / "home")
    assert done.returncode == 1
    assert done.stderr.endswith(
        f"emberline: {path} cannot be served: the file contains no tokenizer (tokenizer.ggml.model and .tokens)\n"
    )
    entry = ModelEntry(describe_path(path), path)
    with pytest.raises(BadInput, match="no tokenizer"):
        load_models([entry], {entry.card.id: []})
    (found,) = doctor.models(resolve(home=tmp_path / "home"))
    assert found.status == "fail"
    assert "no tokenizer" in found.detail


def test_unusable_data_folder_is_one_line(tmp_path: Path) -> None:
    done = emberline("serve", "--port", "0", "--data-dir", "/proc/emberline", home=tmp_path)
    assert done.returncode == 1
    assert done.stderr == "emberline: cannot use /proc/emberline: No such file or directory\n"


def test_help_omits_developer_notes(tmp_path: Path) -> None:
    assert "where to begin reading" not in emberline("serve", "--help", home=tmp_path).stdout
