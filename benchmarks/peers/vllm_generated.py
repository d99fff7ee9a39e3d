"""An extension of vLLM's worker: the weights of `emberline.weights.generated`, and the experts that steps touch.

Importing it in the process of a worker, before a model is loaded, replaces the values of the `dummy` load format. They
go through the model's own loader by the names of a published checkpoint, so that both engines compute with the same
numbers. The generator's tensors are windows of a few megabytes, which are cut on the device.

The experts that a captured step chooses are kept, not copied: while something refers to a tensor of a CUDA graph, its
memory is not used for another, and after a replay it holds the last step's choice. A step has no launch more.
"""

import json
import statistics
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

sys.path.append(str(Path(__file__).parents[2]))  # the last one: what both have is vLLM's

from emberline.weights.generated import generate_tensors
from emberline.weights.tensor_names import hf_name

SEED = 0
_DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32, "fp8": torch.float8_e4m3fn, "u8": torch.uint8}
_on_device: dict[int, tuple[Any, Any]] = {}  # by the address of a pool: the pool and its copy
_load: list[str] = []  # what went wrong
# By the number of a captured step's tokens: the ids of each layer's experts, and how many there are.
_chosen: dict[int, list[tuple[Any, int]]] = {}


def _cut(window: Any) -> Any:
    """Bytes [rows, row_bytes] of a NumPy view on the device, contiguous."""
    pool, base = window, window.base
    while base is not None and not isinstance(base, torch.Tensor):
        pool, base = base, base.base
    if id(pool) not in _on_device:
        _on_device[id(pool)] = pool, torch.from_numpy(np.array(pool).reshape(-1).view(np.uint8)).cuda()
    start = window.__array_interface__["data"][0] - pool.__array_interface__["data"][0]
    found = _on_device[id(pool)][1].as_strided(window.shape, window.strides, start).contiguous()
    if pool.nbytes < 1 << 20:  # of this tensor alone
        del _on_device[id(pool)]
    return found


def tensors(document: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Names and tensors of a checkpoint's files."""
    config, weights = generate_tensors(document, SEED)
    for weight in weights:
        name, data = hf_name(weight.name, config), _cut(weight.raw)
        if name.endswith(".weight_packed"):
            yield name, data.view(torch.int32)
        else:
            yield name, data.view(_DTYPES[weight.kind]).view(weight.shape)


def _load_weights(self: Any, model: Any, model_config: Any) -> None:
    document = json.loads(Path(model_config.model, "config.json").read_text())
    try:
        model.load_weights(tensors(document))
    except Exception as error:
        traceback.print_exc()
        _load.append(f"other values of the same distribution: {type(error).__name__}: {error}"[:300])
        _fill_alike(model)
    _on_device.clear()


def _fill_alike(model: Any) -> None:
    """Values of the generator's distribution, for a model whose loader does not take its tensors."""
    generator = torch.Generator("cuda").manual_seed(SEED)
    for name, tensor in model.state_dict().items():
        part = name.rpartition(".")[2]
        if part in ("q_scale", "k_scale", "v_scale", "_q_scale", "_k_scale", "_v_scale", "_prob_scale"):
            continue  # of a quantized KV cache
        if "norm" in name and tensor.dim() == 1:
            tensor.fill_(1.0)
        elif "bias" in part:
            tensor.zero_()
        elif tensor.dtype == torch.int32 and tensor.dim() >= 2 and tensor.numel() > 1 << 16:
            for rows in tensor.view(torch.uint8).flatten(0, -2).split(4096):
                low, high = (
                    torch.randint(1, 16, rows.shape, generator=generator, device="cuda", dtype=torch.uint8)
                    for _ in range(2)
                )
                rows.copy_(low | high << 4)
        elif tensor.dtype == torch.float8_e4m3fn:
            for rows in tensor.view(torch.uint8).flatten(0, -2).split(4096):
                numbers = torch.randn(rows.shape, generator=generator, device="cuda")
                rows.copy_(numbers.to(torch.float8_e4m3fn).view(torch.uint8))
        elif "scale" in part:
            tensor.fill_(0.003)
        elif tensor.is_floating_point():
            tensor.normal_(0, 1 if "embed_tokens" in name else tensor.shape[-1] ** -0.5, generator=generator)


_select_experts = BaseRouter._select_experts


def _keep_chosen(self: Any, *args: Any, **kwargs: Any) -> Any:
    weights, ids = _select_experts(self, *args, **kwargs)
    if torch.cuda.is_current_stream_capturing():
        _chosen.setdefault(len(ids), []).append((ids, self.global_num_experts))
    return weights, ids


DummyModelLoader.load_weights = _load_weights
BaseRouter._select_experts = _keep_chosen


class CountsExperts:
    """Methods of the worker, for `LLM.collective_rpc`."""

    def weights_from(self) -> str:
        return _load[0] if _load else "the same generator"

    def forget_experts(self) -> None:
        with torch.inference_mode():  # the tensors are of one
            for each in _chosen.values():
                for ids, _ in each:
                    ids.fill_(0)

    def count_experts(self, tokens: int) -> float:
        """Experts that the last step of so many tokens touched in a layer; 0 if none was replayed since `forget`.

        Where another tensor has taken their memory after all, the numbers there are no experts, and do not count.
        """
        found = [(ids.unique(), n) for ids, n in _chosen.get(tokens, [])]
        touched = [len(ids) for ids, n in found if len(ids) > 1 and int(ids[0]) >= 0 and int(ids[-1]) < n]
        return statistics.mean(touched) if touched else 0.0
