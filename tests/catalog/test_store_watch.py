"""A pull waits until the server on the same store offers what was pulled."""

import threading
from pathlib import Path

from emberline.catalog.store_watch import StoreWatch, wait_until_offered


def test_a_pull_waits_for_the_server_and_for_no_other(tmp_path: Path) -> None:
    assert wait_until_offered(tmp_path), "no server has ever run here"
    server, second = StoreWatch(tmp_path), StoreWatch(tmp_path)
    server.open()
    second.open()
    second.offered(second.stamp())
    assert not wait_until_offered(tmp_path, 0.0), "only the first server's word counts"
    (tmp_path / "model").mkdir()
    stamp = server.stamp()
    waiting = threading.Thread(target=wait_until_offered, args=(tmp_path, 60.0))
    waiting.start()
    server.offered(stamp)
    waiting.join(60)
    assert not waiting.is_alive()
    (tmp_path / "other").mkdir()
    assert not wait_until_offered(tmp_path, 0.0)
    server.close()
    assert wait_until_offered(tmp_path), "the server has ended"


def test_a_store_that_cannot_be_written_is_watched_by_nobody(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    watch = StoreWatch(tmp_path / "file")
    watch.open()
    watch.offered(watch.stamp())
    watch.close()
    assert wait_until_offered(tmp_path / "file")
