"""A draft head for a model, from prompts to files: replies, the target's states over them, training.

python -m emberline.engine.training.head_training --model PATH --prompts FILE --held-out FILE --out FOLDER

Prompts are token ids here, so that it runs where only the engine does: a file has a line of space-separated ids for
each. `emberline draft train` does the same from text.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from emberline.engine.training import eagle_training, target_outputs
from emberline.engine.training.eagle_training import TrainingSettings
from emberline.models.eagle3 import Eagle3Config, Eagle3Head
from emberline.models.eagle3_files import save_head
from emberline.models.registry import select_device
from emberline.protocol.token_ids import pack
from emberline.weights.checkpoint import open_checkpoint

TEMPERATURE = 0.8  # of every second reply; the others are greedy: the head sees what the model writes at either
CURVE = "curve.json"


def train_head(
    model: Path,
    prompts: Sequence[bytes],
    held_out: Sequence[bytes],
    out: Path,
    device: str,
    settings: TrainingSettings,
    draft_vocab: int = 4096,
    max_tokens: int = 256,
    length: int = 320,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Write the head and its curve to `out`; returns the curve and where the time went. length: of a sequence."""
    device, began_s, seconds = select_device(device), time.monotonic(), dict[str, float]()

    def lap(name: str) -> None:
        seconds[name] = round(time.monotonic() - began_s - sum(seconds.values()), 1)

    say(f"the model replies to {len(prompts)} prompts, and to {len(held_out)} that are held out")
    temperatures = [TEMPERATURE * (n % 2) for n in range(len(prompts))] + [0.0] * len(held_out)
    replies = target_outputs.write_replies(model, [*prompts, *held_out], temperatures, max_tokens, device)
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
    lap("replies")
    n_tokens = sum(map(len, replies)) // 4
    per_s = n_tokens / max(0.1, seconds["replies"])
    say(f"{n_tokens} tokens of replies in {seconds['replies']:.0f} s: {per_s:.0f} a second")
    written = list(zip(prompts, replies))
    checkpoint = open_checkpoint(model)
    target = target_outputs.plain_model(checkpoint, device)
    size = min(draft_vocab, target.config.vocab_size)
    config = Eagle3Config.of(target.config, size, checkpoint.fingerprint)
    data = target_outputs.run_target(target, config.taps, written, length)
    measured = target_outputs.run_target(target, config.taps, list(zip(held_out, replies[len(prompts) :])), length)
    lap("target")
    say(f"the model's states over {data.token_ids.numel()} tokens in {seconds['target']:.0f} s")
    torch.manual_seed(settings.seed)
    head = Eagle3Head(config).to(device)
    ids = (torch.frombuffer(bytearray(reply), dtype=torch.int32).long() for _, reply in written if reply)
    eagle_training.set_vocabulary(head, eagle_training.draft_vocabulary(ids, config.vocab_size, size))
    eagle_training.start_from(head, target)
    embedding = target.embedding.weight * target.config.embedding_scale
    curve = eagle_training.train(head, embedding, target.head.weight, data, measured, settings, say)
    lap("training")
    save_head(head, out)
    checkpoint.close()
    result = {**asdict(curve), "phases_s": seconds, "reply_tokens": n_tokens, "settings": asdict(settings)}
    (out / CURVE).write_text(json.dumps(result) + "\n")
    return result


def _read_prompts(path: Path) -> list[bytes]:
    return [pack([int(word) for word in line.split()]) for line in path.read_text().splitlines() if line.strip()]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="emberline.engine.training.head_training", description=__doc__)
    for name in ("model", "prompts", "held-out", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--length", type=int, default=320)
    parser.add_argument("--draft-vocab", type=int, default=4096)
    for name, number in asdict(TrainingSettings()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(number), default=number)
    args = vars(parser.parse_args(argv))
    prompts, held_out = (_read_prompts(args.pop(name)) for name in ("prompts", "held_out"))
    settings = TrainingSettings(**{name: args.pop(name) for name in asdict(TrainingSettings())})
    model, out, device = (args.pop(name) for name in ("model", "out", "device"))
    train_head(model, prompts, held_out, out, device, settings, **args, say=_say)
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
