"""The workloads against a fake server that counts words as tokens and records its requests."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks import workloads
from benchmarks.client import RequestFailed
from benchmarks.contender import Setup
from benchmarks.peers import llama_cpp, torch_peers, venv
from benchmarks.prompts import Message, Prompts
from benchmarks.workloads import Shape, Target
from tests.benchmarks.word_server import WordServer, count

SHAPE = Shape(
    prompt=40, output=4, streams=3, prefill=100, sessions=2, turns=3, system=50, turn_prompt=20, turn_output=2
)


def prompts(seed: str = "seed") -> Prompts:
    return Prompts([" a", " b", " c"], count, seed)


@asynccontextmanager
async def word_server() -> AsyncIterator[tuple[Target, WordServer]]:
    server = WordServer()
    listening = await asyncio.start_server(server, "127.0.0.1", 0)
    async with listening:
        yield Target(listening.sockets[0].getsockname()[1], "m"), server


async def test_one_stream_separates_prefill_and_decode() -> None:
    async with word_server() as (target, server):
        result = await workloads.one_stream(target, prompts(), SHAPE)
    assert (result.prompt_tokens, result.output_tokens, result.notes) == (40, 4, [])
    assert result.figures["prefill_tok_s"] == pytest.approx(40 / result.figures["ttft_s"])
    decode_s = 3 / result.figures["decode_tok_s"]
    assert 0.02 <= result.figures["ttft_s"] + decode_s < 60  # a word every 5 ms or more
    body = server.requests[0][1]
    assert body["ignore_eos"]
    assert body["min_tokens"] == 4
    assert body["temperature"] == 0


async def test_streams_are_concurrent() -> None:
    async with word_server() as (target, server):
        result = await workloads.streams_at_once(target, prompts(), SHAPE)
    assert server.most_running == 3
    assert result.output_tokens == 12
    asked = {body["messages"][0]["content"] for _, body in server.requests}
    assert len(asked) == 3


async def test_replay_sends_whole_sessions_and_counts_cached_tokens() -> None:
    async with word_server() as (target, server):
        result = await workloads.agent_replay(target, prompts(), SHAPE)
    assert server.most_running == 2
    by_session: dict[str, list[list[Message]]] = {}
    for headers, body in server.requests:
        by_session.setdefault(headers["x-session-affinity"], []).append(body["messages"])
    assert len(by_session) == 2
    for turns in by_session.values():
        assert [len(messages) for messages in turns] == [2, 4, 6]
        for before, after in pairwise(turns):
            assert after[: len(before)] == before
            assert after[len(before)] == {"role": "assistant", "content": " r0 r1"}
    systems = {turns[0][0]["content"] for turns in by_session.values()}
    assert len(systems) == 1
    # 50 of the system prompt; 20 each turn and 2 of each reply before it.
    assert result.prompt_tokens == 2 * (70 + 92 + 114)
    assert result.figures["cached_share"] == pytest.approx(2 * (70 + 92) / result.prompt_tokens)


async def test_differing_token_counts_are_noted() -> None:
    async with word_server() as (target, _):
        short = Target(target.port, "m", lambda body: {**body, "max_tokens": 3})
        result = await workloads.one_stream(short, prompts(), SHAPE)
    assert result.notes == ["3 output tokens, 4 meant"]


async def test_waiting_for_the_first_token_ends_with_the_server() -> None:
    def dead() -> None:
        raise RuntimeError("it ended")

    with pytest.raises(RuntimeError, match="it ended"):
        await workloads.first_token(Target(1, "m"), Prompts([" a"], count, ""), float("inf"), dead)
    with pytest.raises(RequestFailed):
        await workloads.first_token(Target(1, "m"), Prompts([" a"], count, ""), 0.0, lambda: None)


def test_llama_cpp_build_shows_enabled_features() -> None:
    said = "n_threads = 1 | CPU : AVX = 1 | AVX512 = 0 | AMX_INT8 = 1 |"
    assert llama_cpp._enabled(said) == "AVX AMX_INT8"


def test_transformers_gets_only_supported_fields() -> None:
    body = {"model": "m", "messages": [], "max_tokens": 5, "stream": True, "ignore_eos": True, "min_tokens": 5}
    adapted = torch_peers._transformers_body(body)
    assert set(adapted) == {"model", "messages", "max_tokens", "stream", "generation_config"}
    assert json.loads(adapted["generation_config"])["max_new_tokens"] == 5


def test_failed_setup_step_shows_its_output(tmp_path: Path) -> None:
    with pytest.raises(venv.SetupFailed, match="no compiler"):
        venv.run(["sh", "-c", "echo no compiler; exit 3"], tmp_path / "log")
    assert "no compiler" in (tmp_path / "log").read_text()


def test_environment_is_created_once_per_pins(tmp_path: Path) -> None:
    said: list[str] = []
    setup = Setup(tmp_path / "m.gguf", tmp_path, said.append)
    folder = tmp_path / "venv-x"
    folder.mkdir()
    (folder / "pins.txt").write_text("a==1")
    assert venv.ensure_venv(setup, "x", ["a==1"]) == folder / "bin" / "python"
    assert said == []
