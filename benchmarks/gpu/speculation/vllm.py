"""Recorded replies by vLLM, without speculation and with its n-grams; its draws are replaced by the recorded tokens."""

import importlib
import os
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.speculation.inputs import MAX_REPLY, Recorded
from benchmarks.gpu.speculation.parts import asked_for

BATCHES = (1, 16)
NGRAMS = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
SETTINGS = {"off": None, "ngram": NGRAMS}


def measure(folder: Path, recorded: list[Recorded], setting: str | None = None) -> dict[str, Any]:
    """setting: of `SETTINGS`; None: both."""
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
    for name in SETTINGS if setting is None else (setting,):
        speculation = SETTINGS[name]
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

        run(max(BATCHES), most=8)  # compiles its kernels, and caches the prompts
        rows[name] = {str(batch): run(batch) for batch in BATCHES}
        print(f"vllm {name}: {rows[name]}", flush=True)
        engine.llm_engine.engine_core.shutdown()
        del engine
        torch.cuda.empty_cache()
    return rows
