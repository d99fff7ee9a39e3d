"""Log-probabilities of prompt tokens are those of transformers, whatever the schedule, on both runners."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from emberline.engine.core.limits import Limits
from emberline.engine.core.step_loop import StepLoop
from emberline.engine.runners.cpu.torch_runner import TorchRunner
from emberline.engine.runners.gpu.runner import GpuRunner
from emberline.engine.worker.build import build_scheduler
from emberline.kv.cache import KVCache
from emberline.models.registry import load_model
from emberline.protocol.errors import BadInput, Unsupported
from emberline.protocol.events import TokenDelta
from emberline.protocol.request import EngineRequest
from emberline.protocol.token_ids import unpack
from emberline.weights.checkpoint import open_checkpoint
from tests.engine.fakes import loop_of, request
from tests.engine.runners.gpu.host_sampler import HostKernels, HostTable
from tests.lazy_modules import transformers
from tests.tiny_model import VOCABULARY

PROMPTS = [[(7 * i + 11 * n + i * i) % 250 for i in range(75 - 17 * n)] for n in range(3)]
TOP = 4
NEAR = 0.03  # keys and values are bfloat16 here, and float32 in transformers


class Expected(NamedTuple):
    """What transformers says about the tokens of a prompt after the first."""

    logprobs: torch.Tensor  # [tokens]
    all: torch.Tensor  # [tokens, vocabulary]


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> list[Expected]:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    found = []
    for ids in PROMPTS:
        with torch.no_grad():
            every = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        found.append(Expected(every[torch.arange(len(ids) - 1), ids[1:]], every))
    return found


def engine(folder: Path, runner: type[Any] = TorchRunner, n_blocks: int = 40, token_budget: int = 32) -> StepLoop:
    model = load_model(open_checkpoint(folder), "cpu")
    limits = Limits(
        context_len=16 * (n_blocks - 1), vocab_size=VOCABULARY, eos_ids=(257,), max_running=4, token_budget=token_budget
    )
    sizes = [n_blocks] * len(model.kv_groups)
    cache = KVCache(model.kv_groups, sizes, chunk=token_budget)
    if runner is TorchRunner:
        return StepLoop(build_scheduler(cache, limits, "tiny"), TorchRunner(model, sizes, limits))
    made = GpuRunner(model, sizes, limits, "cpu", HostKernels(), HostTable())
    return StepLoop(build_scheduler(cache, limits, "tiny"), made, steps_in_flight=2)


def run(loop: StepLoop, *requests: EngineRequest) -> dict[str, list[TokenDelta]]:
    deltas: dict[str, list[TokenDelta]] = {each.id: [] for each in requests}
    for each in requests:
        loop.submit(each, 0.0)
    for _ in range(500):
        if not loop.busy:
            return deltas
        for delta in loop.step(0.0):
            deltas[delta.id].append(delta)
    raise AssertionError("it never ends")


def scores(deltas: Sequence[TokenDelta], n_top: int = TOP) -> tuple[Any, Any, Any, Any]:
    """The columns that the deltas before the first token told."""
    first = next((n for n, delta in enumerate(deltas) if delta.token_ids or delta.finish), len(deltas))
    told = [delta.prompt_logprobs for delta in deltas[:first] if delta.prompt_logprobs is not None]
    assert all(delta.prompt_logprobs is None for delta in deltas[first:])

    def column(name: str, kind: str) -> Any:
        return np.frombuffer(b"".join(getattr(each, name) for each in told), kind)

    top_ids, top = column("top_ids", "<u4"), column("top_logprobs", "<f4")
    return column("logprobs", "<f4"), column("ranks", "<u4"), top_ids.reshape(-1, n_top), top.reshape(-1, n_top)


def check(deltas: Sequence[TokenDelta], wanted: Expected) -> None:
    logprobs, ranks, top_ids, top = scores(deltas)
    np.testing.assert_allclose(logprobs, wanted.logprobs, atol=NEAR)
    np.testing.assert_allclose(top, wanted.all.topk(TOP).values, atol=NEAR)
    np.testing.assert_allclose(np.take_along_axis(wanted.all.numpy(), top_ids.astype(int), 1), top, atol=NEAR)
    above = (wanted.all > wanted.logprobs[:, None] + NEAR).sum(1)
    within = (wanted.all > wanted.logprobs[:, None] - NEAR).sum(1)
    assert ((above.numpy() < ranks) & (ranks <= within.numpy())).all()


def ask(n: int, name: str = "", **sampling: Any) -> EngineRequest:
    given = {"prompt_logprobs": TOP, "temperature": 0.0, "max_tokens": 3}
    return request(name or f"r{n}", PROMPTS[n], **given | sampling)


@pytest.mark.parametrize("runner", [TorchRunner, GpuRunner])
def test_scores_are_those_of_transformers_in_chunks_beside_others_and_from_a_warm_cache(
    tiny_model: Path, expected: list[Expected], runner: type[Any]
) -> None:
    loop = engine(tiny_model, runner)
    plain = request("plain", PROMPTS[0][:40], temperature=0.0, max_tokens=12)
    together = run(loop, plain, *(ask(n) for n in range(3)))
    assert all(delta.prompt_logprobs is None for delta in together["plain"])
    for n in range(3):
        check(together[f"r{n}"], expected[n])
    again = run(loop, ask(0, "again"), ask(0, "cached", prompt_logprobs=None))
    check(again["again"], expected[0])
    tokens = {name: [delta.token_ids for delta in deltas if delta.token_ids] for name, deltas in again.items()}
    assert tokens["again"] == tokens["cached"]
    usages = {name: next(each.usage for each in deltas if each.usage) for name, deltas in again.items()}
    assert (usages["again"].cached_tokens, usages["cached"].cached_tokens) == (0, 64)


@pytest.mark.parametrize("runner", [TorchRunner, GpuRunner])
def test_scores_are_told_once_though_sequences_are_preempted(
    tiny_model: Path, expected: list[Expected], runner: type[Any]
) -> None:
    loop = engine(tiny_model, runner, n_blocks=9)
    together = run(loop, *(ask(n, max_tokens=40) for n in range(3)))
    assert loop.load.preemptions > 0
    for n in range(3):
        check(together[f"r{n}"], expected[n])


def test_a_prompt_is_computed_without_a_reply(tiny_model: Path, expected: list[Expected]) -> None:
    loop = engine(tiny_model)
    for name in ("cold", "warm"):
        (*told, last) = run(loop, ask(0, name, max_tokens=0))[name]
        check([*told, last], expected[0])
        assert (last.token_ids, last.finish) == (b"", "length")
        assert last.usage is not None
        assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (75, 0)
    (last,) = run(loop, ask(0, "unscored", max_tokens=0, prompt_logprobs=None))["unscored"]
    assert last.usage is not None
    assert last.usage.cached_tokens == 64
    whole = request("blocks", PROMPTS[0][:64], max_tokens=0)  # all of its blocks are cached: its last is computed again
    assert [delta.finish for delta in run(loop, whole)["blocks"]] == ["length"]


def test_a_prompt_of_one_token_has_nothing_to_score(tiny_model: Path) -> None:
    deltas = run(engine(tiny_model), request("one", [5], prompt_logprobs=0, max_tokens=1))["one"]
    assert all(delta.prompt_logprobs is None for delta in deltas)


def test_only_allowed_tokens_are_sampled(tiny_model: Path) -> None:
    for runner in (TorchRunner, GpuRunner):
        loop = engine(tiny_model, runner)
        asked = [
            request("two", PROMPTS[0], allowed_ids=(65, 200), temperature=1.0, max_tokens=20),
            request("one", PROMPTS[1], allowed_ids=(66,), temperature=1.0, max_tokens=5),
            request("any", PROMPTS[1], temperature=0.0, max_tokens=5),
        ]
        drawn = {
            name: [token for delta in deltas for token in unpack(delta.token_ids)]
            for name, deltas in run(loop, *asked).items()
        }
        assert set(drawn["two"]) == {65, 200}
        assert drawn["one"] == [66] * 5
        assert set(drawn["any"]).isdisjoint({65, 66, 200})


def test_what_an_engine_cannot_do_is_refused_by_name() -> None:
    pipeline = loop_of(micro_batches=2)
    with pytest.raises(Unsupported, match="--pp"):
        pipeline.submit(request("r", [1, 2], prompt_logprobs=0), 0.0)
    with pytest.raises(BadInput, match="prompt_logprobs must be between 0 and 20"):
        loop_of().submit(request("r", [1, 2], prompt_logprobs=21), 0.0)
    with pytest.raises(BadInput, match="token id 7 is not in the vocabulary"):
        loop_of().submit(request("r", [1, 2], allowed_ids=(1, 7)), 0.0)
