"""Model architectures. `load` picks one, and the backend that runs it best on the device."""

import logging
from typing import TYPE_CHECKING

from emberline.kernels.backend import Backend
from emberline.models.decoder import Decoder, LayerTable, Source
from emberline.models.gemma import GEMMA3
from emberline.models.llama import LLAMA
from emberline.models.qwen import QWEN2, QWEN3
from emberline.weights.readahead import ReadAhead

if TYPE_CHECKING:
    from emberline.weights.loader import Loader

ARCHITECTURES: dict[str, LayerTable] = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "gemma3": GEMMA3,
}
Model = Decoder

_log = logging.getLogger("emberline.models")


def load(source: Source, device: str = "cpu", deterministic: bool = False, threads: int | None = None) -> Model:
    """The checkpoint's model on `device`, weights in the form its backend wants."""
    model, weights = begin(source, device, deterministic, threads)
    if weights is not None:
        weights.finish()
    return model


def begin(
    source: Source,
    device: str = "cpu",
    deterministic: bool = False,
    threads: int | None = None,
    ahead: ReadAhead | None = None,
) -> tuple[Model, "Loader | None"]:
    """For an accelerator the model comes at once, and with it who reads its weights meanwhile and must be waited for.

    `ahead`: what was read of them already.
    """
    table = ARCHITECTURES[source.config.architecture]
    backend = _backend(source, device, deterministic, threads)
    if not device.startswith("cuda"):
        return Decoder(source, backend, table), None
    from emberline.weights.loader import Deferred, Loader

    loader = Loader(device, ahead)
    model = Decoder(Deferred(source, loader), backend, table)  # places first, bytes then
    loader.start()
    return model, loader


def _backend(source: Source, device: str, deterministic: bool, threads: int | None) -> Backend:
    from emberline.kernels.cpu import backend as native
    from emberline.kernels.cpu import build
    from emberline.kernels.reference import TorchBackend

    config = source.config
    if device == "cpu":
        share = config.n_heads // config.n_kv_heads
        if not native.supports(config.hidden_size, config.head_dim, config.mlp_size, share):
            _log.warning("this model's shape does not fit the CPU kernels; plain PyTorch serves it, more slowly")
        else:
            try:
                return native.NativeBackend(threads)
            except (build.BuildError, OSError) as error:
                _log.warning("%s; plain PyTorch serves instead, several times more slowly", error)
    if device.startswith("cuda") and (fast := _triton(device, deterministic)) is not None:
        return fast
    return TorchBackend(device, row_by_row=deterministic)


def _triton(device: str, deterministic: bool) -> Backend | None:
    try:
        from emberline.kernels.gpu.backend import TritonBackend
    except ImportError as error:
        _log.warning("%s; plain PyTorch serves instead, many times more slowly", error)
        return None
    return TritonBackend(device, deterministic=deterministic)
