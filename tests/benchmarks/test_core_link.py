import pytest

from benchmarks import core_link


def test_every_kind_of_work_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    core_link.main(["--rounds", "1", "--calls", "3"])
    *_, find, request = capsys.readouterr().out.splitlines()
    measured = {name: float(us) for _, name, us, _ in (map(str.strip, line.split("|")) for line in (find, request))}
    assert measured.keys() == {"find", "request"}
    assert min(measured.values()) > 0
