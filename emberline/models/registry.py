"""The architectures Emberline runs, and loading a checkpoint onto the best backend of a device.

torch is imported where a GPU, the reference backend or an encoder needs it: a decoder on the C kernels does not.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from emberline.kernels.backend import Backend, Layer, WeightSource
from emberline.kernels.collectives import ALONE, ParallelGroups
from emberline.kernels.cpu import native_backend
from emberline.kernels.native_library import BuildError
from emberline.models.decoder import Architecture, Decoder
from emberline.models.deepseek import deepseek
from emberline.models.gemma import gemma3
from emberline.models.gpt_oss import gpt_oss
from emberline.models.layer_weights import CheckpointSource, LayerWeights
from emberline.models.llama import llama
from emberline.models.llama4 import llama4
from emberline.models.qwen import qwen2, qwen3
from emberline.models.shard import Shard
from emberline.protocol.errors import BadInput
from emberline.weights.encoder_checkpoint import EncoderConfig
from emberline.weights.model_config import BadCheckpoint
from emberline.weights.outline import OneOfEach, TensorSource, layer_kinds
from emberline.weights.readahead import ReadAhead

if TYPE_CHECKING:
    from emberline.models.encoder import EncoderModel
    from emberline.weights.loader import WeightLoader

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

DRIVER_FILES = ("/dev/nvidiactl", "/dev/dxg", "/dev/nvhost-gpu", "/dev/nvhost-ctrl-gpu")  # NVIDIA's, WSL's, Jetson's
NO_DEVICE = "no CUDA device is available to torch"
ENCODERS_NEED, IMAGES_NEED = "embeddings and reranking need", "images need"
TORCH = "pip install 'emberline[torch]' (in a source tree: scripts/setup torch)"

SHARED_MEMORY_BYTES = 227 << 10  # of a block, which the GPU kernels need: Hopper's
_log = logging.getLogger("emberline.models")


class NamedCheckpoint(CheckpointSource, Protocol):
    @property
    def names(self) -> Iterable[str]: ...


def expects_gpu(asked: str, driver_files: Sequence[str] = DRIVER_FILES) -> bool:
    """True if the device may be a GPU, as far as that is known without torch."""
    return asked.startswith("cuda") or (asked == "auto" and any(map(os.path.exists, driver_files)))


def select_device(asked: str, driver_files: Sequence[str] = DRIVER_FILES) -> str:
    """The device for `auto`, which is CUDA where the kernels run. Raises ValueError for a CUDA device where not."""
    if not expects_gpu(asked, driver_files):
        return "cpu"
    device = "cuda" if asked == "auto" else asked
    reason = _unusable(device)
    if reason is None:
        return device
    if asked != "auto":
        raise ValueError(f"--device {asked}: {reason}")
    if reason != NO_DEVICE:  # a driver without a GPU needs no warning
        _log.warning("%s; using the CPU", reason)
    return "cpu"


def require_torch(why: str) -> None:
    """Raise BadInput that says how to install torch, if it is not installed. why: what needs it."""
    if find_spec("torch") is None:
        raise BadInput(missing_torch(why))


def why_torch(task: str, config: Any) -> str:
    """Say what in a model needs torch on a CPU, for `missing_torch`. Returns an empty string if nothing does.

    `task` and `config` are those of the model's files."""
    if task != "generate":
        return ENCODERS_NEED
    reason = why_not_native(config)
    return "" if reason is None else f"{reason}: that needs"


def missing_torch(why: str) -> str:
    """Say how to install torch. why: what needs it, and the verb."""
    return f"{why} PyTorch, which is not installed: {TORCH}"


def _unusable(device: str) -> str | None:
    """Say why models cannot run on this CUDA device. Returns None if they can."""
    if find_spec("torch") is None:
        return missing_torch("a GPU needs")

    import torch

    if not torch.cuda.is_available():
        return NO_DEVICE
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
    keep_beside: tuple[Path, str] | None = None,
) -> tuple[Decoder, WeightLoader | None]:
    """Build the model; on CUDA its weights are still being read by the returned loader.

    The caller must call `WeightLoader.finish` before the first forward pass. On a CPU the weights are complete and the
    loader is None. `read_ahead` supplies file contents that were already read; for a CPU it is released. `shard`: of a
    rank, which reads only its own part of the checkpoint. `compress`: keep BF16 matrices losslessly packed on a GPU.
    `keep_beside`: path and fingerprint of the checkpoint, beside which the C kernels may keep their matrices.
    """
    architecture = ARCHITECTURES[source.config.architecture]
    source = source if shard is None else shard.checkpoint(source)
    groups = ALONE if shard is None else shard.groups
    backend = select_backend(source, device, deterministic, threads, groups, compress)
    tensors = _UsedTensors(source)
    if not device.startswith("cuda"):
        if read_ahead is not None:  # for a GPU that torch cannot use
            read_ahead.release_all()
        native = backend if isinstance(backend, native_backend.NativeBackend) else None
        if native is not None and keep_beside is not None and shard is None:
            native.keep_beside(*keep_beside)
        model = Decoder(tensors, backend, architecture, shard)
        tensors.check_all_used()
        if native is not None:
            native.end_loading()
        return model, None
    from emberline.weights.loader import DeferredCheckpoint, WeightLoader

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
    import torch

    from emberline.kernels.gpu.backend.triton_backend import TritonBackend
    from emberline.weights.loader import DeferredCheckpoint, WeightLoader

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
    require_torch(ENCODERS_NEED)

    from emberline.models.bert import Bert
    from emberline.models.decoder_embedder import DecoderEmbedder

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
    if device == "cpu":
        reason = why_not_native(source.config, groups)
        if reason is None:
            try:
                return native_backend.NativeBackend(threads, groups=groups)
            except (BuildError, OSError) as error:
                reason = str(error)
        require_torch(f"{reason}: that needs")
        _log.warning("%s; using PyTorch, which is several times slower", reason)
    if device.startswith("cuda"):
        try:
            from emberline.kernels.gpu.backend.triton_backend import TritonBackend  # Triton is optional
        except ImportError as error:
            _log.warning("%s; falling back to PyTorch, many times slower", error)
        else:
            return TritonBackend(device, deterministic=deterministic, groups=groups, compress=compress)
    from emberline.kernels.reference import TorchBackend

    return TorchBackend(device, row_by_row=deterministic, groups=groups)


def why_not_native(config: Any, groups: ParallelGroups = ALONE) -> str | None:
    """Say why the C kernels cannot run a model on a CPU. Returns None if they can."""
    if groups.tp.size > 1:
        return "the CPU kernels compute whole layers, without tensor parallelism"
    if config.architecture not in NATIVE_ARCHITECTURES:
        return f"the CPU kernels do not run {config.architecture} models"
    shape = config.hidden_size, config.head_dim, config.mlp_size, config.n_heads // config.n_kv_heads
    return None if native_backend.supports(*shape) else "the CPU kernels do not support this model's shape"
