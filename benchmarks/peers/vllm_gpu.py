"""vLLM on one GPU, offline: the workloads of `benchmarks.gpu` with the same shapes and formulas. Figures go to a file.

Runs under a Python that has torch and transformers, with an unpacked bundle of vLLM on PYTHONPATH and nothing of ours.
"""

import argparse
import asyncio
import importlib.abc
import importlib.machinery
import itertools
import json
import os
import random
import runpy
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

os.environ |= {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # not in the bundle
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
EVERYTHING = ["decode", "warm", "prefill", "throughput", "agentic"]
ABSENT = {"xgrammar", "soundfile", "pycountry", "tilelang", "supervisor"}  # imported by vLLM, never used here


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules left out of the bundle: importing one gives an object that answers to anything."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] not in ABSENT:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        module = MagicMock(name=spec.name)
        for key, value in dict(__spec__=spec, __path__=[], __name__=spec.name, __version__="0").items():
            setattr(module, key, value)
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.append(Absent())  # here, and so in the processes that vLLM starts too


def model_folder() -> str:
    file = Path(__file__).parents[1] / "gpu" / "model_files.py"
    shapes = runpy.run_path(str(file))  # alone: its folder has a `kernels`
    folder = tempfile.mkdtemp()
    Path(folder, "config.json").write_text(json.dumps(shapes["LLAMA_8B"]))
    return folder


def init_as_the_generator() -> None:
    """Random weights of the distribution that `emberline.weights.generated` has, in place of vLLM's own.

    Its own leave the residual stream and the router degenerate: all tokens choose the same few experts, and a step
    reads far fewer weights than one of a trained model.
    """
    import torch
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    def load_weights(self: Any, model: Any, model_config: Any) -> None:
        generator = torch.Generator("cuda").manual_seed(0)
        for name, tensor in model.state_dict().items():
            part = name.rpartition(".")[2]
            if part in ("q_scale", "k_scale", "v_scale", "_q_scale", "_k_scale", "_v_scale", "_prob_scale"):
                continue  # of a quantized KV cache
            if "norm" in name and tensor.dim() == 1:
                tensor.fill_(1.0)
            elif "bias" in part:
                tensor.zero_()
            elif not tensor.is_floating_point():
                _fill_codes(tensor, generator)
            elif tensor.dtype == torch.float8_e4m3fn:
                for rows in tensor.view(torch.uint8).flatten(0, -2).split(4096):
                    numbers = torch.randn(rows.shape, generator=generator, device="cuda")
                    rows.copy_(numbers.to(torch.float8_e4m3fn).view(torch.uint8))
            elif "scale" in part:
                tensor.fill_(0.004)
            elif "embed_tokens" in name:
                tensor.normal_(0, 1, generator=generator)
            else:
                tensor.normal_(0, tensor.shape[-1] ** -0.5, generator=generator)

    def _fill_codes(tensor: Any, generator: Any) -> None:
        if "int32" in str(tensor.dtype) and tensor.dim() >= 2 and tensor.numel() > 1 << 16:
            tensor.view(torch.uint8).random_(0, 256, generator=generator)

    DummyModelLoader.load_weights = load_weights


def offline(out: Path, folder: str, only: list[str], repeats: int, temperature: float) -> None:
    """Figures are written as they come: what was measured before a failure counts."""
    started = time.perf_counter()
    import vllm
    from vllm import LLM, SamplingParams

    figures: dict[str, Any] = {"version": vllm.__version__, "import_s": time.perf_counter() - started}
    if only != EVERYTHING:
        init_as_the_generator()
    started = time.perf_counter()
    llm = LLM(
        model=folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        enable_prefix_caching=True,
        gpu_memory_utilization=0.9,
        max_model_len=40960,
        max_num_seqs=512,
        seed=0,
    )
    figures["init_s"] = time.perf_counter() - started
    source = random.Random(0)

    def some(n: int) -> list[int]:
        return [source.randrange(1000, 120_000) for _ in range(n)]

    def generate(prompts: list[list[int]], n_out: int, temperature: float = 0.0) -> tuple[float, list[list[int]]]:
        sampling = SamplingParams(max_tokens=n_out, ignore_eos=True, temperature=temperature, detokenize=False)
        begin = time.perf_counter()
        outs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        return time.perf_counter() - begin, [list(out.outputs[0].token_ids) for out in outs]

    def decode(batch: int, temperature: float = 0.0) -> dict[str, Any]:
        for _ in range(2):
            first_s, _ = generate([some(512) for _ in range(batch)], 1, temperature)
            whole_s, _ = generate([some(512) for _ in range(batch)], 129, temperature)
        return {"tok_s": batch * 128 / (whole_s - first_s)}

    def measure(name: str, figure: Any) -> None:
        figures[name] = figure
        out.write_text(json.dumps(figures, indent=1))

    generate([some(64), some(64)], 8)
    for batch in (1, 8, 32, 64, 128, 256):
        if "decode" in only or f"b{batch}" in only:
            each = (
                decode(batch)
                if "decode" in only
                else {"tok_s": [decode(batch, temperature)["tok_s"] for _ in range(repeats)]}
            )
            measure("decode", figures.get("decode", {}) | {f"b{batch}": each})
    if "warm" in only:
        measure("warm", {f"b{batch}": decode(batch, 0.7) for batch in (1, 64)})
    for length in (8192, 32768):
        if "prefill" in only or str(length) in only:
            best = [min(generate([some(length)], 1)[0] for _ in range(3)) for _ in range(repeats)]
            measure("prefill", figures.get("prefill", {}) | {str(length): best[0] if "prefill" in only else best})
    if "throughput" in only:
        seconds, outs = generate([some(1024) for _ in range(512)], 256)
        measure("throughput", {"s": seconds, "out_tok_s": sum(map(len, outs)) / seconds})
    if "agentic" in only:
        system = some(4096)
        histories = [system + some(256) for _ in range(32)]
        begin = time.perf_counter()
        for _ in range(8):
            _, outs = generate(histories, 128)
            histories = [history + out_ids + some(384) for history, out_ids in zip(histories, outs)]
        measure("agentic", {"s": time.perf_counter() - begin})
    cache = llm.llm_engine.vllm_config.cache_config
    measure("kv_tokens", cache.num_gpu_blocks * cache.block_size)


async def mixed(budget: int, every_s: float = 0.5) -> dict[str, Any]:
    """Inter-token latency of 32 streams while prompts of 8,192 tokens arrive; it depends on the token budget."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=model_folder(),
            load_format="dummy",
            skip_tokenizer_init=True,
            enable_prefix_caching=True,
            gpu_memory_utilization=0.9,
            max_model_len=40960,
            max_num_seqs=256,
            max_num_batched_tokens=budget,
            seed=0,
        )
    )
    source, n_asked = random.Random(1), 0

    async def ask(n_in: int, n_out: int) -> list[float]:
        """When it was sent, and when each token came."""
        nonlocal n_asked
        n_asked += 1
        prompt = {"prompt_token_ids": [source.randrange(1000, 120_000) for _ in range(n_in)]}
        kind = RequestOutputKind.DELTA
        sampling = SamplingParams(
            max_tokens=n_out, ignore_eos=True, temperature=0.0, detokenize=False, output_kind=kind
        )
        times = [time.perf_counter()]
        async for _ in engine.generate(prompt, sampling, request_id=f"r{n_asked}"):
            times.append(time.perf_counter())
        return times

    await asyncio.gather(*(ask(256, 16) for _ in range(4)))
    streams = asyncio.gather(*(ask(512, 1200) for _ in range(32)))
    await asyncio.sleep(0.5)
    arrivals = []
    while not streams.done():
        arrivals.append(asyncio.create_task(ask(8192, 16)))
        await asyncio.sleep(every_s)
    gaps = sorted(after - before for times in await streams for before, after in itertools.pairwise(times[1:]))
    waits = sorted(times[1] - times[0] for times in await asyncio.gather(*arrivals))
    engine.shutdown()

    def at(values: list[float], q: float) -> float:
        return values[min(len(values) - 1, int(q * len(values)))]

    return {
        "itl_ms": {f"p{int(q * 100)}": 1e3 * at(gaps, q) for q in (0.5, 0.9, 0.99)},
        "ttft_s": {f"p{int(q * 100)}": at(waits, q) for q in (0.5, 0.9)},
        "budget": budget,
    }


def main() -> None:
    """One engine a process, so each part is run in one of its own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--mixed", type=int, nargs="+", metavar="BUDGET")
    parser.add_argument("--model", metavar="FOLDER", help="with a config.json; default: a Llama of 8B parameters")
    parser.add_argument("--only", nargs="+", default=EVERYTHING, help="of these, or bN for a batch, N for a prompt")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=0.0, help="of single batches")
    args = parser.parse_args()
    if args.mixed:
        figures = {f"budget_{n}": asyncio.run(mixed(n)) for n in args.mixed}
        args.out.write_text(json.dumps(figures, indent=1))
    else:
        offline(args.out, args.model or model_folder(), args.only, args.repeats, args.temperature)


if __name__ == "__main__":
    main()
