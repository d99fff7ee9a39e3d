"""The architectures Emberline runs, and loading a checkpoint onto the best backend of a device."""

import logging
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import Any, Protocol

import torch

from emberline.kernels.backend import Backend, Layer, WeightSource
from emberline.kernels.collectives import ALONE, ParallelGroups
from emberline.kernels.cpu import native_backend
from emberline.kernels.native_library import BuildError
from emberline.kernels.reference import TorchBackend
from emberline.models.bert import Bert
from emberline.models.decoder import Architecture, Decoder
from emberline.models.decoder_embedder import DecoderEmbedder
from emberline.models.deepseek import deepseek
from emberline.models.encoder import EncoderModel
from emberline.models.gemma import gemma3
from emberline.models.gpt_oss import gpt_oss
from emberline.models.layer_weights import CheckpointSource, LayerWeights
from emberline.models.llama import llama
from emberline.models.llama4 import llama4
from emberline.models.qwen import qwen2, qwen3
from emberline.models.shard import Shard
from emberline.weights.encoder_checkpoint import EncoderConfig
from emberline.weights.loader import DeferredCheckpoint, WeightLoader
from emberline.weights.model_config import BadCheckpoint
from emberline.weights.outline import OneOfEach, TensorSource, layer_kinds
from emberline.weights.readahead import ReadAhead

ARCHITECTURES: dict[str, Architecture] = {
    "llama": llama,
    "mistral": llama,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "gemma3": gemma3,
    "mixtral": llama,
    "qwen3_moe": qwen3,
    **dict.fromkeys(("deepseek_v3", "kimi_k2", "glm4_moe_lite"), deepseek),
    "llama4": llama4,
    "gpt_oss": gpt_oss,
}
# Those made of the blocks that the C kernels have: grouped-query attention with windows and norms, and gated MLPs.
NATIVE_ARCHITECTURES = frozenset({"llama", "mistral", "qwen2", "qwen3", "gemma3"})

SHARED_MEMORY_BYTES = 227 << 10  # of a block, which the GPU kernels need: Hopper's
_log = logging.getLogger("emberline.models")


class NamedCheckpoint(CheckpointSource, Protocol):
    @property
    def names(self) -> Iterable[str]: ...


def select_device(asked: str) -> str:
    """The device for `auto`, which is CUDA where the kernels run; raises ValueError for a CUDA device where not."""
    if asked == "cpu":
        return asked
    device = "cuda" if asked == "auto" else asked
    reason = _unusable(device)
    if reason is None:
        return device
    if asked != "auto":
        raise ValueError(f"--device {asked}: {reason}")
    if torch.cuda.is_available():
        _log.warning("%s; using the CPU", reason)
    return "cpu"


def _unusable(device: str) -> str | None:
    """Why models cannot run on this CUDA device, or None."""
    if not torch.cuda.is_available():
        return "no CUDA device is available to torch"
    if (torch.device(device).index or 0) >= torch.cuda.device_count():
        return f"there are {torch.cuda.device_count()} CUDA devices, counted from 0"
    gpu: Any = torch.cuda.get_device_properties(device)
    shared = gpu.shared_memory_per_block_optin
    if find_spec("triton") is None or shared >= SHARED_MEMORY_BYTES:
        return None
    return (
        f"{gpu.name} (compute capability {gpu.major}.{gpu.minor}) has {shared >> 10} KiB of shared memory per block,"
        f" and the GPU kernels need {SHARED_MEMORY_BYTES >> 10} (Hopper, or a later GPU with as much)"
    )


def load_model(
    source: NamedCheckpoint,
    device: str = "cpu",
    deterministic: bool = False,
    threads: int | None = None,
    shard: Shard | None = None,
) -> Decoder:
    """The checkpoint's model on `device`, with all its weights read."""
    model, loader = begin_loading(source, device, deterministic, threads, shard=shard)
    if loader is not None:
        loader.finish()
    return model


def begin_loading(
    source: NamedCheckpoint,
    device: str = "cpu",
    deterministic: bool = False,
    threads: int | None = None,
    read_ahead: ReadAhead | None = None,
    shard: Shard | None = None,
    compress: bool = False,
) -> tuple[Decoder, WeightLoader | None]:
    """Build the model; on CUDA its weights are still being read by the returned loader.

    The caller must call `WeightLoader.finish` before the first forward pass. On a CPU the weights are complete and the
    loader is None. `read_ahead` supplies file contents that were already read. `shard`: of a rank, which reads only its
    own part of the checkpoint. `compress`: keep BF16 matrices losslessly packed on a GPU.
    """
    architecture = ARCHITECTURES[source.config.architecture]
    source = source if shard is None else shard.checkpoint(source)
    groups = ALONE if shard is None else shard.groups
    backend = select_backend(source, device, deterministic, threads, groups, compress)
    tensors = _UsedTensors(source)
    if not device.startswith("cuda"):
        model = Decoder(tensors, backend, architecture, shard)
        tensors.check_all_used()
        return model, None
    if any(getattr(source.weight(name), "kind", "") == "f16" for name in source.names if name.endswith(".weight")):
        _log.info("the checkpoint is F16; its weights are rounded to BF16, which has its range and three bits less")
    loader = WeightLoader(device, read_ahead)
    model = Decoder(
        DeferredCheckpoint(tensors, loader), backend, architecture, shard
    )  # allocates; the loader fills afterwards
    tensors.check_all_used()
    loader.start()
    return model, loader


