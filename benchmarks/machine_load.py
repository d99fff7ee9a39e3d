"""What the machine did meanwhile: processor time of our processes, and of everybody else's."""

import os
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


def family(pid: int) -> set[int]:
    """A process and all that descend from it."""
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
    """Processor seconds that these processes have used, and their children that ended."""
    total = 0
    for pid in pids:
        fields = _stat(Path(f"/proc/{pid}/stat"))
        if fields:
            total += sum(int(fields[place]) for place in (11, 12, 13, 14))
    return total / _TICKS


def busy_s() -> float:
    """Processor seconds that anybody has used."""
    try:
        first = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return 0.0
    user, nice, system, _idle, _wait, irq, soft, stolen = (int(value) for value in first[:8])
    return (user + nice + system + irq + soft + stolen) / _TICKS


class Meter:
    """Between its making and `read`: processors used by ours, and by others. Stolen time is others'."""

    def __init__(self, ours: set[int]) -> None:
        self._ours = ours
        self._cpu_s, self._busy_s = cpu_s(ours), busy_s()

    def read(self, took_s: float) -> tuple[float, float]:
        """(processor seconds of ours, processors that others kept busy)."""
        ours_s = cpu_s(self._ours) - self._cpu_s
        return ours_s, max(0.0, busy_s() - self._busy_s - ours_s) / max(took_s, 1e-9)


def _stat(path: Path) -> list[str]:
    """The fields behind the name, which may hold anything."""
    try:
        return path.read_text().rpartition(") ")[2].split()
    except OSError:
        return []
