"""Prompts with images over HTTP on one GPU: `emberline serve`, and transformers with the same files in the same run.

python -m benchmarks.gpu.images [--side 1024] [--images 8] [--streams 32] [--per-s 2] [--out FILE]

Qwen3-VL-8B's shape with random weights, and a tokenizer with a token for each byte. The figures are those of
`benchmarks.images`. Transformers is asked for the time to the first token alone: behind a small server of the standard
library that decodes the images, lets its own processor prepare them on the GPU, and generates one token.
"""

import argparse
import asyncio
import base64
import json
import os
import sys
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from random import Random
from threading import Lock
from typing import Any

from benchmarks.gpu import model_files
from benchmarks.gpu.engine import ALL_PREPARED
from benchmarks.images import first_tokens, measure, table, wait_ready
from benchmarks.process import Process, ended_by_sigterm, free_port

READY_S = 300.0
START, END, VISION_START, VISION_END, IMAGE, VIDEO = 151644, 151645, 151652, 151653, 151655, 151656
SPECIAL = {
    START: "<|im_start|>", END: "<|im_end|>", VISION_START: "<|vision_start|>", VISION_END: "<|vision_end|>",
    IMAGE: "<|image_pad|>", VIDEO: "<|video_pad|>",
}  # fmt: skip
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PROCESSOR = {
    "patch_size": 16, "merge_size": 2, "temporal_patch_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216},
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 5_000_000.0, "mrope_interleaved": True, "mrope_section": [24, 20, 20]}
TEXT = {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262_144,
    "rope_parameters": ROPE,
}  # fmt: skip
VISION = {"out_hidden_size": 4096, "deepstack_visual_indexes": [8, 16, 24]}  # the others are transformers' defaults
TINY_TEXT = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "rope_parameters": ROPE | {"mrope_section": [4, 2, 2]},
}  # fmt: skip
TINY_VISION = {
    "out_hidden_size": 64, "depth": 3, "hidden_size": 64, "intermediate_size": 64, "num_heads": 4,
    "deepstack_visual_indexes": [0, 1, 2],
}  # fmt: skip


def write_model(folder: Path, device: str, *, tiny: bool) -> int:
    """Write a checkpoint of random weights with its processor and tokenizer. Returns the weights' bytes."""
    import torch
    import transformers

    text, vision = (TEXT | TINY_TEXT, VISION | TINY_VISION) if tiny else (TEXT, VISION)
    config = transformers.AutoConfig.for_model(
        "qwen3_vl", text_config=text, vision_config=vision, image_token_id=IMAGE, video_token_id=VIDEO,
        vision_start_token_id=VISION_START, vision_end_token_id=VISION_END, tie_word_embeddings=False,
        dtype="bfloat16",
    )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    write_tokenizer(folder, text["vocab_size"])
    return model_files.write_tensors(folder / "model.safetensors", shapes, device)


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A byte-level tokenizer with Qwen's special tokens, and words that no text has for all other ids."""
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: number for number, symbol in enumerate(alphabet)}
    vocab |= {SPECIAL.get(number, f"Ġw{number}"): number for number in range(len(alphabet), vocab_size)}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL.values()])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE, "eos_token": SPECIAL[END]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


# --- transformers behind HTTP -----------------------------------------------------------------------------------------