def lay_out(
    source: TensorSource,
    kinds: Sequence[int] | None = None,
    shard: Shard | None = None,
    made: dict[int, Layer] | None = None,
    compress: bool = False,
) -> Decoder:
    """The model, or a rank's part, as it would be on a GPU, without its memory: tensors on torch's meta device.

    Imports the GPU kernels: see `kernels/gpu/triton_placeholder.py`. Layers of the same kind share their tensors.
    `kinds`: by `weights.outline.layer_kinds`, if known; `made`: layers by kind, kept for parts that have the same
    (another stage, another context parallelism).
    """
    from emberline.kernels.gpu.backend.triton_backend import TritonBackend

    source = source if shard is None else shard.checkpoint(source)
    of_kind = layer_kinds(source) if kinds is None else kinds
    architecture, known = ARCHITECTURES[source.config.architecture], {} if made is None else made

    def build(weights: LayerWeights) -> Layer:
        kind = of_kind[weights.number]
        if kind not in known:
            known[kind] = architecture(weights)
        return known[kind]

    groups = ALONE if shard is None else shard.groups
    backend = TritonBackend("meta", torch.bfloat16, groups=groups, compress=compress)
    return Decoder(DeferredCheckpoint(OneOfEach(source), WeightLoader("meta")), backend, build, shard)


def load_encoder(source: NamedCheckpoint, device: str = "cpu", threads: int | None = None) -> EncoderModel:
    """The checkpoint's model as an encoder, with all its weights read: of the BERT family, or a decoder."""
    if not isinstance(source.config, EncoderConfig):
        return DecoderEmbedder(load_model(source, device, threads=threads))
    tensors = _UsedTensors(source)
    model = Bert(tensors, device, threads)
    tensors.check_all_used()
    return model


class _UsedTensors:
    """A checkpoint that knows which of its tensors a model has taken: one that is left out would give wrong results."""

    def __init__(self, source: NamedCheckpoint) -> None:
        self.config = source.config
        self.has = source.has
        self._source = source
        self._unused = dict.fromkeys(source.names)

    def weight(self, name: str) -> WeightSource:
        self._unused.pop(name, None)
        return self._source.weight(name)

    def check_all_used(self) -> None:
        if self._unused:
            some = ", ".join(repr(name) for name in list(self._unused)[:4])
            kind = self.config.architecture
            raise BadCheckpoint(f"a {kind} model has no use for {len(self._unused)} tensors of the checkpoint: {some}")


def select_backend(
    source: CheckpointSource, device: str, deterministic: bool, threads: int | None, groups: ParallelGroups = ALONE,
    compress: bool = False,
) -> Backend:  # fmt: skip
    """The fastest backend that can run this model on `device`; plain PyTorch where no other can."""
    config = source.config
    if device == "cpu" and groups.tp.size > 1:
        _log.warning("the CPU kernels compute whole layers; tensor parallelism uses PyTorch, which is slower")
    elif device == "cpu":
        group = config.n_heads // config.n_kv_heads
        shape = config.hidden_size, config.head_dim, config.mlp_size, group
        if config.architecture not in NATIVE_ARCHITECTURES:
            _log.warning("the CPU kernels do not run %s models; using PyTorch, which is slower", config.architecture)
        elif not native_backend.supports(*shape):
            _log.warning("the CPU kernels do not support this model's shape; falling back to PyTorch, which is slower")
        else:
            try:
                return native_backend.NativeBackend(threads, groups=groups)
            except (BuildError, OSError) as error:
                _log.warning("%s; falling back to PyTorch, several times slower", error)
    if device.startswith("cuda"):
        try:
            from emberline.kernels.gpu.backend.triton_backend import TritonBackend  # Triton is optional
        except ImportError as error:
            _log.warning("%s; falling back to PyTorch, many times slower", error)
        else:
            return TritonBackend(device, deterministic=deterministic, groups=groups, compress=compress)
    return TorchBackend(device, row_by_row=deterministic, groups=groups)
