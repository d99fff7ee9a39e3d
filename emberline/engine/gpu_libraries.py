"""What takes long to load is loaded early, beside the reading of weights."""

import logging
import threading

import torch

_log = logging.getLogger(__name__)


def load_attention(device: str) -> threading.Thread:
    """cuDNN's attention takes a second, once: better now than when the first long prompt comes."""

    def load() -> None:
        try:
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            with torch.inference_mode(), torch.cuda.stream(stream):
                small = torch.zeros(1, 8, 64, 64, dtype=torch.bfloat16, device=device)
                torch.ops.aten._scaled_dot_product_cudnn_attention(small, small, small, None, True, 0.0, True, False)
                stream.synchronize()
        except RuntimeError as error:  # whoever needs it will say so again
            _log.warning("cuDNN's attention could not be loaded: %s", error)

    thread = threading.Thread(target=load, daemon=True)
    thread.start()
    return thread
