"""The CPU limit of a control group, in files that are none of the kernel's."""

from pathlib import Path

import pytest

from emberline.supervisor.sandbox.control_group import CONTROLLERS, ControlGroup, GroupLimits, Hierarchy


@pytest.mark.parametrize(("cpus", "limit"), [(2.0, "20000 10000"), (0.5, "5000 10000"), (0.05, "1000 20000")])
def test_a_cpu_limit_counts_in_the_shortest_period_that_can_hold_it(cpus: float, limit: str, tmp_path: Path) -> None:
    hierarchy = Hierarchy(2, dict.fromkeys(CONTROLLERS, tmp_path))
    ControlGroup(hierarchy, GroupLimits(memory_bytes=1 << 30, cpus=cpus, n_processes=8))
    (group,) = tmp_path.iterdir()
    assert (group / "cpu.max").read_text() == limit
