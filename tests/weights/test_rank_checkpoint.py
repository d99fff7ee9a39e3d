"""Slices of a checkpoint by rank: together they are the whole, each reads its own bytes, and their layers add up."""

import os
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from emberline.kernels.backend import Layer
from emberline.kernels.reference import TorchBackend
from emberline.models.decoder import Decoder
from emberline.models.deepseek import deepseek
from emberline.models.gpt_oss import gpt_oss
from emberline.models.registry import load_model
from emberline.weights.checkpoint import Checkpoint
from emberline.weights.loader import WeightLoader
from emberline.weights.model_config import BadCheckpoint, LatentConfig, ModelConfig, MoEConfig
from emberline.weights.rank_checkpoint import ExpertsBy, Rank, RankCheckpoint
from emberline.weights.tensor_shapes import expected_shapes
from emberline.weights.tensors import FORMATS, CheckpointFiles, FileLocation, Weight
from tests.models.step_inputs import pools, step
from tests.weights.test_tensors import HALVES
from tests.weights.test_tensors import weight as random_weight

SIZES = {
    "vocab_size": 67, "hidden_size": 32, "n_layers": 2, "n_heads": 8, "mlp_size": 64, "context_len": 64,
    "norm_eps": 1e-6, "rope_theta": 10000.0,
}  # fmt: skip
EXPERTS = MoEConfig(layers=(1,), experts=8, top_k=2, width=32, shared_width=16, scoring="sigmoid", correction_bias=True)
DEEPSEEK = ModelConfig(
    architecture="deepseek_v3", n_kv_heads=8, head_dim=24, **SIZES, moe=EXPERTS,
    latent=LatentConfig(q_lora=24, kv_lora=32, nope=16, rope=8, v_dim=16),
)  # fmt: skip
GPT_OSS = ModelConfig(
    architecture="gpt_oss", n_kv_heads=2, head_dim=16, **SIZES, sinks=True, qkv_bias=True, output_bias=True,
    moe=MoEConfig(layers=(0, 1), experts=8, top_k=2, width=32, biases=True, activation="swiglu_clamped"),
)  # fmt: skip
MODELS = {"deepseek": (DEEPSEEK, deepseek), "gpt-oss": (GPT_OSS, gpt_oss)}


def checkpoint(config: ModelConfig) -> Checkpoint:
    random = np.random.default_rng(5)

    def weights() -> Iterator[Weight]:
        for name, shape in expected_shapes(config):
            numbers = random.standard_normal(shape).astype("<f4") * 0.2 + (len(shape) == 1 and "bias" not in name)
            raw = np.ascontiguousarray(numbers, "<f4").reshape(shape[0], -1).view(np.uint8)
            yield Weight(name, shape, "f32", raw)

    return Checkpoint(CheckpointFiles(config, {each.name: each for each in weights()}, lambda: None))


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", *HALVES])
@given(seed=st.integers(0, 999), axis=st.integers(0, 1), reordered=st.booleans(), n=st.sampled_from([1, 2, 4]))
def test_slices_reassemble_to_the_whole(kind: str, seed: int, axis: int, reordered: bool, n: int) -> None:
    block = FORMATS[kind].block
    whole = random_weight(kind, 8, 4, seed)
    if reordered:
        whole = Weight("w", whole.shape, kind, whole.raw, order=np.random.default_rng(seed).permutation(8))
    size = whole.shape[axis] // n
    parts = [whole.slice(axis, rank * size, (rank + 1) * size) for rank in range(n)]
    assert all(part.shape[axis] == size for part in parts)
    np.testing.assert_array_equal(np.concatenate([part.dense() for part in parts], axis), whole.dense())
    tensors = torch.cat([part.tensor(torch.float32) for part in parts], axis)
    torch.testing.assert_close(tensors, whole.tensor(torch.float32), rtol=0, atol=0, equal_nan=True)
    if block > 1:
        with pytest.raises(BadCheckpoint, match=f"{kind} has blocks of {block}"):
            whole.slice(1, 0, block - 1)


@pytest.mark.parametrize("axis", [0, 1])
def test_slices_of_a_transposed_weight(axis: int) -> None:
    numbers = np.arange(48, dtype="<f4").reshape(6, 8)  # of the file: [cols, rows]
    whole = Weight("w", (8, 6), "f32", numbers.view(np.uint8).reshape(6, -1), transposed=True)
    half = whole.shape[axis] // 2
    parts = [whole.slice(axis, start, start + half) for start in (0, half)]
    np.testing.assert_array_equal(np.concatenate([part.dense() for part in parts], axis), numbers.T)


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_loader_reads_only_the_bytes_of_a_slice_of_rows(tmp_path, monkeypatch, rank: int) -> None:
    numbers = np.random.default_rng(1).standard_normal((64, 100)).astype("<f4")
    path = tmp_path / "w"
    path.write_bytes(bytes(300) + numbers.tobytes())
    whole = Weight("w", (64, 100), "f32", numbers.view(np.uint8), location=FileLocation(path, 300))
    part, target = whole.slice(0, 16 * rank, 16 * rank + 16), torch.zeros(16, 100)
    monkeypatch.delattr(os, "O_DIRECT")  # which reads whole pages
    read: list[tuple[int, int]] = []
    preadv = os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda file, views, at: read.append((at, sum(map(len, views)))) or preadv(file, views, at)
    )
    loader = WeightLoader("cpu")
    loader.fill(part, target)
    assert loader.finish() == part.raw.nbytes == numbers.nbytes // 4
    first, last = 300 + 6400 * rank, 300 + 6400 * (rank + 1)
    assert sum(n for _, n in read) >= part.raw.nbytes, "the loader reads with another call"
    assert all(at > first - 4096 and at + n <= last for at, n in read), "but for the beginning of its first page"
    assert torch.equal(target, torch.from_numpy(numbers[16 * rank : 16 * rank + 16]))


