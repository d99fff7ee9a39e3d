"""Large models on one GPU, random weights, vLLM beside: Kimi K2.5 cut to 9 layers, Qwen3-30B-A3B, GLM-4.7-Flash, FP8.

The weights come from `emberline.weights.generated`, and for vLLM from the same distribution (see `peers/vllm_gpu.py`):
activations of unit size, and random routers. The experts that rows choose are not pinned: rates above the floor
of uniform routing show that rows share some, so batches of a mixture of experts are not comparable between engines.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu import workloads
from benchmarks.gpu.engine import compile_kernels, wait_until_prepared, worker
from benchmarks.gpu.model_files import LLAMA_8B
from benchmarks.gpu.workloads import Prompts

PEER = Path(__file__).parents[1] / "peers" / "vllm_gpu.py"
TEMPERATURE = (
    1.0  # tokens that differ, so that rows choose different experts; greedy replies to noise repeat themselves
)
VOCAB = 120_000  # of the prompts' tokens; no smaller than that of any of the models
INT4_GROUP_32: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": 32,
                "dynamic": False,
            },
        }
    },
}
FP8_PER_CHANNEL: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": {
                "num_bits": 8,
                "type": "float",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
            "output_activations": None,
            "weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False},
        }
    },
}
KIMI_9: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 9,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.827,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 163840,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 64.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 163584,
    "eos_token_id": 163585,
    "quantization_config": INT4_GROUP_32,
}
QWEN3_30B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
GLM_FLASH: dict[str, Any] = {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "model_type": "glm4_moe_lite",
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 47,
    "first_k_dense_replace": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.8,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "vocab_size": 154880,
    "max_position_embeddings": 202752,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 154820,
}
MODELS = {
    "kimi": (KIMI_9, (1, 8, 32, 64)),
    "qwen3": (QWEN3_30B, (1, 32)),
    "glm": (GLM_FLASH, (1, 32)),
    "fp8": (LLAMA_8B | {"quantization_config": FP8_PER_CHANNEL}, (1, 64)),
    "bf16": (LLAMA_8B, (1, 64, 256)),
}
PROMPTS = {"bf16": (8192, 32768)}  # tokens; of the others 8,192
LENGTHS = ("8192", "32768")
MUST = {
    "kimi": {"b1": 1.15, "b8": 1.10, "b32": 1.10, "b64": 1.10, "8192": 1.0},
    "qwen3": {"b1": 1.1, "b32": 1.1},
    "glm": {"b1": 1.1, "b32": 1.1},
    "fp8": {"b1": 1.1, "b64": 1.1, "8192": 1.0},
    "bf16": {"b1": 1.2, "b64": 1.15, "b256": 1.12, "8192": 1.0, "32768": 1.0},
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.large_models", description=__doc__)
    parser.add_argument("models", nargs="*", default=["kimi", "qwen3", "fp8", "bf16"], help=", ".join(MODELS))
    parser.add_argument("--work", type=Path, default=Path("/tmp/emberline-large"))
    parser.add_argument("--out", type=Path, default=Path("large.json"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--starts", type=int, default=1, help="of each engine")
    parser.add_argument("--compiled", action="store_true", help="Triton's cache is warm: skip compiling kernels")
    parser.add_argument("--engines", nargs="+", default=["emberline", "vllm"])
    parser.add_argument("--add", action="store_true", help="to the figures already in --out")
    parser.add_argument("--vllm", type=Path, metavar="DIR", help="folder of an installed vLLM")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Any] = json.loads(args.out.read_text()) if args.add and args.out.exists() else {}
    for name in args.models:
        config, batches = MODELS[name]
        folder = args.work / name
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        figures.setdefault(name, {"emberline": [], "vllm": []})
        for _ in range(args.starts):
            for engine, measure in ("emberline", _ours), ("vllm", _theirs):
                if engine not in args.engines or (engine == "vllm" and args.vllm is None):
                    continue
                begin = time.perf_counter()
                try:
                    found = measure(folder, batches, args)
                except Exception as error:
                    found = {"failed": f"{type(error).__name__}: {error}"[:3000]}
                found["whole_s"] = time.perf_counter() - begin
                figures[name][engine].append(found)
                print(f"{name} {engine}: {json.dumps(found)}", flush=True)
                args.out.write_text(json.dumps(figures, indent=1))
    print(table(figures))
    return 0


def _ours(folder: Path, batches: tuple[int, ...], args: argparse.Namespace) -> dict[str, Any]:
    log = args.work / f"{folder.name}.log"
    flags = ("--random-weights", "0")
    found: dict[str, Any] = (
        {"compiled_s": compile_kernels(folder, log, *flags)} if args.starts == 1 and not args.compiled else {}
    )
    with worker(folder, log, *flags) as engine:
        found |= {"ready_s": engine.ready_s, "prepared_s": wait_until_prepared(engine, log)}
        found |= {"kv_tokens": engine.facts["kv_tokens"], "kv_bytes": engine.facts["kv_bytes"]}
        client, prompts = engine.client, Prompts(0, VOCAB)
        client.generate(prompts.many(2, 64), 8)
        for batch in batches:
            tried = [workloads.decode(client, prompts, batch, TEMPERATURE) for _ in range(args.repeats)]
            found[f"b{batch}"] = [each["tok_s"] for each in tried]
            found[f"steady_b{batch}"] = [each["steady_tok_s"] for each in tried]
        for length in PROMPTS.get(folder.name, (8192,)):
            found[str(length)] = [workloads.prefill(client, prompts, length) for _ in range(args.repeats)]
    return found


def _theirs(folder: Path, batches: tuple[int, ...], args: argparse.Namespace) -> dict[str, Any]:
    out = args.work / f"{folder.name}-vllm.json"
    out.unlink(missing_ok=True)
    env = {**os.environ, "PYTHONPATH": str(args.vllm), "TRITON_CACHE_DIR": str(args.work / "triton-vllm")}
    command = [sys.executable, str(PEER), str(out), "--model", str(folder), "--repeats", str(args.repeats)]
    command += ["--temperature", str(TEMPERATURE)]
    lengths = map(str, PROMPTS.get(folder.name, (8192,)))
    with (args.work / "vllm.log").open("ab") as log:
        subprocess.run([*command, "--only", *(f"b{n}" for n in batches), *lengths], env=env, stdout=log, stderr=log)
    if not out.exists():
        raise RuntimeError((args.work / "vllm.log").read_text(errors="replace")[-2500:])
    figures: dict[str, Any] = json.loads(out.read_text())
    found = {key: figures[key] for key in ("version", "import_s", "init_s", "kv_tokens") if key in figures}
    found |= {batch: each["tok_s"] for batch, each in figures.get("decode", {}).items()}
    found |= figures.get("prefill", {})
    return found


def table(figures: dict[str, Any]) -> str:
    rows = [("", "Emberline", "vLLM", "ratio", "must", "")]
    for name, engines in figures.items():
        for key in ("b1", "b8", "b32", "b64", "b256", "8192", "32768"):
            own, peer = (_all(engines[engine], key) for engine in ("emberline", "vllm"))
            if not own:
                continue
            middle, other = statistics.median(own), statistics.median(peer) if peer else None
            ratio = None if other is None else other / middle if key in LENGTHS else middle / other
            must = MUST.get(name, {}).get(key)
            verdict = "" if ratio is None or must is None else "ok" if ratio >= must else "short"
            title = f"{name}, prefill {int(key):,} s" if key in LENGTHS else f"{name}, decode {key} tok/s"
            cells = (_spread(own), _spread(peer), "–" if ratio is None else f"{ratio:.3f}", f"{must or ''}", verdict)
            rows.append((title, *cells))
    widths = [max(len(row[i]) for row in rows) for i in range(6)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def _all(runs: list[dict[str, Any]], key: str) -> list[float]:
    return [value for run in runs for value in run.get(key, [])]


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.4g} ({min(values):.4g}–{max(values):.4g})" if values else "–"


if __name__ == "__main__":
    raise SystemExit(main())
