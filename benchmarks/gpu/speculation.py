"""Recorded replies of agents on a GPU, with suffix decoding and without: `python -m benchmarks.gpu.speculation TOKENS`.

A model of Llama 8B's shape with random weights computes and draws as ever, then the recorded token takes the place of
the one drawn (`benchmarks/replay_runner.py`). Prompts are computed before the clock starts: only decoding is measured,
for 1 and 16 requests at a time. With `--vllm` the same requests by vLLM, without speculation and with its n-grams; its
draws are replaced in the same way. Run that with a bundle of vLLM on PYTHONPATH, as `benchmarks.gpu --vllm` does.

TOKENS is made of a trace (`benchmarks.speculation --trace`) where a tokenizer is: `--make FILE`.
"""

import argparse
import gzip
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

MAX_REQUESTS, MAX_PROMPT, MAX_REPLY, MIN_REPLY = 112, 6500, 400, 24  # tokens
FEW = 24  # requests that are replayed one at a time
BATCHES = (1, 16)
TARGETS = {1: 1.8, 16: 1.4}  # times the tokens per second without drafts
NGRAMS = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}


class Recorded(NamedTuple):
    prompt: list[int]
    reply: list[int]


def make(trace: Path, path: Path) -> None:
    """Tokens of recorded requests, by the default model's tokenizer."""
    from benchmarks.emberline_contender import default_gguf
    from emberline.protocol.token_ids import unpack
    from emberline.text.text_model import TextModel

    text, found = TextModel.load(default_gguf()), list[Recorded]()
    with gzip.open(trace, "rt") if trace.suffix == ".gz" else trace.open() as lines:
        rows = sorted((json.loads(line) for line in lines), key=lambda row: row.get("timestamp", 0))
    for row in rows:
        if len(row["input"]) > 8 * MAX_PROMPT:
            continue
        prompt, reply = (unpack(text.encode(row[name], special=False)) for name in ("input", "output"))
        if len(prompt) <= MAX_PROMPT and len(reply) >= MIN_REPLY and len(found) < MAX_REQUESTS:
            found.append(Recorded(prompt, reply[:MAX_REPLY]))
    np.savez_compressed(
        path,
        prompts=np.concatenate([each.prompt for each in found]).astype(np.uint32),
        replies=np.concatenate([each.reply for each in found]).astype(np.uint32),
        n_prompt=[len(each.prompt) for each in found],
        n_reply=[len(each.reply) for each in found],
    )


def read(path: Path) -> list[Recorded]:
    with np.load(path) as data:
        prompts = np.split(data["prompts"], np.cumsum(data["n_prompt"])[:-1])
        replies = np.split(data["replies"], np.cumsum(data["n_reply"])[:-1])
    return [Recorded(prompt.tolist(), reply.tolist()) for prompt, reply in zip(prompts, replies, strict=True)]


def asked_for(recorded: list[Recorded], batch: int) -> list[Recorded]:
    return recorded[:FEW] if batch == 1 else recorded


class Engine:
    """The worker's parts, in this process."""

    def __init__(self, folder: Path, setting: str, device: str = "cuda") -> None:
        from benchmarks.replay_runner import Replay
        from emberline.engine import worker
        from emberline.engine.step_loop import StepLoop

        flags = ["--model", str(folder), "--socket", "unused", "--device", device, "--max-running", str(max(BATCHES))]
        loop, info, _ = worker.build(worker.parse_arguments([*flags, "--speculation", setting]))
        assert isinstance(loop, StepLoop)
        while loop.has_idle_task:
            loop.run_idle_task()
        self.loop, self.replay = loop, Replay(loop._runner, info.eos_ids[0])
        loop._runner = self.replay
        self._serial = 0

    def run(self, recorded: list[Recorded], batch: int, most: int = MAX_REPLY) -> float:
        """`batch` requests at a time; returns tokens per second."""
        from emberline.protocol.request import EngineRequest, SamplingParams
        from emberline.protocol.token_ids import pack

        waiting, n_tokens, began_s = deque(recorded), 0, time.perf_counter()
        n_open = 0
        while waiting or n_open:
            while waiting and n_open < batch:
                prompt, reply = waiting.popleft()
                self._serial, n_open = self._serial + 1, n_open + 1
                sampling = SamplingParams(max_tokens=min(most, len(reply)), ignore_eos=True, temperature=0.0)
                request = EngineRequest(id=str(self._serial), prompt_ids=pack(prompt), sampling=sampling)
                self.replay.replies[request.id] = reply
                self.loop.submit(request, time.monotonic())
            for delta in self.loop.step(time.monotonic()):
                assert delta.error is None, delta.error
                n_tokens += len(delta.token_ids) // 4
                n_open -= delta.finish is not None
        return n_tokens / (time.perf_counter() - began_s)


def measure_setting(folder: Path, recorded: list[Recorded], setting: str) -> dict[str, Any]:
    engine = Engine(folder, setting)
    engine.run(recorded, max(BATCHES), most=1)  # caches the prompts
    found: dict[str, Any] = {str(batch): engine.run(asked_for(recorded, batch), batch) for batch in BATCHES}
    found["drafted, accepted"] = [(sum(each.drafted), sum(each.accepted)) for each in engine.loop.load.drafts]
    return found


