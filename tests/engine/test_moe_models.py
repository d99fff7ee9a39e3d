"""The engine over small random models with a mixture of experts: transformers' greedy tokens, whatever the schedule."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from emberline.engine.core.limits import Limits
from emberline.engine.core.scheduler import Scheduler
from emberline.engine.core.step_loop import StepLoop
from emberline.engine.runners.cpu.torch_runner import TorchRunner
from emberline.kv.cache import KVCache
from emberline.models.registry import load_model
from emberline.protocol.token_ids import unpack
from emberline.weights.checkpoint import open_checkpoint
from tests.engine.client import Client, engine
from tests.engine.fakes import request
from tests.models.small_moe_models import MODELS, save_small_model

N_NEW = 5
PROMPTS = [[3 + (7 * i + 11 * n) % 150 for i in range(70 - 17 * n)] for n in range(3)]


class Saved(NamedTuple):
    folder: Path
    answers: list[list[int]]


@pytest.fixture(scope="module", params=MODELS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp(request.param)
    theirs = save_small_model(folder, request.param)
    return Saved(folder, [greedy(theirs, prompt) for prompt in PROMPTS])


@torch.no_grad()
def greedy(model: Any, prompt: list[int]) -> list[int]:
    ids = list(prompt)
    for _ in range(N_NEW):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def ask(name: str, ids: list[int], n_new: int = N_NEW) -> Any:
    return request(name, ids, max_tokens=n_new, temperature=0.0)


class Engine:
    def __init__(self, folder: Path, n_blocks: int = 24, token_budget: int = 32) -> None:
        self.model = load_model(open_checkpoint(folder))
        context_len = 16 * (n_blocks - 1)
        limits = Limits(context_len=context_len, vocab_size=160, eos_ids=(2,), max_running=4, token_budget=token_budget)
        sizes = [n_blocks] * len(self.model.kv_groups)
        self.cache = KVCache(self.model.kv_groups, sizes, chunk=token_budget)
        self.loop = StepLoop(Scheduler(self.cache, limits, "moe"), TorchRunner(self.model, sizes, limits))
        self.peaks = [0] * len(sizes)  # blocks that sequences held at once, per group

    def run(self, *requests: Any) -> dict[str, list[Any]]:
        deltas: dict[str, list[Any]] = {each.id: [] for each in requests}
        for each in requests:
            self.loop.submit(each, 0.0)
        for _ in range(500):
            if not self.loop.busy:
                return deltas
            for delta in self.loop.step(0.0):
                deltas[delta.id].append(delta)
            used = [group.pool.n_total - group.pool.n_free for group in self.cache.groups]
            self.peaks = [max(pair) for pair in zip(self.peaks, used, strict=True)]
        raise AssertionError("it never ends")


def tokens(deltas: list[Any]) -> list[int]:
    return [token for delta in deltas for token in unpack(delta.token_ids)]


def test_greedy_tokens_are_transformers(saved: Saved) -> None:
    """Prompts longer than the token budget, together in blocks for two of them, then each again from the cache."""
    engine = Engine(saved.folder, n_blocks=12)
    together = engine.run(*(ask(f"r{n}", ids) for n, ids in enumerate(PROMPTS)))
    assert [tokens(together[f"r{n}"]) for n in range(len(PROMPTS))] == saved.answers
    for n, ids in enumerate(PROMPTS):
        engine.run(ask("before", ids, n_new=1))
        again = engine.run(ask("again", ids))["again"]
        assert tokens(again) == saved.answers[n]
        assert again[0].usage.cached_tokens == (len(ids) - 1) // 16 * 16


def test_chunked_layers_keep_no_more_than_a_chunk(tmp_path: Path) -> None:
    """Llama 4's local layers: chunks of 32 tokens are two blocks, beside the blocks that a step of 16 tokens gains."""
    save_small_model(tmp_path, "llama4_text")
    engine = Engine(tmp_path, token_budget=16)
    assert [group.name for group in engine.model.kv_groups] == ["full", "chunk32"]
    engine.run(ask("long", [3 + i % 150 for i in range(150)], n_new=40))
    full, local = engine.peaks
    assert full == -(-189 // 16)
    assert local <= 32 // 16 + 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_worker_process_serves_it(tmp_path: Path, kind: str) -> None:
    answer = greedy(save_small_model(tmp_path, kind), PROMPTS[1])
    flags = ("--name", kind, "--device", "cpu", "--kv-bytes", 4 << 20, "--socket", tmp_path / "a.sock")
    with engine("emberline.engine.worker", "--model", tmp_path, *flags) as (_, address), Client(address) as client:
        client.submit(ask("one", PROMPTS[1]))
        client.finish("one")
        assert client.tokens("one") == answer
