"""The CPU limit of a control group, and its processors, in files that are none of the kernel's."""

from pathlib import Path

import pytest

from emberline.supervisor.sandbox.control_group import CONTROLLERS, ControlGroup, GroupLimits, Hierarchy


@pytest.mark.parametrize(("cpus", "limit"), [(2.0, "20000 10000"), (0.5, "5000 10000"), (0.05, "1000 20000")])
def test_a_cpu_limit_counts_in_the_shortest_period_that_can_hold_it(cpus: float, limit: str, tmp_path: Path) -> None:
    hierarchy = Hierarchy(2, dict.fromkeys(CONTROLLERS, tmp_path))
    ControlGroup(hierarchy, GroupLimits(memory_bytes=1 << 30, cpus=cpus, n_processes=8))
    (group,) = tmp_path.iterdir()
    assert (group / "cpu.max").read_text() == limit


def test_programs_get_the_processors_that_the_fewest_others_have(tmp_path: Path) -> None:
    (tmp_path / "cpuset.cpus.effective").write_text("0,2-4\n")
    hierarchy = Hierarchy(2, dict.fromkeys((*CONTROLLERS, "cpuset"), tmp_path))

    def processors_of(cpus: float) -> str:
        before = set(tmp_path.iterdir())
        ControlGroup(hierarchy, GroupLimits(memory_bytes=1 << 30, cpus=cpus, n_processes=8))
        (group,) = set(tmp_path.iterdir()) - before
        return (group / "cpuset.cpus").read_text()

    assert [processors_of(cpus) for cpus in (1.0, 0.5, 1.5, 8.0)] == ["4", "3", "0,2", "0,2,3,4"]
    assert processors_of(1.0) == "4"  # all have as many by now


def test_a_program_is_kept_in_without_processors_of_its_own(tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in (*CONTROLLERS, "cpuset")}
    for folder in folders.values():
        folder.mkdir()  # the kernel's list of processors is not there
    group = ControlGroup(Hierarchy(1, folders), GroupLimits(memory_bytes=1 << 30, cpus=1.0, n_processes=8))
    assert group.processors == set()
    assert {Path(file).parent.parent.name for file in group.process_files} == set(CONTROLLERS)
    assert not list(folders["cpuset"].iterdir())
