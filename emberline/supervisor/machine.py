"""The CPU cores, GPUs and file limit of this machine, found without importing torch."""

import importlib.util
import os
import resource
import shutil
import subprocess
from pathlib import Path

import msgspec

from emberline.engine.memory import free_host_bytes

_KERNEL_CAPABILITIES = ("9.0", "10.0", "10.3")  # of GPUs with the shared memory that the engine's kernels need


class Hardware(msgspec.Struct, frozen=True):
    """The parts of a machine that its engine workers share."""

    gpus: tuple[str, ...]  # as CUDA_VISIBLE_DEVICES names them
    cores: int
    free_bytes: int  # of host memory


def hardware() -> Hardware:
    """The hardware of this machine, as it is now."""
    return Hardware(tuple(gpus()), cores(), free_host_bytes())


def cores() -> int:
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def gpus() -> list[str]:
    """The CUDA devices for workers, as CUDA_VISIBLE_DEVICES names them; none with a CPU build of torch."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None or not (Path(torch.origin).parent / "lib" / "libtorch_cuda.so").exists():
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [device.strip() for device in visible.split(",") if device.strip() not in ("", "-1")]
    return [str(index) for index in range(n_gpus_installed())]


def kernel_gpu_bytes() -> int:
    """Memory of the largest GPU that this process may use and that the engine's kernels run on; 0: there is none."""
    if not gpus() or (smi := shutil.which("nvidia-smi")) is None:
        return 0
    query = [smi, "--query-gpu=memory.total,compute_cap", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, timeout=10, check=False).stdout
        rows = [line.split(",") for line in listed.splitlines()]
        return max((int(mib) << 20 for mib, cap in rows if cap.strip() in _KERNEL_CAPABILITIES), default=0)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return 0


def n_gpus_installed() -> int:
    """GPUs that the driver reports, whether or not torch can use them."""
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*"))) or len(list(Path("/dev").glob("nvidia[0-9]*")))


def raise_file_limit() -> int:
    """Allow this process and its children as many open files, and so connections, as the system permits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (OSError, ValueError):  # macOS reports a limit that it does not grant
            pass
    return soft
