"""GPUs by name, as a capacity plan needs them: memory, bandwidth and arithmetic. No torch."""

import re
import tomllib
from pathlib import Path

import msgspec

from emberline.protocol.errors import BadInput

GIB = 1 << 30


class Gpu(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rates are the ones that programs reach, not those of a data sheet."""

    name: str
    memory_gib: float  # as the driver reports it
    bandwidth_tb_s: float  # of a copy, bytes read and written
    bf16_tflops: float
    fp8_tflops: float
    context_gib: float = 0.6  # taken by the driver and by the process's CUDA context

    @property
    def memory(self) -> int:
        return int(self.memory_gib * GIB)


# The H200 was measured. The others: memory as reported, rates in the proportion of the data sheets.
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu(name="H200", memory_gib=139.8, bandwidth_tb_s=4.26, bf16_tflops=800, fp8_tflops=1400),
        Gpu(name="H100", memory_gib=79.1, bandwidth_tb_s=2.97, bf16_tflops=800, fp8_tflops=1400),
        Gpu(name="GH200", memory_gib=94.5, bandwidth_tb_s=3.55, bf16_tflops=800, fp8_tflops=1400),
        Gpu(name="B200", memory_gib=178.4, bandwidth_tb_s=7.1, bf16_tflops=1800, fp8_tflops=3600),
    )
}


def parse_gpus(text: str, hardware: Path | None = None) -> tuple[int, Gpu]:
    """`8xH100`: how many, and which. `hardware`: a TOML file with further GPUs, as tables `[[gpu]]`."""
    known = GPUS | (_read_table(hardware) if hardware is not None else {})
    match = re.fullmatch(r"(?:(\d{1,4})x)?([\w-]+)", text)
    gpu = known.get(match[2].upper()) or known.get(match[2]) if match else None
    if match is None or gpu is None:
        raise BadInput(
            f"{text!r} names no GPU: give a number and a name such as 1xH200; known are {', '.join(sorted(known))}"
            " (others in a file, with --hardware)",
            param="gpus",
        )
    count = int(match[1] or 1)
    if count < 1:
        raise BadInput("the number of GPUs is at least 1", param="gpus")
    return count, gpu


def _read_table(path: Path) -> dict[str, Gpu]:
    try:
        gpus = msgspec.convert(tomllib.loads(path.read_text()).get("gpu", []), list[Gpu])
    except (OSError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise BadInput(f"{path}: {error}", param="hardware") from None
    return {gpu.name: gpu for gpu in gpus}
