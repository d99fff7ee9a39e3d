"""The layout for `serve --gpus auto`, found in a process of its own: the server's does not import torch.

`python -m emberline.engine.planning.recommendation --model PATH --gpus 8` prints it as one line of JSON, or why there
is none. The GPUs are those that torch sees, unless they are named: `--gpus 8xH100`.
"""

import argparse
import sys
from pathlib import Path

import msgspec

from emberline.engine.core.limits import Limits
from emberline.engine.planning.hardware import Gpu, gpu_of_device, parse_gpus
from emberline.protocol.errors import BadInput
from emberline.protocol.parallel_layout import Layout
from emberline.weights.checkpoint import Checkpoint, open_checkpoint
from emberline.weights.model_config import BadCheckpoint
from emberline.weights.vision_config import read_tower_config


class Recommendation(msgspec.Struct, frozen=True):
    layout: Layout = Layout()
    error: str = ""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("emberline.engine.planning.recommendation", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, metavar="PATH")
    parser.add_argument("--gpus", required=True, metavar="N", help="a number, or NxGPU")
    parser.add_argument("--workers", default="", metavar="P:D", help="prefill and decode workers, where they are apart")
    parser.add_argument("--max-running", type=int, default=0, metavar="N", help="0: the worker's default")
    parser.add_argument("--token-budget", type=int, default=0, metavar="N")
    args = parser.parse_args(argv)
    try:
        found = Recommendation(_recommend(args))
    except (BadInput, BadCheckpoint) as error:
        found = Recommendation(error=str(error))
    sys.stdout.buffer.write(msgspec.json.encode(found) + b"\n")
    sys.stdout.flush()
    return 1 if found.error else 0


def _recommend(args: argparse.Namespace) -> Layout:
    count, gpu = _gpus(args.gpus)

    from emberline.engine.planning.layout_plan import Workload
    from emberline.engine.planning.layout_search import recommend
    from emberline.engine.worker.build import GPU_DEFAULTS

    checkpoint: Checkpoint = open_checkpoint(args.model)
    config = checkpoint.config
    limits = Limits(
        context_len=config.context_len,
        vocab_size=config.vocab_size,
        eos_ids=config.eos_ids,
        max_running=args.max_running or GPU_DEFAULTS["max_running"],
        token_budget=args.token_budget or GPU_DEFAULTS["token_budget"],
    )
    prefill, _, decode = args.workers.partition(":")
    most = max(2, config.context_len)  # a model of few tokens is asked for few
    workload = Workload(
        input_tokens=min(Workload().input_tokens, most // 2),
        output_tokens=min(Workload().output_tokens, most // 2),
        split=(int(prefill), int(decode)) if args.workers else None,
    )
    return recommend(checkpoint, gpu, count, limits, workload, read_tower_config(args.model))


def _gpus(text: str) -> tuple[int, Gpu]:
    if not text.isdecimal():
        return parse_gpus(text)
    import torch

    if torch.cuda.device_count() < int(text):
        raise BadInput(f"torch sees {torch.cuda.device_count()} of {text} GPUs", param="gpus")
    smallest = min((torch.cuda.get_device_properties(n) for n in range(int(text))), key=lambda gpu: gpu.total_memory)
    return int(text), gpu_of_device(smallest.name, smallest.total_memory)


if __name__ == "__main__":
    sys.exit(main())
