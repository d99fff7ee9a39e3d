"""Recorded ratios of one kind of machine, and whether a new run has slipped beyond noise.

`benchmarks/baselines/` has a file per kind of machine, named by its architecture and CPU model, or by its GPU. A file
holds ratios only, each measured in one run: ours over a peer, or ours over a calibration loop where there is no peer.
"""

import json
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "baselines"
MIN_NOISE = 0.05  # a difference of 5 % is never called a slip


@dataclass(slots=True)
class Samples:
    """Ours and the reference's values of one figure, one of each per round."""

    better: str  # "less" or "more"
    reference: str  # what ours is divided by
    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)

    def ratio(self) -> "Ratio":
        """Best over best: whatever else the machine does makes a round worse, never better."""
        (ours, our_noise), (theirs, their_noise) = (_best(values, self.better) for values in (self.ours, self.theirs))
        return Ratio(_rounded(ours / theirs), _rounded(max(our_noise, their_noise)), self.better, self.reference)


@dataclass(frozen=True, slots=True)
class Ratio:
    """A figure's ratio to its reference; `spread` is how far the second-best round was from the best."""

    value: float
    spread: float
    better: str
    reference: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """A comparison of one figure with its baseline. `worse` is the factor by which it got worse, below 1 if better."""

    name: str
    state: str  # "slipped", "better", "same", "new" or "not measured"
    worse: float
    noise: float


def _best(values: Sequence[float], better: str) -> tuple[float, float]:
    best, *others = sorted(values, reverse=better == "more")
    return best, abs(others[0] / best - 1) if others else 0.0


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def compare(before: Mapping[str, Ratio], now: Mapping[str, Ratio]) -> list[Verdict]:
    """Judge every figure that was recorded or measured. A change within the spreads of both runs is noise."""
    verdicts = []
    for name in sorted({*before, *now}):
        if name not in now or name not in before:
            verdicts.append(Verdict(name, "new" if name in now else "not measured", 1.0, 0.0))
            continue
        old, new = before[name], now[name]
        if (old.better, old.reference) != (new.better, new.reference):
            verdicts.append(Verdict(name, "new", 1.0, 0.0))  # another peer, or none: not comparable
            continue
        worse = new.value / old.value if new.better == "less" else old.value / new.value
        noise = max(MIN_NOISE, old.spread + new.spread)
        state = "slipped" if worse > 1 + noise else "better" if worse < 1 / (1 + noise) else "same"
        verdicts.append(Verdict(name, state, worse, noise))
    return verdicts


def read(path: Path) -> dict[str, Ratio]:
    """The ratios in a file; none if it does not exist."""
    if not path.exists():
        return {}
    return {name: Ratio(**entry) for name, entry in json.loads(path.read_text())["ratios"].items()}


def write(path: Path, ratios: Mapping[str, Ratio], suites: Iterable[str], about: Mapping[str, Any]) -> None:
    """Record the ratios of the suites that ran; those of other suites stay as they are."""
    measured = tuple(f"{suite}: " for suite in suites)
    kept = {name: ratio for name, ratio in read(path).items() if not name.startswith(measured)}
    entries = {name: asdict(ratio) for name, ratio in sorted((kept | dict(ratios)).items())}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**about, "ratios": entries}, indent=1) + "\n")


def slug(*names: str) -> str:
    """A file name of lower-case words: `x86_64-intel-r-xeon-r-processor-2-50ghz`."""
    return re.sub(r"[^a-z0-9_]+", "-", " ".join(names).lower()).strip("-")


def cpu_name() -> str:
    """The CPU's model as the kernel names it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("model name", "Model", "CPU part")):
            return line.partition(":")[2].strip()
    return "unknown"


def cpu_baseline() -> Path:
    """The file of this machine's kind of CPU."""
    return FOLDER / f"{slug(platform.machine(), cpu_name())}.json"


def gpu_baseline(device: str) -> Path:
    """The file of a GPU, named as `nvidia-smi` names it, with or without its driver's version."""
    return FOLDER / f"{slug(device.partition(',')[0])}.json"
