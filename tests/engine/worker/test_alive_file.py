"""The file that says to a service manager that a worker makes progress."""

import os
import threading
from pathlib import Path

import pytest

from emberline.engine.addresses import listening
from emberline.engine.core.step_loop import StepLoop
from emberline.engine.worker.alive_file import AliveFile, open_alive_file
from emberline.engine.worker.client_connection import ServerLimits
from emberline.engine.worker.socket_server import Server
from emberline.protocol.errors import BadInput
from emberline.protocol.frames import Drain, EngineInfo, Heartbeat
from tests.engine.client import Client, wait_until
from tests.engine.fakes import EOS, VOCAB, FakeRunner, request, scheduler_of

LONG_AGO_S = 1000.0


def is_touched(path: Path, alive: AliveFile, state: Heartbeat) -> bool:
    os.utime(path, (LONG_AGO_S, LONG_AGO_S))
    alive.beat(state)
    return path.stat().st_mtime != LONG_AGO_S


def test_it_is_touched_while_tokens_move_or_there_is_no_work(tmp_path: Path) -> None:
    path = tmp_path / "alive"
    alive = AliveFile(path)
    alive.beat(Heartbeat())
    assert path.exists()
    assert is_touched(path, alive, Heartbeat())
    assert is_touched(path, alive, Heartbeat(computed_tokens=5, in_step=True))
    assert not is_touched(path, alive, Heartbeat(computed_tokens=5, in_step=True))
    assert is_touched(path, alive, Heartbeat(computed_tokens=6, in_step=True))
    assert is_touched(path, alive, Heartbeat(computed_tokens=6))
    assert is_touched(path, alive, Heartbeat(computed_tokens=6, preparing=True, n_prepared=1))
    assert not is_touched(path, alive, Heartbeat(computed_tokens=6, preparing=True, n_prepared=1))


def test_the_file_of_an_earlier_run_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "alive"
    path.touch()
    AliveFile(path)
    assert not path.exists()
    assert open_alive_file(None) is None


def test_a_folder_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="No such file"):
        AliveFile(tmp_path / "nowhere" / "alive")


def test_a_file_that_cannot_be_written_later_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    alive = AliveFile(folder / "alive")
    folder.rmdir()
    alive.beat(Heartbeat())
    alive.beat(Heartbeat())
    assert len(caplog.records) == 1


def test_an_engine_whose_step_hangs_stops_touching_it(tmp_path: Path) -> None:
    path, go, hangs = tmp_path / "alive", threading.Event(), threading.Event()
    scheduler, cache = scheduler_of(n_blocks=400, context_len=4000)
    runner = FakeRunner(cache)
    launch = runner.launch

    def hanging(plan):
        hangs.set()
        return go.wait(60) and launch(plan)

    runner.launch = hanging
    info = EngineInfo(model="fake", fingerprint="fake", context_len=4000, vocab_size=VOCAB, eos_ids=(EOS,))
    beats = threading.Semaphore(0)

    class CountedFile(AliveFile):
        def beat(self, state: Heartbeat) -> None:
            super().beat(state)
            beats.release()

    alive = CountedFile(path)

    def is_touched_again() -> bool:
        two_beats()
        os.utime(path, (LONG_AGO_S, LONG_AGO_S))
        two_beats()
        return path.stat().st_mtime != LONG_AGO_S

    def two_beats() -> None:
        """From now on: the first may have begun before."""
        while beats.acquire(blocking=False):
            pass
        for _ in range(2):
            assert beats.acquire(timeout=60)

    with listening(str(tmp_path / "engine.sock")) as (listener, address):
        loop, limits = StepLoop(scheduler, runner), ServerLimits(heartbeat_s=0.01)
        server = Server(listener, loop, info, "secret", alive_file=alive, limits=limits)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        try:
            wait_until(path.exists)
            assert is_touched_again()
            with Client(address) as client:
                client.submit(request("r", [1, 2, 3], max_tokens=4))
                assert hangs.wait(60)
                assert not is_touched_again()
                go.set()
                wait_until(is_touched_again)
                client.send(Drain(0))
                thread.join(60)
        finally:
            go.set()
    assert not thread.is_alive()
