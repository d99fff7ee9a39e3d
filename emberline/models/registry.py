"""The architectures Emberline runs, and loading a checkpoint onto the best backend of a device."""

import logging

from emberline.kernels.backend import Backend
from emberline.kernels.cpu import native_backend
from emberline.kernels.cpu.build import BuildError
from emberline.kernels.reference import TorchBackend
from emberline.models.decoder import CheckpointSource, Decoder, LayerTensorNames
from emberline.models.gemma import GEMMA3
from emberline.models.llama import LLAMA
from emberline.models.qwen import QWEN2, QWEN3
from emberline.weights.loader import DeferredCheckpoint, WeightLoader
from emberline.weights.readahead import ReadAhead

ARCHITECTURES: dict[str, LayerTensorNames] = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "gemma3": GEMMA3,
}

_log = logging.getLogger("emberline.models")


def load_model(
    source: CheckpointSource, device: str = "cpu", deterministic: bool = False, threads: int | None = None
) -> Decoder:
    """The checkpoint's model on `device`, with all its weights read."""
    model, loader = begin_loading(source, device, deterministic, threads)
    if loader is not None:
        loader.finish()
    return model


def begin_loading(
    source: CheckpointSource,
    device: str = "cpu",
    deterministic: bool = False,
    threads: int | None = None,
    read_ahead: ReadAhead | None = None,
) -> tuple[Decoder, WeightLoader | None]:
    """Build the model; on CUDA its weights are still being read by the returned loader.

    The caller must call `WeightLoader.finish` before the first forward pass. On a CPU the weights are complete and the
    loader is None. `read_ahead` supplies file contents that were already read.
    """
    names = ARCHITECTURES[source.config.architecture]
    backend = select_backend(source, device, deterministic, threads)
    if not device.startswith("cuda"):
        return Decoder(source, backend, names), None
    loader = WeightLoader(device, read_ahead)
    model = Decoder(DeferredCheckpoint(source, loader), backend, names)  # allocates; the loader fills afterwards
    loader.start()
    return model, loader


def select_backend(source: CheckpointSource, device: str, deterministic: bool, threads: int | None) -> Backend:
    """The fastest backend that can run this model on `device`; plain PyTorch where no other can."""
    config = source.config
    if device == "cpu":
        group = config.n_heads // config.n_kv_heads
        if not native_backend.supports(config.hidden_size, config.head_dim, config.mlp_size, group):
            _log.warning("the CPU kernels do not support this model's shape; falling back to PyTorch, which is slower")
        else:
            try:
                return native_backend.NativeBackend(threads)
            except (BuildError, OSError) as error:
                _log.warning("%s; falling back to PyTorch, several times slower", error)
    if device.startswith("cuda"):
        try:
            from emberline.kernels.gpu.triton_backend import TritonBackend  # Triton is optional
        except ImportError as error:
            _log.warning("%s; falling back to PyTorch, many times slower", error)
        else:
            return TritonBackend(device, deterministic=deterministic)
    return TorchBackend(device, row_by_row=deterministic)
