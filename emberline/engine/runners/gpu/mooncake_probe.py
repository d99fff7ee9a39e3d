"""A probe of Mooncake's Transfer Engine and a device's memory: builds without CUDA take its addresses and crash.

`python -m emberline.engine.runners.gpu.mooncake_probe PROTOCOL HOST DEVICE` sends some bytes from one part of the
device's memory to another, by an engine of its own, and compares them. It is a process of its own because of the crash.
"""

import subprocess
import sys

import torch

from emberline.kv.transfer.mooncake import MooncakeEngine, Pool
from emberline.kv.transfer.transport import TransportUnavailable

LIMIT_S = 60.0
N_BYTES = 1 << 20


def why_not_device_memory(protocol: str, host: str, device: str, limit_s: float = LIMIT_S) -> str:
    """Return why the engine does not move memory of this device, or an empty string if it does."""
    command = [sys.executable, "-m", __spec__.name, protocol, host, device]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return f"a transfer within it took more than {limit_s:g} s"
    if not done.returncode:
        return ""
    said = done.stdout.strip().splitlines()
    return said[-1] if said else f"a transfer within it ends the process (status {done.returncode})"


def probe(protocol: str, host: str, device: str) -> str:
    """Transfer and compare. Returns what is wrong, or an empty string."""
    source = torch.randint(0, 256, (N_BYTES,), dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    if source.is_cuda:
        torch.cuda.synchronize(source.device)
    pools = [Pool(each.data_ptr(), N_BYTES, N_BYTES) for each in (source, target)]
    try:
        engine = MooncakeEngine(pools, host, protocol)
        engine.write(engine.address, [pools[0].address], [pools[1].address], [N_BYTES])
    except TransportUnavailable as error:
        return str(error)
    return "" if torch.equal(source, target) else "other bytes arrive than were sent"


if __name__ == "__main__":
    problem = probe(*sys.argv[1:])
    print(problem, flush=True)
    sys.exit(bool(problem))
