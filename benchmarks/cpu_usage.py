"""CPU time of the measured processes and of all others on the machine."""

import os
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


def family(pid: int) -> set[int]:
    """A process and its descendants."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        fields = _stat(path)
        if fields:
            parents[int(path.parent.name)] = int(fields[1])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def cpu_s(pids: set[int]) -> float:
    """CPU seconds of these processes and their ended children."""
    total = 0
    for pid in pids:
        fields = _stat(Path(f"/proc/{pid}/stat"))
        if fields:
            total += sum(int(fields[place]) for place in (11, 12, 13, 14))
    return total / _TICKS


def busy_s() -> float:
    """CPU seconds of the whole machine."""
    try:
        first = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return 0.0
    user, nice, system, _idle, _wait, irq, soft, stolen = (int(value) for value in first[:8])
    return (user + nice + system + irq + soft + stolen) / _TICKS


class Meter:
    """CPU usage between construction and `read`, of given processes and of others. Stolen time counts as others'."""

    def __init__(self, ours: set[int]) -> None:
        self._ours = ours
        self._cpu_s, self._busy_s = cpu_s(ours), busy_s()

    def read(self, took_s: float) -> tuple[float, float]:
        """(CPU seconds of the given processes, CPUs that others kept busy)."""
        ours_s = cpu_s(self._ours) - self._cpu_s
        return ours_s, max(0.0, busy_s() - self._busy_s - ours_s) / max(took_s, 1e-9)


def _stat(path: Path) -> list[str]:
    """The fields after the process name, which may contain anything."""
    try:
        return path.read_text().rpartition(") ")[2].split()
    except OSError:
        return []
