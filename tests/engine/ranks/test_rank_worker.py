"""A worker of several ranks as processes: what one rank answers, and the end when a rank dies or hangs."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from emberline.protocol.frames import Vocabulary
from emberline.protocol.grammar import encode
from emberline.protocol.request import EngineRequest, SamplingParams
from emberline.protocol.token_ids import pack
from emberline.weights.generated import generate_tensors
from emberline.weights.tensor_names import hf_name
from tests.engine.client import Answers, Client, LocalEngine, start, wait_until
from tests.engine.grammar.samples import PERSON
from tests.engine.images.small_engine import Prompt
from tests.engine.ranks import observed_worker
from tests.models.vision.small_vision_models import save_vision_model
from tests.soak.server_process import free_port

WORKER = "emberline.engine.worker"
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 256, "hidden_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 64, "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "eos_token_id": 1, "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip
MIXTRAL = {  # which one rank on a CPU computes as several do: not by the C kernels
    **CONFIG, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4,
    "num_experts_per_tok": 2,
}  # fmt: skip
PROMPT = [(11 * at) % 199 + 2 for at in range(70)]
VOCABULARY = Vocabulary(tokens=[b"", b"", *(bytes([n]) for n in range(2, 256))], special={1: "</s>"})


def request(name: str, prompt: list[int], *, grammar: bytes = b"", **sampling: Any) -> EngineRequest:
    asked: dict[str, Any] = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": not grammar, **sampling}
    return EngineRequest(id=name, prompt_ids=pack(prompt), sampling=SamplingParams(**asked), grammar=grammar)


BATCH = [
    request(f"r{n}", [(7 * n + 3 * at) % 200 + 2 for at in range(10 + 9 * n)], temperature=0.8 * (n % 2), seed=n)
    for n in range(3)
]
SAMPLED = [  # with seeds whose draws are not close: ranks add in another order than one alone
    request("filtered", PROMPT[:20], temperature=1.3, seed=3, top_k=20, top_p=0.9, min_p=0.01, max_tokens=12),
    request("penalized", PROMPT[:25], repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.2),
    request("biased", PROMPT[:30], temperature=1.0, seed=6, logit_bias={65: 5.0, 66: 5.0}, logprobs=2),
    *(
        request(f"structured {t}", PROMPT[:12], temperature=t, seed=5, max_tokens=40, grammar=encode(PERSON))
        for t in (0.0, 1.0)
    ),
]


def write_checkpoint(folder: Path, document: dict[str, Any]) -> Path:
    """Write random weights for a config.json: each rank would need longer to generate them than to read them."""
    (folder / "config.json").write_text(json.dumps(document))
    config, tensors = generate_tensors(document, 1)
    weights = {hf_name(each.name, config): each.tensor(torch.bfloat16, "cpu") for each in tensors}
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), CONFIG)


FLAGS = ("--kv-bytes", str(16 << 20), "--speculation", "off")


@contextmanager
def worker(model: Path, socket: Path, *flags: str, program: str = WORKER) -> Iterator[tuple[Any, dict[str, Any]]]:
    common = ("--device", "cpu", "--threads", "1")  # threads of several ranks would spin on the same cores
    process, ready = start(program, "--model", model, "--socket", socket, *common, *FLAGS, *flags)
    try:
        yield process, ready
    finally:
        process.kill()
        process.communicate()


def followers(process: Any) -> list[int]:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    return [int(pid) for pid in children.split() if b"--rendezvous" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def run(client: Answers, *requests: EngineRequest) -> list[list[int]]:
    client.submit(*requests)
    client.finish(*(each.id for each in requests))
    for each in requests:
        assert client.deltas[each.id][-1].error is None
    return [client.tokens(each.id) for each in requests]


def tokens(address: str) -> list[list[int]]:
    with Client(address) as client:
        return run(client, *BATCH)


def check_features(address: str, expected: "Expected") -> None:
    """Check that sampling, grammars and the prefix cache give the replies of one rank, too."""
    with Client(address) as client:
        client.set_vocabulary(VOCABULARY)
        assert run(client, *BATCH) == expected.batch
        assert run(client, *SAMPLED) == expected.sampled
        assert [len(each.logprobs) for each in client.deltas["biased"] if each.logprobs]
        for temperature in (0.0, 1.0):
            json.loads(bytes(n for n in client.tokens(f"structured {temperature}") if n != 1))
        cold, extended = request("cold", PROMPT[:50]), request("extended", PROMPT)
        assert [*run(client, cold), *run(client, extended)] == expected.cached
        assert client.deltas["extended"][0].usage.cached_by_tier == {"device": 48}


class Expected(NamedTuple):
    """Replies of one rank."""

    batch: list[list[int]]
    sampled: list[list[int]]
    cached: list[list[int]]


@pytest.fixture(scope="module")
def expected(model: Path) -> Expected:
    engine = LocalEngine(model, *FLAGS)
    engine.set_vocabulary(VOCABULARY)
    batch, sampled = run(engine, *BATCH), run(engine, *SAMPLED)
    return Expected(batch, sampled, run(engine, request("a", PROMPT[:50]), request("b", PROMPT)))


def test_two_ranks_answer_as_one_and_end_with_rank_0(model: Path, expected: Expected, tmp_path: Path) -> None:
    with worker(model, tmp_path / "two", "--tp", "2") as (process, ready):
        assert ready.get("ready"), ready
        assert ready["layout"] == "tp2"
        check_features(ready["address"], expected)
        (follower,) = followers(process)
        os.kill(follower, signal.SIGTERM)  # as a service manager does that signals all processes: rank 0 drains
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert is_gone(follower)


def test_a_pipeline_answers_as_one_rank_and_ends_when_a_stage_dies(
    model: Path, expected: Expected, tmp_path: Path
) -> None:
    flags = ("--pp", "2", "--step-timeout", "3600", "--speculation", "auto")
    with worker(model, tmp_path / "two", *flags, program=observed_worker.__name__) as (process, ready):
        assert ready.get("ready"), ready
        check_features(ready["address"], expected)
        (follower,) = followers(process)
        os.kill(follower, signal.SIGKILL)
        assert process.wait(60) == 1
        log = process.stderr.read()
        assert f"{observed_worker.IN_FLIGHT}2\n" in log, "there is one micro-batch only"
        assert "rank 1 is gone: killed by signal 9" in log
        assert not list(tmp_path.glob("emberline-ranks-*"))


@pytest.mark.slow
def test_ranks_that_meet_over_tcp_answer_as_one(model: Path, expected: Expected) -> None:
    """Two machines, as far as the ranks know: neither shares memory nor a folder with the other."""
    rendezvous = f"tcp:127.0.0.1:{free_port()}"
    common = (WORKER, "--model", model, "--device", "cpu")
    flags = (*FLAGS, "--tp", "2", "--rendezvous", rendezvous)
    environment = {**os.environ, "EMBERLINE_WORKER_TOKEN": "secret"}
    command = [sys.executable, "-m", *map(str, common), *flags, "--socket", "tcp:127.0.0.2:0", "--rank", "1"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as other:
        try:
            process, ready = start(*common, *flags, "--socket", "tcp:127.0.0.1:0")
            try:
                assert ready.get("ready"), ready
                check_features(ready["address"], expected)
                other.kill()
                assert process.wait(60) == 1
            finally:
                process.kill()
                process.communicate()
        finally:
            other.kill()


@pytest.mark.slow
@pytest.mark.parametrize("layout", [("--tp", "2"), ("--pp", "2")])
def test_in_deterministic_mode_the_batch_does_not_matter(model: Path, tmp_path: Path, layout: tuple[str, str]) -> None:
    with (
        worker(model, tmp_path / "socket", "--deterministic", *layout) as (_, ready),
        Client(ready["address"]) as client,
    ):
        together = run(client, *BATCH, *SAMPLED[:3])
        alone = [
            run(client, msgspec.structs.replace(each, id=f"{each.id} alone"))[0] for each in (*BATCH, *SAMPLED[:3])
        ]
        assert together == alone


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_group(model: Path, tmp_path: Path) -> None:
    with worker(model, tmp_path / "socket", "--tp", "2", "--step-timeout", "1") as (process, ready):
        assert ready.get("ready"), ready
        (follower,) = followers(process)
        os.kill(follower, signal.SIGSTOP)
        with Client(ready["address"]) as client:
            client.submit(BATCH[0])
            assert process.wait(60) == 1
        assert "rank" in process.stderr.read()
        wait_until(lambda: is_gone(follower))


@pytest.mark.slow
@pytest.mark.parametrize(("family", "layout"), [("qwen3_vl", "--tp"), ("qwen3_vl", "--pp"), ("kimi_k25", "--tp")])
def test_ranks_answer_about_images_as_transformers(tmp_path: Path, family: str, layout: str) -> None:
    """The first stage divides the tower; M-RoPE concerns all ranks, deepstack those of the first stage."""
    reference = save_vision_model(tmp_path, family)
    prompts = [Prompt(tmp_path, family, images, seed) for seed, images in enumerate(([0], [1, 2]))]
    started = worker(tmp_path, tmp_path / "w.sock", layout, "2", "--token-budget", "64")
    with started as (_, ready), Client(ready["address"]) as client:
        found = run(client, *(prompt.request(f"r{n}") for n, prompt in enumerate(prompts)))
    assert found == [prompt.expected(reference) for prompt in prompts]
