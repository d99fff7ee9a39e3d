"""Memory and power of the device in load reports."""

import threading

from emberline.engine.worker.device_sensor import DeviceSensor, NvmlError, ProcessMemory, open_sensor
from emberline.protocol.frames import DeviceUse
from tests.engine.client import wait_until

PATIENCE_S = 20.0


class Device:
    """Answers with growing memory; fails from a reading on."""

    def __init__(self, fails_from: int = 1 << 30) -> None:
        self.n_read, self.fails_from = 0, fails_from
        self.failed = threading.Event()

    def read(self) -> DeviceUse:
        self.n_read += 1
        if self.n_read >= self.fails_from:
            self.failed.set()
            raise NvmlError("nvmlDeviceGetMemoryInfo failed with status 15")
        return DeviceUse(memory_used_bytes=self.n_read, memory_bytes=1 << 40, power_w=100.0)


def test_the_sensor_reads_again_and_again() -> None:
    sensor = DeviceSensor(Device(), period_s=0.01)
    try:
        assert sensor.use is not None
        wait_until(lambda: sensor.use is not None and sensor.use.memory_used_bytes > 2, PATIENCE_S)
    finally:
        sensor.close()


def test_a_device_that_fails_is_not_reported_with_old_figures() -> None:
    device = Device(fails_from=2)
    sensor = DeviceSensor(device, period_s=0.01)
    try:
        assert device.failed.wait(PATIENCE_S)
        wait_until(lambda: sensor.use is None, PATIENCE_S)
    finally:
        sensor.close()


def test_a_device_that_never_answers_needs_no_thread() -> None:
    device = Device(fails_from=1)
    sensor = DeviceSensor(device, period_s=0.001)
    sensor.close()
    assert (sensor.use, device.n_read) == (None, 1)


def test_a_cpu_worker_tells_its_own_memory() -> None:
    use = ProcessMemory().read()
    assert 0 < use.memory_used_bytes < use.memory_bytes
    assert use.power_w is None


def test_a_gpu_without_nvml_tells_the_memory_of_the_process() -> None:
    def unknown(device: str) -> str:
        raise RuntimeError(f"{device} has no uuid")

    sensor = open_sensor("cuda:0", unknown)
    sensor.close()
    assert sensor.use is not None
    assert sensor.use.power_w is None
