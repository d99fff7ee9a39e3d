"""Subscribers of KV events know the content of an engine's prefix cache, whenever they subscribed."""

import random

import pytest

from emberline.engine.worker.client_connection import ServerLimits
from emberline.kv import kv_events
from emberline.protocol.block_hash import DIGEST_BYTES
from emberline.protocol.frames import KVEvents, Step, WatchKV
from tests.engine.client import Client, wait_until
from tests.engine.fakes import FULL, VOCAB, request, window_group
from tests.engine.worker.test_socket_server import Engine


class Watcher(Client):
    def __init__(self, address):
        super().__init__(address)
        self.known = set()
        self.frames = []
        self.send(WatchKV())

    def take(self, message):
        if isinstance(message, Step):
            for delta in message.deltas:
                self.deltas.setdefault(delta.id, []).append(delta)
            return
        assert isinstance(message, KVEvents)
        stored, removed = cut(message.stored), cut(message.removed)
        assert len(self.frames) == 0 or not message.whole
        self.frames.append(message)
        assert not stored & removed
        assert not stored & self.known
        assert removed <= self.known
        self.known = (self.known | stored) - removed

    def follow(self, index):
        """Read until the known content equals that of the cache."""
        while not self.frames or self.known != set(index):
            self.take(self.receive())

    def finish(self, *ids):
        while any(id not in self.deltas or self.deltas[id][-1].finish is None for id in ids):
            self.take(self.receive())


def cut(keys):
    made = [keys[at : at + DIGEST_BYTES] for at in range(0, len(keys), DIGEST_BYTES)]
    assert len(set(made)) == len(made)
    return set(made)


@pytest.mark.parametrize("layouts", [(FULL,), (window_group(20), FULL)])
def test_subscribers_track_the_cache_content(tmp_path, layouts):
    rng = random.Random(5)
    engine = Engine(tmp_path / "a.sock", n_blocks=24, context_len=300, layouts=layouts)
    index = next(group.index for group in engine.cache.groups if group.layout.window is None)
    with Watcher(engine.address) as first:
        first.follow(index)
        assert first.frames == [KVEvents(whole=True)]
        for turn in range(4):
            ids = [f"{turn}-{n}" for n in range(6)]
            prompts = [[rng.randrange(VOCAB) for _ in range(rng.randrange(1, 150))] for _ in ids]
            first.submit(*(request(id, prompt, max_tokens=30) for id, prompt in zip(ids, prompts)))
            first.finish(*ids)
            first.follow(index)
            with Watcher(engine.address) as late:
                late.follow(index)
                assert late.frames[0].whole
    assert len(index) > 0
    wait_until(lambda: not engine.cache.n_listeners)
    engine.stop()


def test_a_large_snapshot_is_split_into_frames(tmp_path, monkeypatch):
    monkeypatch.setattr(kv_events, "KEYS_PER_FRAME", 7)
    engine = Engine(tmp_path / "a.sock")
    with Watcher(engine.address) as first:
        first.submit(*(request(f"{n}", [n % VOCAB, n // VOCAB] * 64, max_tokens=1) for n in range(6)))
        first.finish(*(f"{n}" for n in range(6)))
        index = engine.cache.groups[0].index
        first.follow(index)
        with Watcher(engine.address) as late:
            late.follow(index)
            assert len(late.frames) == -(-len(index) // 7) > 3
            assert [frame.whole for frame in late.frames] == [True] + [False] * (len(late.frames) - 1)
            assert max(len(frame.stored) for frame in late.frames) == 7 * DIGEST_BYTES
    engine.stop()


def test_frames_stay_below_a_megabyte():
    held = [(n.to_bytes(16, "little"), b"tag") for n in range(200_000)]
    frames = kv_events.TierChanges("disk", b"tag", lambda: held, print).watch()
    assert max(len(frame.stored) for frame in frames) < 1_000_000
    assert sum(len(frame.stored) for frame in frames) == 3_200_000


def test_a_subscriber_that_does_not_read_is_disconnected_and_steps_continue(tmp_path):
    engine = Engine(tmp_path / "a.sock", n_blocks=4000, token_budget=512, limits=ServerLimits(backlog_bytes=4096))
    with Watcher(engine.address) as slow, Client(engine.address) as client:
        rng = random.Random(1)
        wait_until(lambda: engine.cache.n_listeners)
        for n in range(400):
            prompt = [rng.randrange(VOCAB) for _ in range(500)]
            client.submit(request(f"{n}", prompt, max_tokens=1))
            client.finish(f"{n}")
            if not engine.cache.n_listeners:
                break
        else:
            raise AssertionError("it was never dropped")
        client.submit(request("after", [1, 2, 3]))
        assert client.finish("after").finish == "length"
        assert not engine.cache.n_listeners
        slow.close()
    engine.stop()


def test_subscribers_get_load_reports_of_all_clients(tmp_path):
    """The core must know how full the engine is while other processes submit requests."""
    engine = Engine(tmp_path / "a.sock", n_blocks=24, context_len=300)
    with Watcher(engine.address) as watcher, Client(engine.address) as other:
        other.submit(request("r", [1] * 40, max_tokens=4))
        other.finish("r")
        load = None
        while not watcher.frames or load is None or load.output_tokens < 4 or load.running or load.kv_used_blocks:
            message = watcher.receive()
            watcher.take(message)
            load = message.load if isinstance(message, Step) else load
        watcher.sock.settimeout(0.5)
        with pytest.raises(TimeoutError):  # nothing has changed
            watcher.receive()
    engine.stop()
