"""Memory and power of the device, read once a second by a thread, for load reports.

NVIDIA's management library (NVML) tells those of a GPU; it comes with the driver and is called without a Python
package. On a CPU, or where the library does not answer, the memory of the process is told and no power.
"""

import ctypes
import logging
import os
import threading
from collections.abc import Callable
from typing import Protocol

from emberline.protocol.frames import DeviceUse

PERIOD_S = 1.0
_LIBRARY = "libnvidia-ml.so.1"
_ROUND_BYTES = 16 << 20  # smaller changes of memory are no news
_ROUND_W = 5.0

_log = logging.getLogger(__name__)


class NvmlError(Exception):
    """NVML did not answer; the text says which call failed."""


class Nvml:
    """One GPU, asked through NVML."""

    def __init__(self, uuid: str) -> None:
        """uuid: of the GPU, as CUDA names it. Raises NvmlError."""
        try:
            self._library = ctypes.CDLL(_LIBRARY)
        except OSError as error:
            raise NvmlError(str(error)) from None
        self._call("nvmlInit_v2")
        self._gpu = ctypes.c_void_p()
        name = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
        self._call("nvmlDeviceGetHandleByUUID", name.encode(), ctypes.byref(self._gpu))

    def read(self) -> DeviceUse:
        """Read memory and power. Raises NvmlError if the memory cannot be read."""
        memory = (ctypes.c_ulonglong * 3)()  # total, free, used
        self._call("nvmlDeviceGetMemoryInfo", self._gpu, ctypes.byref(memory))
        return DeviceUse(
            memory_used_bytes=_rounded(memory[2]),
            memory_bytes=memory[0],
            power_w=self._watts("nvmlDeviceGetPowerUsage"),
            power_limit_w=self._watts("nvmlDeviceGetEnforcedPowerLimit"),
        )

    def _watts(self, call: str) -> float | None:
        milliwatts = ctypes.c_uint()
        try:
            self._call(call, self._gpu, ctypes.byref(milliwatts))
        except NvmlError:
            return None  # some GPUs and virtual ones do not tell
        return _ROUND_W * round(milliwatts.value / 1000 / _ROUND_W)

    def _call(self, name: str, *args: object) -> None:
        try:
            status = getattr(self._library, name)(*args)
        except AttributeError:
            raise NvmlError(f"{name} is not in {_LIBRARY}") from None
        if status:
            raise NvmlError(f"{name} failed with status {status}")


class Device(Protocol):
    def read(self) -> DeviceUse: ...


class ProcessMemory:
    """The process's resident memory, on a CPU."""

    def read(self) -> DeviceUse:
        """Read the memory of this process and of the machine. Raises OSError where there is no /proc."""
        page = os.sysconf("SC_PAGE_SIZE")
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[1]) * page
        return DeviceUse(memory_used_bytes=_rounded(used), memory_bytes=os.sysconf("SC_PHYS_PAGES") * page)


def _rounded(n_bytes: int) -> int:
    return round(n_bytes / _ROUND_BYTES) * _ROUND_BYTES


class DeviceSensor:
    """Owns the thread that reads a device. `use` is the last reading; None before the first and without any."""

    def __init__(self, device: Device, period_s: float = PERIOD_S) -> None:
        self.use: DeviceUse | None = None
        self._device, self._period_s = device, period_s
        self._problem = ""  # of the last reading
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="device sensor", daemon=True)
        self._read()
        if self.use is None:
            _log.info("memory and power of the device are not reported: %s", self._problem)
        else:
            self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(self._period_s):
            self._read()

    def _read(self) -> None:
        try:
            self.use = self._device.read()
        except (NvmlError, OSError, ValueError) as error:
            self.use, self._problem = None, str(error)


def open_sensor(device: str, gpu_uuid: Callable[[str], str]) -> DeviceSensor:
    """Open the sensor of a device such as cuda:0 or cpu. gpu_uuid: tells how NVML knows a CUDA device."""
    if not device.startswith("cuda"):
        return DeviceSensor(ProcessMemory())
    try:
        return DeviceSensor(Nvml(gpu_uuid(device)))
    except (NvmlError, AttributeError, RuntimeError) as error:
        _log.info("memory and power of the GPU are not reported: %s", error)
        return DeviceSensor(ProcessMemory())


def gpu_uuid(device: str) -> str:
    """UUID of a CUDA device, whichever GPUs the process sees."""
    import torch

    return str(torch.cuda.get_device_properties(torch.device(device)).uuid)