def test_a_slice_of_columns_is_a_view_of_the_file() -> None:
    whole = random_weight("q4_k", 8, 4)
    part = whole.slice(1, 256, 512)
    assert part.raw.nbytes == whole.raw.nbytes // 4
    assert np.shares_memory(part.raw, whole.raw)


def delta(model: Decoder, layer: Layer, block: str, x: torch.Tensor) -> torch.Tensor:
    """What a block adds to the residual x of one prompt."""
    backend, out = TorchBackend(), x.clone()
    context = backend.begin_step(
        step([(list(range(len(x))), 0)], torch.tensor([[0, 1]]), len(model.kv_groups)),
        pools(model, 2),
        model.kv_groups,
        model._ropes,
    )
    if block == "attention":
        attn = layer.attention
        attend = backend.latent_attention if hasattr(attn, "kv_lora") else backend.grouped_query_attention
        attend(attn, out, context)
    else:
        feed = layer.feed_forward
        (backend.moe if hasattr(feed, "router") else backend.mlp)(feed, out)
    return out - x


@pytest.mark.parametrize("of", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_the_ranks_blocks_add_up_to_the_models(name: str, of: int) -> None:
    config, architecture = MODELS[name]
    source = checkpoint(config)
    whole = Decoder(source, TorchBackend(), architecture)
    ranks = [Decoder(RankCheckpoint(source, Rank(n, of)), TorchBackend(), architecture) for n in range(of)]
    x = torch.randn(20, 32, generator=torch.Generator().manual_seed(2))
    for n in range(config.n_layers):
        for block in ("attention", "feed_forward"):
            want = delta(whole, whole.layers[n], block, x)
            got = sum(delta(rank, rank.layers[n], block, x) for rank in ranks)
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("experts_by", ["width", "expert"])
def test_a_rank_loads_its_share_by_the_same_loader(experts_by: ExpertsBy) -> None:
    source = checkpoint(DEEPSEEK)
    total = sum(source.weight(name).raw.nbytes for name in source.names)
    for n in range(4):
        rank = RankCheckpoint(source, Rank(n, 4), experts_by)
        assert total / 4 < _bytes(rank) < total / 2, "norms, router and first projections are whole"
        model = load_model(rank)  # which refuses tensors that it has no use for
        assert model.layers[0].attention.heads == 2


def _bytes(rank: RankCheckpoint) -> int:
    return sum(rank.weight(name).raw.nbytes for name in rank.names)


def test_experts_by_expert() -> None:
    source = checkpoint(DEEPSEEK)
    rank = RankCheckpoint(source, Rank(1, 4), "expert")
    assert rank.config.moe is not None
    assert (rank.config.moe.experts, rank.config.moe.width) == (2, 32)
    name = "blk.1.ffn_down_exps.{}.weight"
    assert rank.weight(name.format(0)) == source.weight(name.format(2))
    assert {n for n in rank.names if n.startswith("blk.1.ffn_down_exps")} == {name.format(0), name.format(1)}


def test_the_vocabulary_need_not_divide() -> None:
    source = checkpoint(DEEPSEEK)
    rows = [RankCheckpoint(source, Rank(n, 4)).weight("token_embd.weight").dense() for n in range(4)]
    np.testing.assert_array_equal(np.concatenate(rows), source.weight("token_embd.weight").dense())


@pytest.mark.parametrize(
    ("changes", "of", "experts_by", "message"),
    [
        ({}, 3, "width", "KV heads: 8 cannot be divided among 3 ranks, but among 2 or 4"),
        ({"mlp_size": 66}, 4, "width", "width of the MLP: 66 cannot be divided among 4 ranks"),
        ({"moe": msgspec.structs.replace(EXPERTS, experts=6)}, 4, "expert", "experts: 6 cannot be divided"),
    ],
)
def test_what_does_not_divide_is_refused(
    changes: dict[str, object], of: int, experts_by: ExpertsBy, message: str
) -> None:
    source = checkpoint(msgspec.structs.replace(DEEPSEEK, **changes))
    with pytest.raises(BadCheckpoint, match=message):
        RankCheckpoint(source, Rank(0, of), experts_by)


def test_columns_are_divided_between_groups() -> None:
    weights = {"blk.0.ffn_down.weight": random_weight("q8_0", 32, 6)}
    source = Checkpoint(CheckpointFiles(DEEPSEEK, weights, lambda: None))
    assert RankCheckpoint(source, Rank(1, 2)).weight("blk.0.ffn_down.weight").shape == (32, 96)
    with pytest.raises(BadCheckpoint, match="blocks of 32: it cannot be divided among 4 ranks, but among 3 or 6"):
        RankCheckpoint(source, Rank(1, 4)).weight("blk.0.ffn_down.weight")
