"""vLLM on one GPU, offline: the workloads of `benchmarks.gpu` with the same shapes and formulas. Figures go to a file.

Runs under a Python that has torch and transformers, with an unpacked bundle of vLLM on PYTHONPATH. Of ours it has the
shapes of models and, for single workloads, the generator of weights: see `vllm_generated`.
"""

import argparse
import asyncio
import importlib
import itertools
import json
import os
import random
import runpy
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # not in the bundle
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
EVERYTHING = ["decode", "warm", "prefill", "throughput", "agentic"]
sys.path.append(str(Path(__file__).parent))
importlib.import_module("absent_modules").install()  # here, and so in the processes that vLLM starts too


def model_folder() -> str:
    file = Path(__file__).parents[1] / "gpu" / "model_files.py"
    shapes = runpy.run_path(str(file))  # alone: its folder has a `kernels`
    folder = tempfile.mkdtemp()
    Path(folder, "config.json").write_text(json.dumps(shapes["LLAMA_8B"]))
    return folder


def offline(out: Path, folder: str, only: list[str], repeats: int, limit_s: float) -> None:
    """Figures are written as they come: what was measured before a failure counts, and nothing begins after the limit.

    Of single workloads, which are named as in `gpu.large_models`, each repeat is told.
    """
    started = began = time.perf_counter()
    import vllm
    from vllm import LLM, SamplingParams

    figures: dict[str, Any] = {"version": vllm.__version__, "import_s": time.perf_counter() - started}
    generated = only != EVERYTHING
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
        worker_extension_cls="vllm_generated.CountsExperts" if generated else "",
    )
    figures["init_s"] = time.perf_counter() - started
    source = random.Random(0)

    def some(n: int) -> list[int]:
        return [source.randrange(1000, 120_000) for _ in range(n)]

    def generate(
        prompts: list[list[int]], n_out: int, temperature: float = 0.0, top_p: float = 1.0
    ) -> tuple[float, list[list[int]]]:
        sampling = SamplingParams(
            max_tokens=n_out, ignore_eos=True, temperature=temperature, top_p=top_p, detokenize=False
        )
        begin = time.perf_counter()
        outs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        return time.perf_counter() - begin, [list(out.outputs[0].token_ids) for out in outs]

    def decode(batch: int, *sampling: float) -> dict[str, Any]:
        for _ in range(2):
            first_s, _ = generate([some(512) for _ in range(batch)], 1, *sampling)
            whole_s, _ = generate([some(512) for _ in range(batch)], 129, *sampling)
        return {"tok_s": batch * 128 / (whole_s - first_s)}

    def prefill(length: int) -> float:
        return min(generate([some(length)], 1)[0] for _ in range(3))

    def throughput() -> dict[str, float]:
        seconds, outs = generate([some(1024) for _ in range(512)], 256)
        return {"s": seconds, "out_tok_s": sum(map(len, outs)) / seconds}

    def agentic() -> dict[str, float]:
        system = some(4096)
        histories = [system + some(256) for _ in range(32)]
        begin = time.perf_counter()
        for _ in range(8):
            _, outs = generate(histories, 128)
            histories = [history + out_ids + some(384) for history, out_ids in zip(histories, outs)]
        return {"s": time.perf_counter() - begin}

    def single(name: str) -> float:
        """One repeat of a workload."""
        if name.isdigit():
            return prefill(int(name))
        if name in ("throughput", "agentic"):
            return (throughput if name == "throughput" else agentic)()["s"]
        top_p, _, rows = name.rpartition("b")
        return float(decode(int(rows), *((0.8, 0.9) if top_p else (1.0,)))["tok_s"])

    def touched(batch: int) -> float:
        """Experts of a layer that the last full step of a batch touched; outside the measured runs."""
        llm.collective_rpc("forget_experts")
        generate([some(512) for _ in range(batch)], 16, 1.0)
        return llm.collective_rpc("count_experts", args=(batch,))[0]

    def measure(name: str, figure: Any) -> None:
        figures[name] = figure
        out.write_text(json.dumps(figures, indent=1))

    has_experts = "experts" in Path(folder, "config.json").read_text()
    if generated:
        measure("weights", llm.collective_rpc("weights_from")[0])
    generate([some(64), some(64)], 8)
    if generated:
        for name in only:
            if time.perf_counter() - began > limit_s:
                break
            measure("workloads", figures.get("workloads", {}) | {name: [single(name) for _ in range(repeats)]})
            if has_experts and name[0] == "b":
                measure("touched", figures.get("touched", {}) | {name: touched(int(name[1:]))})
    else:
        for batch in (1, 8, 32, 64, 128, 256):
            measure("decode", figures.get("decode", {}) | {f"b{batch}": decode(batch)})
        measure("warm", {f"b{batch}": decode(batch, 0.7) for batch in (1, 64)})
        measure("prefill", {str(length): prefill(length) for length in (8192, 32768)})
        measure("throughput", throughput())
        measure("agentic", agentic())
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
    parser.add_argument("--only", nargs="+", default=EVERYTHING, help="single workloads, with generated weights")
    parser.add_argument("--repeats", type=int, default=1, help="of single workloads")
    parser.add_argument("--limit-s", type=float, default=1e9, help="begin no single workload after so many seconds")
    args = parser.parse_args()
    if args.mixed:
        figures = {f"budget_{n}": asyncio.run(mixed(n)) for n in args.mixed}
        args.out.write_text(json.dumps(figures, indent=1))
    else:
        offline(args.out, args.model or model_folder(), args.only, args.repeats, args.limit_s)


if __name__ == "__main__":
    main()
