"""GPUs by name, as a plan needs them: memory, rates of memory and arithmetic, and the links between them. No torch."""

import re
import tomllib
from pathlib import Path

import msgspec

from emberline.protocol.errors import BadInput

GIB = 1 << 30
KERNEL_SHARED_KIB = 227  # of shared memory that the engine's GPU kernels need


class AllReduceTime(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A measured all-reduce."""

    ranks: int
    kib: float  # of the tensor
    us: float


class Gpu(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rates are the ones that programs reach, not those of a data sheet."""

    name: str
    memory_gib: float  # as the driver reports it
    bandwidth_tb_s: float  # of a copy, bytes read and written
    bf16_tflops: float
    fp8_tflops: float
    context_gib: float = 0.6  # taken by the driver and by the process's CUDA context
    shared_kib: int = KERNEL_SHARED_KIB  # shared memory of a block
    link_gb_s: float = 24.0  # from one GPU to others of its machine, each way; the default is PCIe 4
    link_us: float = 12.0  # of a collective of few bytes
    all_reduce: tuple[AllReduceTime, ...] = ()  # measured; the link's figures tell the others
    gpus_per_machine: int = 8
    network_gb_s: float = 45.0  # from one GPU to those of other machines
    network_us: float = 20.0

    def __post_init__(self) -> None:
        rates = (self.memory_gib, self.bandwidth_tb_s, self.bf16_tflops, self.fp8_tflops, self.link_gb_s)
        if min(*rates, self.network_gb_s, self.gpus_per_machine) <= 0:
            raise ValueError(f"GPU {self.name!r}: memory, rates and GPUs of a machine must be above 0")
        if any(each.ranks < 2 or each.kib <= 0 or each.us <= 0 for each in self.all_reduce):
            raise ValueError(f"GPU {self.name!r}: an all_reduce has 2 ranks or more, and kib and us above 0")

    @property
    def memory(self) -> int:
        return int(self.memory_gib * GIB)

    @property
    def runs_kernels(self) -> bool:
        """True if the engine's GPU kernels run on it; otherwise a plan is arithmetic only."""
        return self.shared_kib >= KERNEL_SHARED_KIB


def _gpu(
    name: str, memory_gib: float, tb_s: float, bf16: float, fp8: float, link: str = "pcie4", shared_kib: int = 227
) -> Gpu:
    """Make a GPU from its data sheet: dense TFLOP/s, TB/s. Programs are assumed to reach the shares measured on the
    H200."""
    (gb_s, us), reached = _LINKS[link], round(0.809 * bf16)
    return Gpu(
        name=name,
        memory_gib=memory_gib,
        bandwidth_tb_s=round(0.8875 * tb_s, 3),
        bf16_tflops=reached,
        fp8_tflops=round(0.7075 * fp8) if fp8 else reached,
        shared_kib=shared_kib,
        link_gb_s=gb_s,
        link_us=us,
    )


# GB/s that are reached each way (four fifths of the data sheet's), and µs of a small collective.
_LINKS = {
    "nvlink5": (720.0, 5.0),
    "nvlink4": (360.0, 5.0),
    "nvlink3": (240.0, 6.0),
    "pcie5": (50.0, 10.0),
    "pcie4": (24.0, 12.0),
}
# The H200 was measured. The others: memory as reported, rates in the proportion of the data sheets.
GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("H200", 139.8, 4.8, 989, 1979, "nvlink4"),
        _gpu("H100", 79.1, 3.35, 989, 1979, "nvlink4"),
        _gpu("H20", 95.1, 4.0, 148, 296, "nvlink4"),
        _gpu("GH200", 94.5, 4.0, 989, 1979, "nvlink4"),
        _gpu("B200", 178.4, 8.0, 2250, 4500, "nvlink5"),
        _gpu("B300", 267.7, 8.0, 2250, 4500, "nvlink5"),
        _gpu("A100-80", 79.2, 2.039, 312, 0, "nvlink3", 163),
        _gpu("A100-40", 39.4, 1.555, 312, 0, "nvlink3", 163),
        _gpu("L40S", 44.4, 0.864, 362, 733, "pcie4", 99),
        _gpu("L4", 22.0, 0.300, 121, 242, "pcie4", 99),
        _gpu("RTX-4090", 23.5, 1.008, 165, 330, "pcie4", 99),
        _gpu("RTX-5090", 31.4, 1.792, 209, 419, "pcie5", 99),
    )
}
_SHORT = {"A100": "A100-80", "4090": "RTX-4090", "5090": "RTX-5090"}


def parse_gpus(text: str, hardware: Path | None = None) -> tuple[int, Gpu]:
    """`8xH100`: how many, and which. `hardware`: a TOML file with further GPUs, as tables `[[gpu]]`."""
    known = GPUS | (_read_table(hardware) if hardware is not None else {})
    by_name = {_plain(name): gpu for name, gpu in known.items()}
    match = re.fullmatch(r"(?:(\d{1,4})x)?([\w-]+)", text)
    gpu = by_name.get(_plain(_SHORT.get(match[2].upper(), match[2]))) if match else None
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


def gpu_of_device(device_name: str, memory_bytes: int) -> Gpu:
    """The GPU that a driver calls "NVIDIA H100 80GB HBM3", with the memory it has; an unknown one is taken for an H100.

    Names that say less than ours (A100) are told apart by their memory.
    """
    words, gib = _plain(device_name), memory_bytes / GIB
    named = [gpu for gpu in GPUS.values() if _plain(gpu.name.removesuffix("-80").removesuffix("-40")) in words]
    longest = max((len(gpu.name) for gpu in named), default=0)
    nearest = min(
        (gpu for gpu in named if len(gpu.name) == longest),
        key=lambda gpu: abs(gpu.memory_gib - gib),
        default=GPUS["H100"],
    )
    return msgspec.structs.replace(nearest, memory_gib=gib)


def _plain(name: str) -> str:
    """RTX-4090, rtx4090 and RTX_4090 are one; so are A100-80 and A100-80GB."""
    return re.sub(r"[^A-Z0-9]", "", name.upper()).removesuffix("GB")


def _read_table(path: Path) -> dict[str, Gpu]:
    try:
        document = tomllib.loads(path.read_text())
        unknown = ", ".join(repr(key) for key in document if key != "gpu")
        if unknown:
            raise BadInput(f"{path}: only tables [[gpu]] are read, not {unknown}", param="hardware")
        gpus = msgspec.convert(document.get("gpu", []), list[Gpu])
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise BadInput(f"{path}: {error}", param="hardware") from None
    return {gpu.name: gpu for gpu in gpus}
