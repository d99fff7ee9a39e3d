"""A small model that really sees: trained on rendered digits and shapes, asked over HTTP about pictures it never saw.

python -m benchmarks.seeing_model train FOLDER [--minutes 8] [--device cuda] [--tiny]
emberline serve FOLDER
python -m benchmarks.seeing_model ask FOLDER --url http://127.0.0.1:8080 [--pictures 500] [--transformers]

A picture has a digit or a shape in one of eight colours at one of nine places, on a noisy background. A tenth of the
combinations of the three is held out. The checkpoint is a SmolVLM one (Idefics3's tower of four blocks, a Llama of four
layers, 4.6 million weights, 9 MB in BF16), written without transformers: the machine that trains it needs PyTorch
alone. `ask` counts exact answers (target: 98 %), those that another picture would have got as well, and with
`--transformers` those that transformers gives from the same folder (target: all).
"""

import argparse
import base64
import functools
import io
import json
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from emberline.weights.safetensors_file import write_safetensors

SIDE, PATCH, SCALE = 64, 8, 2  # pixels of a picture, of a patch; patches along a row's square
N_ROWS = (SIDE // PATCH // SCALE) ** 2
COLOURS = {
    "red": (215, 40, 40), "green": (40, 165, 60), "blue": (45, 75, 220), "yellow": (235, 215, 50),
    "purple": (140, 50, 170), "orange": (240, 140, 30), "white": (250, 250, 250), "black": (15, 15, 15),
}  # fmt: skip
PLACES = ("top left", "top", "top right", "left", "center", "right", "bottom left", "bottom", "bottom right")
SHAPES = ("circle", "square", "triangle", "cross")
NAMES = (*"0123456789", *SHAPES)
QUESTIONS = ("Describe the picture.", "Which colour is it?", "What is it?", "Where is it?")
HELD_OUT = 10  # one of so many combinations
# Rows of the digits' glyphs, 5 pixels each, as bits.
_GLYPHS = (
    (14, 17, 19, 21, 25, 17, 14), (4, 12, 4, 4, 4, 4, 14), (14, 17, 1, 2, 4, 8, 31), (31, 2, 4, 2, 1, 17, 14),
    (2, 6, 10, 18, 31, 2, 2), (31, 16, 30, 1, 1, 17, 14), (6, 8, 16, 30, 17, 17, 14), (31, 1, 2, 4, 8, 8, 8),
    (14, 17, 17, 14, 17, 17, 14), (14, 17, 17, 15, 1, 2, 12),
)  # fmt: skip
GLYPH_SIDES = (14, 16, 18)


# --- pictures ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scenes:
    """What pictures show: numbers of names, colours and places, int64 [pictures] each."""

    names: Tensor
    colours: Tensor
    places: Tensor

    @classmethod
    def every(cls) -> "Scenes":
        """One scene of each combination."""
        names, colours, places = (torch.arange(len(values)) for values in (NAMES, COLOURS, PLACES))
        return cls(*torch.cartesian_prod(names, colours, places).unbind(1))

    @classmethod
    def draw(cls, n: int, generator: torch.Generator, *, held_out: bool) -> "Scenes":
        """Random scenes on the generator's device, of the combinations that are held out or of the others."""
        all_scenes = cls.every()
        numbers = torch.arange(len(all_scenes.names))
        numbers = numbers[((numbers * 7919) % 1009 % HELD_OUT == 0) == held_out].to(generator.device)
        chosen = numbers[torch.randint(len(numbers), (n,), generator=generator, device=generator.device)]
        return all_scenes.to(generator.device)[chosen]

    def to(self, device: torch.device) -> "Scenes":
        """The same scenes on a device."""
        return Scenes(self.names.to(device), self.colours.to(device), self.places.to(device))

    def __getitem__(self, chosen: Tensor) -> "Scenes":
        return Scenes(self.names[chosen], self.colours[chosen], self.places[chosen])

    @property
    def numbers(self) -> Tensor:
        """Positions of the scenes' combinations in `every`."""
        return (self.names * len(COLOURS) + self.colours) * len(PLACES) + self.places

    def answer(self, picture: int, question: int) -> str:
        """The answer to one of QUESTIONS about one picture."""
        name, colour = NAMES[int(self.names[picture])], [*COLOURS][int(self.colours[picture])]
        place = PLACES[int(self.places[picture])]
        return (f"{colour} {name}, {place}", colour, name, place)[question]


def render(scenes: Scenes, generator: torch.Generator) -> Tensor:  # uint8 [pictures, SIDE, SIDE, 3]
    """Draw scenes on the generator's device: size, exact place, shade, background and noise are random."""
    n, largest, device = len(scenes.names), max(GLYPH_SIDES), generator.device

    def random(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, (n, *shape), generator=generator, device=device)

    sizes = random(0, len(GLYPH_SIDES))
    cell = SIDE // 3
    corner = torch.stack((scenes.places // 3, scenes.places % 3), 1) * cell
    corner = corner + random(0, cell - largest + 1, 2)
    at = torch.arange(SIDE, device=device)[None, None] - corner[..., None]  # [pictures, 2, SIDE]: in glyphs' pixels
    inside = (at >= 0) & (at < largest)
    at = at.clamp(0, largest - 1)
    masks = glyphs().to(device)[scenes.names, sizes]
    mask = masks[torch.arange(n, device=device)[:, None, None], at[:, 0, :, None], at[:, 1, None, :]]
    mask = (mask & inside[:, 0, :, None] & inside[:, 1, None, :])[..., None]
    ink = torch.tensor(list(COLOURS.values()), device=device)[scenes.colours][:, None, None] + random(-14, 15, 1, 1, 3)
    ground = 95 + random(0, 66, 1, 1, 1)
    return (torch.where(mask, ink, ground) + random(-9, 10, SIDE, SIDE, 3)).clamp(0, 255).to(torch.uint8)


@functools.cache
def glyphs() -> Tensor:  # bool [names, sizes, largest, largest]
    """Masks of all names in all sizes."""
    largest = max(GLYPH_SIDES)
    found = torch.zeros(len(NAMES), len(GLYPH_SIDES), largest, largest, dtype=torch.bool)
    for size, side in enumerate(GLYPH_SIDES):
        line = torch.arange(side)
        y, x = (line[:, None] + 0.5) / side, (line[None] + 0.5) / side
        for digit, rows in enumerate(_GLYPHS):
            bits = torch.tensor([[row >> (4 - column) & 1 for column in range(5)] for row in rows]).bool()
            found[digit, size, :side, :side] = bits[line * 7 // side][:, line * 5 // side]
        masks = {
            "circle": (y - 0.5) ** 2 + (x - 0.5) ** 2 < 0.22,
            "square": (y - 0.5).abs().maximum((x - 0.5).abs()) < 0.42,
            "triangle": (x - 0.5).abs() < y / 2,
            "cross": ((y - x).abs() < 0.16) | ((y + x - 1).abs() < 0.16),
        }
        for number, name in enumerate(SHAPES, 10):
            found[number, size, :side, :side] = masks[name]
    return found


# --- text: one token for each byte ------------------------------------------------------------------------------------

SPECIAL = ("<|im_start|>", "<end_of_utterance>", "<image>", "<fake_token_around_image>", "<global-img>", "<pad>")
START, END, IMAGE, AROUND, GLOBAL, PAD = range(256, 256 + len(SPECIAL))
VOCAB = 288
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] | capitalize }}:"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)


def prompt_ids(question: str) -> list[int]:
    """Tokens of a conversation of one picture and one question, as the template and the image processor make them."""
    picture = [AROUND, GLOBAL, *[IMAGE] * N_ROWS, AROUND]
    return [START, *b"User:", *picture, *question.encode(), END, *b"\nAssistant:"]


@functools.cache
def conversations(device: torch.device) -> tuple[Tensor, Tensor]:  # int64 [scenes, questions, tokens], both
    """Token ids and labels (-100: not learned) of every question about each of `Scenes.every`."""
    scenes, rows, labels = Scenes.every(), [], []
    for number in range(len(scenes.names)):
        for question, text in enumerate(QUESTIONS):
            prompt, answer = prompt_ids(text), [*b" ", *scenes.answer(number, question).encode(), END]
            rows.append(torch.tensor(prompt + answer))
            labels.append(torch.tensor([-100] * len(prompt) + answer))
    found = (
        nn.utils.rnn.pad_sequence(lines, batch_first=True, padding_value=padding).to(device)
        for lines, padding in ((rows, PAD), (labels, -100))
    )
    token_ids, targets = (tensor.unflatten(0, (-1, len(QUESTIONS))) for tensor in found)
    return token_ids, targets


def batch(n: int, generator: torch.Generator, *, held_out: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Pictures, token ids and labels of n conversations, on the generator's device."""
    scenes = Scenes.draw(n, generator, held_out=held_out)
    token_ids, labels = conversations(generator.device)
    asked = scenes.numbers, torch.arange(n, device=generator.device) % len(QUESTIONS)
    return render(scenes, generator), token_ids[asked], labels[asked]


# --- the model, with the names of SmolVLM's checkpoints ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sizes:
    width: int = 192  # the tower's
    hidden: int = 256  # the language model's
    layers: int = 4  # of each
    heads: int = 4
    kv_heads: int = 2


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, *, bias: bool, causal: bool) -> None:
        super().__init__()
        self.heads, self.dim, self.causal = heads, width // heads, causal
        self.q_proj = nn.Linear(width, width, bias=bias)
        self.k_proj = nn.Linear(width, kv_heads * self.dim, bias=bias)
        self.v_proj = nn.Linear(width, kv_heads * self.dim, bias=bias)
        out = nn.Linear(width, width, bias=bias)
        if causal:
            self.o_proj = out
        else:
            self.out_proj = out

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.dim)).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.causal:
            q, k = _rotate(q), _rotate(k)
        if (n_queries := self.heads // k.shape[1]) > 1:
            k, v = (x.repeat_interleave(n_queries, dim=1) for x in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        out = out.transpose(1, 2).flatten(2)
        return self.o_proj(out) if self.causal else self.out_proj(out)


def _rotate(x: Tensor) -> Tensor:  # [batch, heads, tokens, dim]
    steps = 10_000.0 ** -(torch.arange(0, x.shape[-1], 2, device=x.device) / x.shape[-1])
    angles = torch.arange(x.shape[2], device=x.device)[:, None] * steps
    first, second = x.float().chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


class TowerLayer(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.self_attn = Attention(sizes.width, sizes.heads, sizes.heads, bias=True, causal=False)
        self.layer_norm1 = nn.LayerNorm(sizes.width, eps=1e-6)
        self.layer_norm2 = nn.LayerNorm(sizes.width, eps=1e-6)
        self.mlp = nn.ModuleDict(
            {"fc1": nn.Linear(sizes.width, 4 * sizes.width), "fc2": nn.Linear(4 * sizes.width, sizes.width)}
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp["fc2"](F.gelu(self.mlp["fc1"](self.layer_norm2(x)), approximate="tanh"))


class TextLayer(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        hidden = sizes.hidden
        self.self_attn = Attention(hidden, sizes.heads, sizes.kv_heads, bias=False, causal=True)
        self.input_layernorm = nn.RMSNorm(hidden, eps=1e-5)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=1e-5)
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(hidden, 2 * hidden, bias=False),
                "up_proj": nn.Linear(hidden, 2 * hidden, bias=False),
                "down_proj": nn.Linear(2 * hidden, hidden, bias=False),
            }
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        y = self.post_attention_layernorm(x)
        return x + self.mlp["down_proj"](F.silu(self.mlp["gate_proj"](y)) * self.mlp["up_proj"](y))


class SeeingModel(nn.Module):
    """The model of the checkpoint. `names` says what its parameters are called there."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes, n_patches = sizes, (SIDE // PATCH) ** 2
        self.patch_embedding = nn.Conv2d(3, sizes.width, PATCH, PATCH)
        self.position_embedding = nn.Embedding(n_patches, sizes.width)
        self.tower = nn.ModuleList(TowerLayer(sizes) for _ in range(sizes.layers))
        self.post_layernorm = nn.LayerNorm(sizes.width, eps=1e-6)
        self.proj = nn.Linear(SCALE**2 * sizes.width, sizes.hidden, bias=False)
        self.embed_tokens = nn.Embedding(VOCAB, sizes.hidden)
        self.layers = nn.ModuleList(TextLayer(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.hidden, eps=1e-5)
        self.lm_head = nn.Linear(sizes.hidden, VOCAB, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, pictures: Tensor, token_ids: Tensor) -> Tensor:  # [pictures, tokens, VOCAB]
        x = self.embed_tokens(token_ids)
        x = x.masked_scatter((token_ids == IMAGE)[..., None], self.rows(pictures).to(x.dtype))
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))

    def rows(self, pictures: Tensor) -> Tensor:  # [pictures, N_ROWS, hidden]
        """Rows of the tower and projector."""
        x = self.patch_embedding(pictures.permute(0, 3, 1, 2).float() / 127.5 - 1).flatten(2).transpose(1, 2)
        x = x + self.position_embedding.weight
        for layer in self.tower:
            x = layer(x)
        side = SIDE // PATCH // SCALE
        squares = self.post_layernorm(x).unflatten(1, (side, SCALE, side, SCALE)).transpose(2, 3)
        return self.proj(squares.reshape(len(x), N_ROWS, -1))

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The checkpoint's names and tensors."""
        places = {
            "patch_embedding": "model.vision_model.embeddings.patch_embedding",
            "position_embedding": "model.vision_model.embeddings.position_embedding",
            "tower": "model.vision_model.encoder.layers",
            "post_layernorm": "model.vision_model.post_layernorm",
            "proj": "model.connector.modality_projection.proj",
            "lm_head": "lm_head",
        }
        for name, tensor in self.state_dict().items():
            module, _, rest = name.partition(".")
            yield f"{places.get(module, f'model.text_model.{module}')}.{rest}", tensor


def train(folder: Path, minutes: float, device: str, tiny: bool, batch_size: int, learning_rate: float) -> None:
    """Train for so many minutes, and write the checkpoint."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")  # TF32 on a GPU: in BF16 the loss became NaN after 1,050 steps
    sizes = Sizes(64, 64, 2, 2, 1) if tiny else Sizes()
    model = SeeingModel(sizes).to(device)
    n_weights = sum(parameter.numel() for parameter in model.parameters())
    print(f"{n_weights / 1e6:.2f} million weights on {device}")
    optimizer = torch.optim.AdamW(model.parameters(), learning_rate, weight_decay=0.05, betas=(0.9, 0.98))
    generator = torch.Generator(device).manual_seed(1)
    began, step, limit_s = time.monotonic(), 0, 60 * minutes
    while (spent := time.monotonic() - began) < limit_s:
        rate = min(1.0, (step + 1) / 300) * max(0.02, 1 - spent / limit_s)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * rate
        pictures, token_ids, labels = batch(batch_size, generator, held_out=False)
        logits = model(pictures, token_ids)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=-100)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite():
            optimizer.step()
        if step % 250 == 0:
            right = f"exact {exact(model, device):.1%}" if step % 1000 == 0 else ""
            print(f"step {step}  {time.monotonic() - began:.0f} s  loss {loss.item():.4f}  {right}", flush=True)
        step += 1
    model.to(torch.bfloat16).float()  # as it is written
    print(f"{step} steps; exact answers to held-out pictures: {exact(model, device):.1%}")
    save(model, folder)


@torch.inference_mode()
def exact(model: SeeingModel, device: str, n: int = 400) -> float:
    """Share of held-out conversations whose answers the model would write exactly."""
    right = 0
    generator = torch.Generator(device).manual_seed(2)
    for _ in range(0, n, 100):
        pictures, token_ids, labels = batch(100, generator, held_out=True)
        best = model(pictures, token_ids).argmax(-1)[:, :-1]
        right += int(((best == labels[:, 1:]) | (labels[:, 1:] < 0)).all(1).sum())
    return right / n


def save(model: SeeingModel, folder: Path) -> None:
    """Write the folder of a SmolVLM checkpoint in BF16."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes = model.sizes
    tensors = {}
    for name, tensor in model.named_tensors():
        raw = tensor.to("cpu", torch.bfloat16).contiguous()
        tensors[name] = "BF16", tuple(raw.shape), raw.view(torch.uint8).numpy().tobytes()
    write_safetensors(folder / "model.safetensors", tensors)
    text = {
        "model_type": "llama", "vocab_size": VOCAB, "hidden_size": sizes.hidden, "intermediate_size": 2 * sizes.hidden,
        "num_hidden_layers": sizes.layers, "num_attention_heads": sizes.heads, "num_key_value_heads": sizes.kv_heads,
        "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0, "bos_token_id": START,
        "eos_token_id": END, "pad_token_id": PAD, "tie_word_embeddings": False,
    }  # fmt: skip
    vision = {
        "model_type": "smolvlm_vision", "hidden_size": sizes.width, "intermediate_size": 4 * sizes.width,
        "num_hidden_layers": sizes.layers, "num_attention_heads": sizes.heads, "image_size": SIDE, "patch_size": PATCH,
        "layer_norm_eps": 1e-6, "hidden_act": "gelu_pytorch_tanh",
    }  # fmt: skip
    documents: dict[str, dict[str, Any]] = {
        "config.json": {
            "model_type": "smolvlm", "architectures": ["SmolVLMForConditionalGeneration"], "dtype": "bfloat16",
            "text_config": text, "vision_config": vision, "scale_factor": SCALE, "image_token_id": IMAGE,
            "tie_word_embeddings": False,
        },
        "generation_config.json": {"eos_token_id": END, "bos_token_id": START, "pad_token_id": PAD},
        "preprocessor_config.json": {
            "image_processor_type": "SmolVLMImageProcessor", "do_image_splitting": False, "resample": 1,
            "size": {"longest_edge": SIDE}, "max_image_size": {"longest_edge": SIDE},
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE, "bos_token": SPECIAL[0],
            "eos_token": SPECIAL[1], "pad_token": SPECIAL[-1], "clean_up_tokenization_spaces": False,
        },
        "tokenizer.json": _tokenizer(),
    }  # fmt: skip
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document, indent=1))
    n_bytes = (folder / "model.safetensors").stat().st_size
    print(f"{folder}: {n_bytes / 1e6:.1f} MB")


def _tokenizer() -> dict[str, Any]:
    """A byte-level BPE tokenizer without merges: a token for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": 256 + n, "content": text} | flags for n, text in enumerate(SPECIAL)],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {characters[byte]: byte for byte in range(256)},
            "merges": [],
        },
    }


# --- questions --------------------------------------------------------------------------------------------------------


def ask(folder: Path, url: str, model: str, n: int, with_transformers: bool) -> dict[str, Any]:
    """Ask a server about held-out pictures, each question of n / 4 of them."""
    generator = torch.Generator().manual_seed(3)
    scenes = Scenes.draw(n, generator, held_out=True)
    pictures = render(scenes, generator)
    wanted = [scenes.answer(number, number % len(QUESTIONS)) for number in range(n)]
    said = [_ask_server(url, model, pictures[number], QUESTIONS[number % len(QUESTIONS)]) for number in range(n)]
    moved = [n - 4 + number if number < 4 else number - 4 for number in range(n)]  # the same question before
    differing = [number for number in range(n) if wanted[number] != wanted[moved[number]]]
    found: dict[str, Any] = {
        "pictures": n,
        "exact": sum(map(str.__eq__, said, wanted)) / n,
        "changed_with_the_picture": sum(said[a] != said[moved[a]] for a in differing) / max(1, len(differing)),
        "wrong": [(QUESTIONS[i % 4], wanted[i], said[i]) for i in range(n) if said[i] != wanted[i]][:5],
    }
    if with_transformers:
        theirs = _ask_transformers(folder, pictures)
        found["as_transformers"] = sum(map(str.__eq__, said, theirs)) / n
    return found


def png(picture: Tensor) -> bytes:
    """A picture's file."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(picture.numpy()).save(file, "PNG")
    return file.getvalue()


def chat_body(model: str, picture: Tensor, question: str) -> dict[str, Any]:
    """Body of a chat about a picture."""
    data = "data:image/png;base64," + base64.b64encode(png(picture)).decode()
    content = [{"type": "image_url", "image_url": {"url": data}}, {"type": "text", "text": question}]
    return {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 40, "temperature": 0}


def _ask_server(url: str, model: str, picture: Tensor, question: str) -> str:
    body = json.dumps(chat_body(model, picture, question)).encode()
    request = urllib.request.Request(
        f"{url.rstrip('/')}/v1/chat/completions", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        text: str = json.load(reply)["choices"][0]["message"]["content"]
    return text.strip()


@torch.inference_mode()
def _ask_transformers(folder: Path, pictures: Tensor) -> list[str]:
    import transformers

    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    answers: list[str] = []
    for number in range(len(pictures)):
        token_ids = torch.tensor([prompt_ids(QUESTIONS[number % len(QUESTIONS)])])
        pixels = (pictures[number].permute(2, 0, 1).float() / 127.5 - 1)[None, None]
        out = model.generate(input_ids=token_ids, pixel_values=pixels, max_new_tokens=40, do_sample=False)
        written = [token for token in out[0, token_ids.shape[1] :].tolist() if token < 256]
        answers.append(bytes(written).decode(errors="replace").strip())
    return answers


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    training, asking = actions.add_parser("train"), actions.add_parser("ask")
    for action in training, asking:
        action.add_argument("folder", type=Path)
    training.add_argument("--minutes", type=float, default=8)
    training.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    training.add_argument("--tiny", action="store_true", help="0.2 million weights, to try the script on a CPU")
    training.add_argument("--batch", type=int, default=512)
    training.add_argument("--learning-rate", type=float, default=1e-3)
    asking.add_argument("--url", default="http://127.0.0.1:8080")
    asking.add_argument("--model", default="", help="the model's name at the server (default: the folder's)")
    asking.add_argument("--pictures", type=int, default=500)
    asking.add_argument("--transformers", action="store_true")
    args = parser.parse_args(argv)
    if args.action == "train":
        train(args.folder, args.minutes, args.device, args.tiny, args.batch, args.learning_rate)
    else:
        name = args.model or args.folder.name
        print(json.dumps(ask(args.folder, args.url, name, args.pictures, args.transformers), indent=1))


if __name__ == "__main__":
    main()
