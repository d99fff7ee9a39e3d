"""`emberline run`, `ps` and `bench` against a fake server."""

import base64
import json
import os
import time
from pathlib import Path

import pytest

from emberline.catalog.model_card import describe_path
from emberline.cli.run import split_words
from emberline.protocol.errors import BadInput
from tests.cli.console import Terminal, emberline
from tests.cli.fake_server import MODEL, FakeServer
from tests.images.files import encoded, picture

SEEING = Path(__file__).parents[1] / "models" / "seeing"


def test_prompt_from_arguments(tmp_path: Path, fake_server: FakeServer) -> None:
    done = emberline("run", "--port", fake_server.port, "say hello", "--seed", "7", home=tmp_path)
    assert (done.returncode, done.stdout) == (0, "Hello!\n")
    (sent,) = fake_server.chats
    assert sent["messages"] == [{"role": "user", "content": "say hello"}]
    assert (sent["model"], sent["seed"], sent["stream"]) == (MODEL, 7, True)
    assert "max_tokens" not in sent


def test_prompt_with_a_document_on_stdin(tmp_path: Path, fake_server: FakeServer) -> None:
    words = ("run", "--port", fake_server.port, "--system", "Be brief.", "Summarise:")
    done = emberline(*words, home=tmp_path, stdin="a long text\n")
    assert done.returncode == 0
    assert fake_server.chats[0]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Summarise:\n\na long text"},
    ]