class Transformers:
    """The model of a folder in transformers."""

    def __init__(self, folder: Path, device: str) -> None:
        import torch
        import transformers

        self._device, self._lock = device, Lock()
        dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
        self._model = transformers.AutoModelForImageTextToText.from_pretrained(
            folder, dtype=dtype, attn_implementation="sdpa"
        )
        self._model = self._model.to(device).eval()
        self._processor = transformers.Qwen2VLImageProcessor(**PROCESSOR)
        self._bytes = {symbol: number for number, symbol in enumerate(_alphabet())}
        self._on_device = "Pil" not in type(self._processor).__name__

    def first_token(self, urls: Sequence[str], text: str) -> tuple[int, int]:
        """The first token of a reply, and how many the prompt has."""
        import torch
        from PIL import Image

        images = [Image.open(BytesIO(base64.b64decode(url.partition(",")[2]))).convert("RGB") for url in urls]
        ids = [START, *self._ids("user\n")]
        with self._lock, torch.inference_mode():
            more: dict[str, Any] = {}
            if images:
                where = {"device": self._device} if self._on_device else {}
                more = dict(self._processor(images=images, return_tensors="pt", **where).to(self._device))
                for grid in more["image_grid_thw"].tolist():
                    ids += [VISION_START, *[IMAGE] * (grid[1] * grid[2] // 4), VISION_END]
            ids += [*self._ids(text), END, *self._ids("\n"), START, *self._ids("assistant\n")]
            asked = torch.tensor([ids], device=self._device)
            more["mm_token_type_ids"] = (asked == IMAGE).long()
            reply = self._model.generate(
                input_ids=asked, attention_mask=torch.ones_like(asked), max_new_tokens=1, do_sample=False, **more
            )
            return int(reply[0, -1]), len(ids)

    def _ids(self, text: str) -> list[int]:
        symbols = _byte_symbols()
        return [self._bytes[symbols[byte]] for byte in text.encode()]


def _alphabet() -> list[str]:
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())


def _byte_symbols() -> list[str]:
    """The symbol of each byte, in byte-level tokenizers."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(rest)) for byte in range(256)]


def serve_transformers(folder: Path, port: int, device: str) -> None:
    """Answer chat completions with one token, as a stream."""
    model = Transformers(folder, device)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(b"{}", "application/json")

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            content = asked["messages"][0]["content"]
            parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
            urls = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
            token, n_prompt = model.first_token(urls, "".join(part.get("text", "") for part in parts))
            choice = {"index": 0, "delta": {"content": f"w{token}"}, "finish_reason": "length"}
            event = {"choices": [choice], "usage": {"prompt_tokens": n_prompt, "completion_tokens": 1}}
            self._answer(f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n".encode(), "text/event-stream")

        def _answer(self, body: bytes, kind: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


# --- measurement ------------------------------------------------------------------------------------------------------


def _wait_prepared(server: Process) -> None:
    """Wait until the engine has captured its CUDA graphs, which it does while no request runs."""
    end_s = time.monotonic() + READY_S
    while ALL_PREPARED.encode() not in server.log.read_bytes():
        server.check()
        if time.monotonic() > end_s:
            raise TimeoutError(f"CUDA graphs are still being captured; see {server.log}")
        time.sleep(0.2)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("/tmp/emberline-gpu"), help="working folder with 20 GB free")
    parser.add_argument("--side", type=int, default=1024, help="pixels of each image's side")
    parser.add_argument("--images", type=int, default=8, help="of one prompt")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=600, help="of each stream")
    parser.add_argument("--per-s", type=float, default=2.0, help="images that arrive each second")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of a few layers, to try the script on a CPU")
    parser.add_argument("--engines", nargs="+", default=["transformers", "emberline"])
    parser.add_argument("--out", type=Path, default=Path("gpu-images.json"))
    parser.add_argument("--serve-transformers", type=int, metavar="PORT", help="only serve the model of --work")
    args = parser.parse_args(argv)
    folder = args.work / ("tiny-vl" if args.tiny else "qwen3-vl")
    if args.serve_transformers:
        serve_transformers(folder, args.serve_transformers, args.device)
        return
    ended_by_sigterm()
    print(f"{write_model(folder, args.device, tiny=args.tiny) / 1e9:.1f} GB of weights", flush=True)
    results: dict[str, dict[str, Any]] = {}
    for name in args.engines:
        port = free_port()
        command = [sys.executable, "-m", "emberline.cli.main", "serve", str(folder), "--port", str(port)]
        command += ["--speculation", "off", "--device", args.device]  # drafts would profit from random weights
        if name == "transformers":
            command = [sys.executable, "-m", "benchmarks.gpu.images", "--serve-transformers", str(port)]
            command += ["--work", str(args.work), "--device", args.device, *(["--tiny"] if args.tiny else [])]
        env = {**os.environ, "EMBERLINE_HOME": str(args.work / "home")}
        with Process(command, args.work / f"{name}.log", env) as server:
            wait_ready(port, server)
            if name == "emberline" and args.device.startswith("cuda"):
                _wait_prepared(server)
            if name == "transformers":
                found = asyncio.run(
                    first_tokens(port, folder.name, args.side, args.images, args.repeats, Random(args.seed))
                )
            else:
                found = asyncio.run(measure(port, folder.name, args))
        results[name] = found
        print(name, json.dumps(found), flush=True)
        args.out.write_text(json.dumps(results, indent=1))
    print(table(results, args.images))


if __name__ == "__main__":
    main()
