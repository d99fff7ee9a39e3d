"""`emberline doctor --gpus`: what the process that checks the GPUs says, or that it does not."""

import sys

from emberline.cli.doctor import gpus


def probe(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def test_every_line_is_a_check() -> None:
    lines = (
        '{"name": "kernels cuda:0", "status": "ok", "detail": "5 kernels agree"}',
        '{"name": "nccl 0-1", "status": "fail", "detail": "a wrong sum", "fix": "see"}',
    )
    found = list(gpus(probe(f"print({lines[0]!r}); print('noise of a driver'); print({lines[1]!r})")))
    assert [(each.name, each.status) for each in found] == [("kernels cuda:0", "ok"), ("nccl 0-1", "fail")]


def test_a_process_that_crashes_is_told_after_what_it_has_found() -> None:
    text = 'import sys; print(\'{"name": "a", "status": "ok", "detail": ""}\'); sys.exit(\'CUDA error 999\')'
    first, last = gpus(probe(text))
    assert first.name == "a"
    assert (last.status, last.detail) == ("fail", "the checks ended early: CUDA error 999")


def test_a_process_that_hangs_is_ended() -> None:
    (found,) = gpus(probe("import time; time.sleep(600)"), limit_s=0.5)
    assert found.status == "fail"
    assert "took more than" in found.detail