def test_images_come_before_the_prompt(tmp_path: Path, fake_server: FakeServer) -> None:
    pixels, other = encoded(picture(4, 4)), encoded(picture(4, 4), "JPEG")
    (tmp_path / "a.png").write_bytes(pixels)
    (tmp_path / "b.jpg").write_bytes(other)
    words = (
        "run",
        "--port",
        fake_server.port,
        "--image",
        tmp_path / "a.png",
        "--image",
        tmp_path / "b.jpg",
        "compare them",
    )
    done = emberline(*map(str, words), home=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    urls = [
        f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
        for kind, data in (("png", pixels), ("jpeg", other))
    ]
    assert fake_server.chats[0]["messages"] == [
        {
            "role": "user",
            "content": [
                *({"type": "image_url", "image_url": {"url": url}} for url in urls),
                {"type": "text", "text": "compare them"},
            ],
        }
    ]
    (tmp_path / "c.txt").write_text("hello")
    for name, why in (("c.txt", "is no PNG"), ("d.png", "cannot be read")):
        done = emberline("run", "--port", fake_server.port, "--image", str(tmp_path / name), "hi there", home=tmp_path)
        assert (done.returncode, why in done.stderr) == (1, True), done.stderr
    assert len(fake_server.chats) == 1


NAMES = ["smollm2", "smollm2-135m", "gemma-3-270m", "@cf/test/model"]


@pytest.mark.parametrize(
    ("words", "model", "prompt"),
    [
        ([], None, ""),
        (["smollm2"], "smollm2", ""),
        (["SmolLM2", "hi"], "SmolLM2", "hi"),
        (["@cf/test/model", "why", "so?"], "@cf/test/model", "why so?"),
        (["hf:org/repo", "hi"], "hf:org/repo", "hi"),
        (["./model.gguf"], "./model.gguf", ""),
        (["model.gguf", "hi"], "model.gguf", "hi"),
        (["/models/llama", "hi"], "/models/llama", "hi"),
        (["Why is it so?"], None, "Why is it so?"),
        (["/etc/hosts is what?"], None, "/etc/hosts is what?"),
        (["why is", "it so?"], None, "why is it so?"),
        (["llama3.2 is what?"], None, "llama3.2 is what?"),
    ],
)
def test_the_first_word_is_the_model_if_it_names_one(words: list[str], model: str | None, prompt: str) -> None:
    assert split_words(words, NAMES) == (model, prompt)


def test_a_folder_with_a_checkpoint_is_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    with pytest.raises(BadInput, match="there is no model 'mine'"):
        split_words(["mine", "hi"], NAMES)
    (tmp_path / "mine" / "config.json").write_text("{}")
    assert split_words(["mine", "hi"], NAMES) == ("mine", "hi")


def test_one_unknown_word_is_not_a_prompt() -> None:
    with pytest.raises(BadInput) as caught:
        split_words(["smolm2"], NAMES)
    assert caught.value.message == (
        "there is no model 'smolm2'; did you mean smollm2 or smollm2-135m? `emberline ls` lists those on this machine, "
        '`emberline pull hf:org/repo` adds one. To send it as a prompt: emberline run smollm2 "smolm2"'
    )
    with pytest.raises(BadInput, match=r"no model 'hello'. `emberline ls` .* emberline run smollm2 \"hello\""):
        split_words(["hello"], NAMES)


@pytest.mark.parametrize(
    "first",
    [
        *("llama3.2", "llama3.2:1b", "mistral:latest", "mistral-7b-instruct", "qwen3", "gemma4", "@cf/meta/llama"),
        *("org/name-2", "smolm2", "gpt-4.1", "nosuchmodel", "why"),
    ],
)
def test_an_unknown_model_before_a_prompt_is_refused(first: str) -> None:
    with pytest.raises(BadInput, match=f'there is no model {first!r}.* "{first} hi there"'):
        split_words([first, "hi", "there"], [*NAMES, "qwen2.5", "llama-3.1-8b"])


def test_the_path_of_a_model_that_the_server_has(
    tmp_path: Path, fake_server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(SEEING.parent)
    card = describe_path(SEEING)
    fake_server.answers["/v1/models"] = {"data": [{"id": card.id, "aliases": ["seeing"]}]}
    fake_server.answers["/api/tags"] = {"models": [{"name": card.id, "digest": card.digest}]}
    here = ("run", "--port", fake_server.port)
    for path in ("./seeing", "seeing/", str(SEEING)):
        done = emberline(*here, path, "hi there", home=tmp_path)
        assert (done.returncode, done.stdout) == (0, "Hello!\n"), done.stderr
    assert emberline("pull", str(SEEING), home=tmp_path).returncode == 0
    assert emberline(*here, "./seeing", "hi there", home=tmp_path).stdout == "Hello!\n"
    assert {chat["model"] for chat in fake_server.chats} == {card.id}
    fake_server.answers["/api/tags"] = {"models": [{"name": card.id, "digest": "of another folder of that name"}]}
    done = emberline(*here, "./seeing", "hi there", home=tmp_path)
    assert (done.returncode, len(fake_server.chats)) == (1, 4)
    assert "has no model ./seeing" in done.stderr


def test_a_model_that_can_be_pulled_is_a_model(tmp_path: Path, fake_server: FakeServer) -> None:
    done = emberline("run", "--port", fake_server.port, "llama-3.1-8b", "hi", home=tmp_path)
    assert done.returncode == 1
    assert "has no model llama-3.1-8b" in done.stderr
    assert fake_server.chats == []


def test_one_unknown_word_before_text_on_stdin_is_a_prompt_unless_it_resembles_a_model() -> None:
    assert split_words(["Summarize:"], NAMES, has_input=True) == (None, "Summarize:")
    with pytest.raises(BadInput, match="did you mean smollm2"):
        split_words(["smolm2"], NAMES, has_input=True)


@pytest.mark.parametrize(
    ("words", "said"),
    [(["smolm2"], "did you mean smollm2"), (["nosuchmodel", "hi"], "there is no model 'nosuchmodel'")],
)
def test_an_unknown_model_is_refused(tmp_path: Path, fake_server: FakeServer, words: list[str], said: str) -> None:
    done = emberline("run", "--port", fake_server.port, *words, home=tmp_path)
    assert done.returncode == 1
    assert said in done.stderr
    assert fake_server.chats == []


def test_flags_between_the_model_and_the_prompt(tmp_path: Path, fake_server: FakeServer) -> None:
    done = emberline("run", MODEL, "--port", fake_server.port, "say", "--seed", "7", "hello", home=tmp_path)
    assert (done.returncode, done.stdout) == (0, "Hello!\n")
    assert fake_server.chats[0]["messages"] == [{"role": "user", "content": "say hello"}]


def test_model_alone_with_the_prompt_on_stdin(tmp_path: Path, fake_server: FakeServer) -> None:
    done = emberline("run", MODEL, "--port", fake_server.port, home=tmp_path, stdin="a text\n")
    assert done.returncode == 0
    assert fake_server.chats[0]["messages"] == [{"role": "user", "content": "a text"}]


def test_a_server_that_was_named_must_answer(tmp_path: Path) -> None:
    for command in (
        ("run", "--port", "1", "hello there"),
        ("run", "--host", "127.0.0.2", "x y"),
        ("bench", "--port", "1"),
    ):
        done = emberline(*command, home=tmp_path, EMBERLINE_PORT="1")
        assert done.returncode == 1
        assert "no Emberline server answers at http://127.0.0." in done.stderr


def test_a_server_that_was_named_must_have_the_model(tmp_path: Path, fake_server: FakeServer) -> None:
    done = emberline("run", "--port", fake_server.port, "smollm2", "hi", home=tmp_path)
    assert done.returncode == 1
    assert f"has no model smollm2; it has {MODEL}, @cf/test/other" in done.stderr
    assert fake_server.chats == []


def test_a_short_name_of_the_server_s_is_its_model(tmp_path: Path, fake_server: FakeServer) -> None:
    for name in ("short", "MODEL"):
        done = emberline("run", name, "hi", home=tmp_path, EMBERLINE_PORT=fake_server.port)
        assert (done.returncode, done.stdout) == (0, "Hello!\n")
    assert [sent["model"] for sent in fake_server.chats] == [MODEL, MODEL]


def test_abbreviated_flags_are_refused(tmp_path: Path, fake_server: FakeServer) -> None:
    done = emberline("run", "--port", fake_server.port, "--temp", "3", "hello there", home=tmp_path)
    assert done.returncode == 2
    assert "--temp" in done.stderr


def test_verbose_figures_go_to_stderr(tmp_path: Path, fake_server: FakeServer) -> None:
    done = emberline("run", "--port", fake_server.port, "-v", MODEL, "x", home=tmp_path)
    assert done.stdout == "Hello!\n"
    assert "3 tokens at" in done.stderr
    assert "7 in the prompt (5 cached)" in done.stderr


def test_server_error_is_shown(tmp_path: Path, fake_server: FakeServer) -> None:
    fake_server.error = (429, "too many requests, come back later")
    done = emberline("run", "--port", fake_server.port, MODEL, "x", home=tmp_path)
    assert (done.returncode, done.stderr) == (1, "emberline: too many requests, come back later\n")


def test_missing_key_is_explained(tmp_path: Path, fake_server: FakeServer) -> None:
    fake_server.error = (401, "send it as `Authorization: Bearer <key>`")
    done = emberline("run", "--port", fake_server.port, MODEL, "x", home=tmp_path)
    assert done.returncode == 1
    assert "--api-key, EMBERLINE_KEY" in done.stderr


def test_api_key_is_sent(tmp_path: Path, fake_server: FakeServer) -> None:
    emberline("run", "--port", fake_server.port, MODEL, "x", home=tmp_path, EMBERLINE_AUTH_KEY="my-key")
    assert {headers.get("Authorization") for headers in fake_server.headers} == {"Bearer my-key"}


def test_ps(tmp_path: Path, fake_server: FakeServer) -> None:
    used = {"used_bytes": 3 << 20, "capacity_bytes": 1 << 30, "hits": 3, "misses": 1}
    fake_server.tiers = [
        {"name": "host", **used, "read_rate": 2.0 * (1 << 30), "oldest_s": 20.0},
        {"name": "pool", "state": "degraded: no answer"},
    ]
    fake_server.drafts = [["suffix", [10, 8], [9, 4]]]
    done = emberline("ps", "--port", fake_server.port, home=tmp_path)
    (head, row), (tier_head, host, pool), (draft_head, drafts) = (
        table.splitlines() for table in done.stdout.split("\n\n")
    )
    assert head.split() == [
        "MODEL",
        "WORKER",
        "ROLE",
        "DEVICE",
        "STATE",
        "RUNNING",
        "WAITING",
        "KV",
        "USED",
        "TOKENS/S",
    ]
    assert row.split()[:9] == [MODEL, "model-0", "cpu", "native", "ok", "1", "2", "25", "%"]
    assert tier_head.split() == ["WORKER", "TIER", "STATE", "USED", "OF", "HIT", "RATIO", "READS", "OLDEST"]
    assert host.split() == ["model-0", "host", "ok", "3.0", "MiB", "1.0", "GiB", "75", "%", "2.0", "GiB/s", "20", "s"]
    assert "degraded: no answer" in pool
    assert draft_head.split()[:5] == ["WORKER", "DRAFTER", "DRAFTED", "ACCEPTED", "SHARE"]
    assert drafts.split() == ["model-0", "suffix", "18", "13", "72", "%", "90", "%", "50", "%"]


def test_ps_counts_tokens_per_second(tmp_path: Path, fake_server: FakeServer) -> None:
    began_s = time.monotonic()
    report = json.loads(emberline("ps", "--json", "--port", fake_server.port, home=tmp_path).stdout)
    took_s = time.monotonic() - began_s
    assert round(100 / took_s, 1) <= report["engines"][0]["output_tokens_per_s"] <= 100


def test_bench(tmp_path: Path, fake_server: FakeServer) -> None:
    done = emberline("bench", "--json", "--input-words", "9", "--port", fake_server.port, home=tmp_path)
    runs = json.loads(done.stdout)["runs"]
    assert [row["streams"] for row in runs] == [1, 8]
    assert all(row["tokens_per_s"] > 0 and row["prompt_tokens"] == 7 for row in runs)
    prompts = [sent["messages"][0]["content"] for sent in fake_server.chats]
    assert len(set(prompts)) == 9
    assert all(sent["ignore_eos"] for sent in fake_server.chats)


def test_bench_shows_the_server_error(tmp_path: Path, fake_server: FakeServer) -> None:
    fake_server.error = (400, "the prompt is too long")
    done = emberline("bench", "--port", fake_server.port, home=tmp_path)
    assert (done.returncode, done.stderr) == (1, "emberline: the prompt is too long\n")


@pytest.fixture
def terminal(tmp_path: Path, fake_server: FakeServer) -> Terminal:
    return Terminal(fake_server.port, tmp_path)


def test_conversation(terminal: Terminal, fake_server: FakeServer, tmp_path: Path) -> None:
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
    conversations = [[message["content"] for message in sent["messages"]] for sent in fake_server.chats]
    assert conversations == [["first"], ["first", "Hello!", "two\nlines"], ["third"]]
    history = tmp_path / "history"
    assert "first" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0


def test_ctrl_c_stops_only_the_answer(terminal: Terminal, fake_server: FakeServer) -> None:
    fake_server.deltas = ["word "] * 1000
    fake_server.pause_s = 0.02
    terminal.expect(">>> ")
    terminal.type("go on\n")
    terminal.expect("word word")
    os.kill(terminal.process.pid, 2)
    terminal.expect(">>> ")
    assert fake_server.disconnected.wait(60)
    fake_server.deltas = ["done"]
    terminal.type("and now?\n")
    terminal.expect("done")
    terminal.expect(">>> ")
    terminal.type("\x04")
    assert terminal.close() == 0
    said = fake_server.chats[1]["messages"][1]["content"]
    assert said.startswith("word ")
    assert len(said) < 5000


def test_error_leaves_the_conversation_unchanged(terminal: Terminal, fake_server: FakeServer) -> None:
    terminal.expect(">>> ")
    fake_server.error = (503, "the engine is starting")
    terminal.type("lost\n")
    terminal.expect("emberline: the engine is starting")
    fake_server.error = None
    terminal.type("kept\n")
    terminal.expect("Hello!")
    terminal.expect(">>> ")
    terminal.type("\x04")
    assert terminal.close() == 0
    assert fake_server.chats[1]["messages"] == [{"role": "user", "content": "kept"}]


def test_control_characters_are_removed(terminal: Terminal, fake_server: FakeServer) -> None:
    fake_server.deltas = ["\x1b]0;owned\x07safe\x9b2J"]
    terminal.expect(">>> ")
    terminal.type("x\n")
    terminal.expect("]0;ownedsafe2J")
    terminal.expect(">>> ")
    terminal.type("\x04")
    assert terminal.close() == 0


def test_commands_of_a_chat(terminal: Terminal, fake_server: FakeServer, tmp_path: Path) -> None:
    terminal.expect(">>> ")
    for line, said in (
        ("/set temperature 0.5", ">>> "),
        ("/set system Be brief.", ">>> "),
        ("/set temperature hot", "temperature is a number, not 'hot'"),
        ("/set mood 5", "there is no option 'mood'"),
        ("/set max_tokens 9", ">>> "),
        ("/model nobody", "this server has no model 'nobody'"),
        ("/model @cf/test/other", "@cf/test/other"),
        ("first", "Hello!"),
        ("/set max_tokens", ">>> "),
        ("second", "Hello!"),
        (f"/save {tmp_path / 'chat.json'}", "The conversation is in"),
        (f"/save {tmp_path / 'chat.json'}", "exists already"),
    ):
        terminal.type(line + "\n")
        terminal.expect(said)
    terminal.type("/exit\n")
    assert terminal.close() == 0
    one, two = fake_server.chats
    assert (one["model"], one["max_tokens"], one["temperature"]) == ("@cf/test/other", 9, 0.5)
    assert "max_tokens" not in two
    saved = json.loads((tmp_path / "chat.json").read_text())
    assert saved["model"] == "@cf/test/other"
    assert [message["content"] for message in saved["messages"]] == ["Be brief.", "first", "Hello!", "second", "Hello!"]


def test_the_wait_for_a_model_is_told(tmp_path: Path, fake_server: FakeServer) -> None:
    fake_server.comments = [f"loading {MODEL}", f"loading {MODEL}"]
    done = emberline("run", "--port", fake_server.port, "say hello", home=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "Hello!\n", f"loading {MODEL} …\n")
