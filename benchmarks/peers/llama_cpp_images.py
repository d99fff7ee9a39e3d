"""A reply about an image on a CPU: ours, transformers' and llama.cpp's multimodal server in turn, by CPU time.

python -m benchmarks.peers.llama_cpp_images [--rounds N]

The model is the random one of `benchmarks.image_cpu`, in FP32, as a GGUF file and its mmproj for llama.cpp, which makes
two tiles of an image of 512 x 512 pixels. The others get two as well. One thread each: its CPU time hardly depends on
other work of the machine. Needs gguf, pillow, transformers and xllamacpp.
"""

import argparse
import base64
import io
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import gguf
import numpy as np
import torch

from benchmarks.image_cpu import IMAGE_TOKEN, ROWS, SIDE, Engine, reply_of_transformers, save_model
from benchmarks.report import markdown
from emberline.weights.checkpoint import open_checkpoint
from emberline.weights.vision_config import TowerConfig, read_tower_config
from emberline.weights.vision_tensors import read_vision_tensors

TILES = 2
SPECIAL = ("<image>", "<fake_token_around_image>", "<global-img>", "<|im_start|>", "<end_of_utterance>", "ĊĊ")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}:{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{% if c['type'] == 'image' %}<image>{% else %}{{ c['text'] }}{% endif %}{% endfor %}"
    "{% endif %}<end_of_utterance>{% endfor %}assistant:"
)


def write_pair(folder: Path, out: Path) -> tuple[Path, Path]:
    """Write the model of a folder and its mmproj file in FP32. Returns their paths."""
    config = read_tower_config(folder)
    assert config is not None
    _write_model(folder, out / "model.gguf")
    _write_mmproj(folder, config, out / "mmproj.gguf")
    return out / "model.gguf", out / "mmproj.gguf"


def _write_model(folder: Path, path: Path) -> None:
    checkpoint = open_checkpoint(folder)
    config, writer = checkpoint.config, gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.n_layers)
    writer.add_context_length(config.context_len)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.mlp_size)
    writer.add_head_count(config.n_heads)
    writer.add_head_count_kv(config.n_kv_heads)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    _add_tokenizer(writer, config.vocab_size)
    heads = {"attn_q": config.n_heads, "attn_k": config.n_kv_heads}
    for name in checkpoint.names:
        array = checkpoint.weight(name).dense()
        if (n := heads.get(name.split(".")[-2])) is not None:  # llama.cpp rotates adjacent pairs
            array = array.reshape(n, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        writer.add_tensor(name, np.ascontiguousarray(array))
    _finish(writer)


def _add_tokenizer(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    """Add a byte-level tokenizer with the tokens that llama.cpp looks for."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    tokens = [characters[byte] for byte in range(256)] + [f"token{n}" for n in range(256, vocab_size)]
    kinds = [1] * vocab_size
    for n, text in enumerate(SPECIAL, 300):
        tokens[n], kinds[n] = text, 3 if text.startswith("<") else 1
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(300 + SPECIAL.index("<|im_start|>"))
    writer.add_eos_token_id(300 + SPECIAL.index("<end_of_utterance>"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


def _write_mmproj(folder: Path, config: TowerConfig, path: Path) -> None:
    writer, processor = gguf.GGUFWriter(path, "clip"), config.processor
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", "idefics3")
    writer.add_bool("clip.use_gelu", True)
    for key, number in {
        "image_size": processor.tile,
        "preproc_image_size": processor.tile,
        "patch_size": processor.patch,
        "embedding_length": config.width,
        "feed_forward_length": config.mlp_size,
        "block_count": config.n_layers,
        "attention.head_count": config.n_heads,
        "projection_dim": config.hidden,
        "projector.scale_factor": processor.merge,
    }.items():
        writer.add_uint32(f"clip.vision.{key}", number)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", config.norm_eps)
    writer.add_array("clip.vision.image_mean", list(processor.mean))
    writer.add_array("clip.vision.image_std", list(processor.std))
    for name, weight in read_vision_tensors(folder, processor.family).items():
        writer.add_tensor(name, np.ascontiguousarray(weight.dense()))
    _finish(writer)


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class LlamaCppImages:
    """llama.cpp's server in this process."""

    def __init__(self, model: Path, mmproj: Path, threads: int) -> None:
        import xllamacpp  # type: ignore[import-not-found]

        params = xllamacpp.CommonParams()
        params.model.path, params.mmproj.path = str(model), str(mmproj)
        params.mmproj_use_gpu = params.warmup = False
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.n_parallel, params.n_ctx = 1, 2048
        self._server = xllamacpp.Server(params)

    def reply(self, pixels: bytes, side: int, n_tokens: int) -> None:
        """Write n_tokens about an image."""
        from PIL import Image

        file = io.BytesIO()
        Image.frombytes("RGB", (side, side), pixels[: 3 * side * side]).save(file, "PNG")
        url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "abc"}]
        body: dict[str, Any] = {"messages": [{"role": "user", "content": content}], "max_tokens": n_tokens}
        body |= {"stream": True, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
        chunks: list[dict[str, Any]] = []
        self._server.handle_chat_completions(body, lambda chunk: bool(chunks.append(chunk)))
        if "error" in chunks[-1]:
            raise RuntimeError(f"llama.cpp: {chunks[-1]['error']}")


def main() -> None:
    """Measure all in turn, every second round in the reverse order, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=2, help="of the reply")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    ids = [*range(40, 60), *[IMAGE_TOKEN] * (ROWS * TILES), *range(100, 108)]
    spent: dict[str, list[float]] = {"ours": [], "transformers": [], "llama.cpp": []}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        model = save_model(folder)
        (folder / "gguf").mkdir()
        peer, engine = LlamaCppImages(*write_pair(folder, folder / "gguf"), 1), Engine(folder, 1)
        for number in range(asked.rounds + 1):
            pixels = np.random.default_rng(number).integers(0, 256, 3 * SIDE * SIDE, dtype=np.uint8).tobytes()
            for name in spent if number % 2 else reversed(spent):
                began = time.process_time()
                if name == "ours":
                    engine.reply(ids, TILES, pixels * TILES, f"r{number}", asked.tokens)
                elif name == "transformers":
                    reply_of_transformers(model, ids, TILES, pixels * TILES, asked.tokens)
                else:
                    peer.reply(pixels, SIDE, asked.tokens)
                if number:  # the first round warms up
                    spent[name].append(time.process_time() - began)
    ours = median(spent["ours"])
    rows = [[name, f"{median(values):.1f}", f"{median(values) / ours:.2f}"] for name, values in spent.items()]
    print(markdown(["", "CPU seconds", "over ours"], rows))


if __name__ == "__main__":
    main()