def measure_ours(folder: Path, tokens: Path) -> dict[str, Any]:
    """A process for each setting: an engine takes all of the device's memory."""
    rows: dict[str, Any] = {}
    for setting in ("off", "suffix"):
        command = [sys.executable, "-m", "benchmarks.gpu.speculation", str(tokens), "--model", str(folder)]
        done = subprocess.run([*command, "--setting", setting], stdout=subprocess.PIPE, text=True, check=True)
        rows[setting] = json.loads(done.stdout.splitlines()[-1])
    return rows


def measure_vllm(folder: Path, recorded: list[Recorded]) -> dict[str, Any]:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # draws are replaced in this process
    importlib.import_module("benchmarks.peers.vllm_gpu")  # stands in for modules that the bundle lacks
    import torch
    from vllm import LLM, SamplingParams
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    original = GPUModelRunner._sample

    def replayed(self: Any, logits: Any, metadata: Any) -> Any:
        """The recorded tokens, as far as the drafts are those, and one more."""
        output, batch = original(self, logits, metadata), self.input_batch
        width = output.sampled_token_ids.shape[-1]
        rows = []
        for index, request_id in enumerate(batch.req_ids):
            state = self.requests[request_id]
            extra = state.sampling_params.extra_args if state.sampling_params is not None else None
            if not extra:  # while it profiles itself
                return output
            at = len(state.output_token_ids)
            reply = recorded[extra["reply"]].reply[at : at + width] or [0]
            n = 0
            drafts = batch.spec_token_ids[index] if metadata is not None else []
            while n < min(len(drafts), len(reply) - 1, width - 1) and drafts[n] == reply[n]:
                n += 1
            rows.append(reply[: n + 1] + [-1] * (width - n - 1))
        if rows:
            output.sampled_token_ids = torch.tensor(rows, dtype=torch.int32).to("cuda", non_blocking=True)
        return output

    GPUModelRunner._sample = replayed
    rows: dict[str, Any] = {}
    for name, speculation in (("off", None), ("ngram", NGRAMS)):
        engine = LLM(
            str(folder), skip_tokenizer_init=True, load_format="dummy", max_model_len=8192, async_scheduling=False,
            max_num_seqs=max(BATCHES), gpu_memory_utilization=0.85, speculative_config=speculation,
        )  # fmt: skip

        def run(batch: int, most: int = MAX_REPLY, engine: Any = engine) -> float:
            asked = asked_for(recorded, batch)
            groups = [list(enumerate(asked))] if batch > 1 else [[each] for each in enumerate(asked)]
            n_tokens, began_s = 0, time.perf_counter()
            for group in groups:
                outputs = engine.generate(
                    [{"prompt_token_ids": each.prompt} for _, each in group],
                    [
                        SamplingParams(
                            max_tokens=min(most, len(each.reply)), ignore_eos=True, temperature=0.0, detokenize=False,
                            extra_args={"reply": number},
                        )
                        for number, each in group
                    ],
                    use_tqdm=False,
                )  # fmt: skip
                n_tokens += sum(len(output.outputs[0].token_ids) for output in outputs)
            return n_tokens / (time.perf_counter() - began_s)

        run(max(BATCHES), most=1)
        rows[name] = {str(batch): run(batch) for batch in BATCHES}
        engine.llm_engine.engine_core.shutdown()
        del engine
        torch.cuda.empty_cache()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.speculation", description=__doc__)
    parser.add_argument("tokens", type=Path)
    parser.add_argument("--make", type=Path, metavar="TRACE", help="write TOKENS from a trace, and stop")
    parser.add_argument(
        "--model", type=Path, help="a folder with the model (default: one with random weights is written)"
    )
    parser.add_argument("--setting", help="measure this value of --speculation alone, and print the figures as JSON")
    parser.add_argument("--vllm", action="store_true", help="measure vLLM instead")
    parser.add_argument(
        "--json", type=Path, default=Path("bench-gpu-speculation.json"), help="where to add the figures"
    )
    options = parser.parse_args()
    if options.make is not None:
        make(options.make, options.tokens)
        return 0
    recorded = read(options.tokens)
    folder = options.model
    if folder is None:
        from benchmarks.gpu import model_files

        folder = Path(tempfile.gettempdir()) / "speculation-llama-8b"
        if options.vllm:  # generates its weights itself
            folder.mkdir(exist_ok=True)
            (folder / "config.json").write_text(json.dumps(model_files.LLAMA_8B))
        elif not (folder / "config.json").exists():
            model_files.write(folder, model_files.LLAMA_8B)
    if options.setting is not None:
        print(json.dumps(measure_setting(folder, recorded, options.setting)))
        return 0
    facts = json.loads(options.json.read_text()) if options.json.exists() else {}
    name = "vllm" if options.vllm else "emberline"
    facts[name] = rows = measure_vllm(folder, recorded) if options.vllm else measure_ours(folder, options.tokens)
    options.json.write_text(json.dumps(facts, indent=1) + "\n")
    for setting, row in rows.items():
        print(f"{name} {setting}: {row}", flush=True)
    if options.vllm:
        return 0
    gains = {batch: rows["suffix"][str(batch)] / rows["off"][str(batch)] for batch in BATCHES}
    print(", ".join(f"batch {batch}: {gain:.2f} (at least {TARGETS[batch]} wanted)" for batch, gain in gains.items()))
    return 0 if all(gain >= TARGETS[batch] for batch, gain in gains.items()) else 1


if __name__ == "__main__":
    sys.exit(main())
