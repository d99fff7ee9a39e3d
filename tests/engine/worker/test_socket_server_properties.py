"""Under random actions of clients and random faults an engine with work makes steps, and every request ends once."""

import socket
import tempfile
from argparse import Namespace
from collections import Counter
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from emberline.engine.addresses import listening
from emberline.engine.worker.socket_server import Server
from emberline.protocol import frames
from emberline.protocol.frames import Abort, FrameBuffer, Hello, Step, Submit
from standins import standin_engine as standin
from tests.engine.fakes import request
from tests.examples import n_examples

MAX_TURNS = 2000

setups = st.fixed_dictionaries(
    {
        "kv_tokens": st.integers(32, 400),
        "context_len": st.integers(20, 200),
        "max_running": st.integers(1, 6),
        "token_budget": st.integers(4, 64),
    }
)
scripts = st.sampled_from(
    ["", "say=count", "say=4.5.6", "itl_ms=0.1,ttft_ms=0.2", "error_after=0", "error_after=3", "drop_after=0",
     "say=count,drop_after=2", "refuse=1", "nonsense=1"]
)  # fmt: skip
requests = st.fixed_dictionaries(
    {
        "prompt_ids": st.integers(1, 3).flatmap(lambda first: st.integers(1, 180).map(lambda n: [first] * n)),
        "priority": st.integers(0, 3),
        "deadline_s": st.none() | st.sampled_from([0.0, 0.001, 60.0]),
        "session": scripts.map("standin:{}".format),
        "max_tokens": st.sampled_from([1, 3, 40, None]),
        "ignore_eos": st.booleans(),
    }
)
actions = st.one_of(
    st.tuples(st.just("submit"), st.integers(0, 2), st.lists(requests, min_size=1, max_size=4)),
    st.tuples(st.just("abort"), st.integers(0, 2), st.integers(0, 9)),
    st.tuples(st.just("leave"), st.integers(0, 2), st.none()),
    st.tuples(st.just("turns"), st.just(0), st.integers(1, 12)),
)


class Peer:
    """A client that never blocks, and reconnects when it was disconnected."""

    def __init__(self, path):
        self.path = path
        self.open = set()  # requests without a terminal delta
        self.call()

    def call(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self.path)
        self.sock.setblocking(False)
        self.open.clear()  # aborted with the previous connection
        self._buffer = FrameBuffer()
        self.send(Hello(""))

    def send(self, message):
        try:
            self.sock.send(frames.encode(message))
        except OSError:  # disconnected meanwhile
            self.sock.close()
            self.call()
            self.send(message)

    def read(self):
        """How many requests ended."""
        try:
            data = self.sock.recv(1 << 20)
        except BlockingIOError:
            return 0
        except OSError:
            data = b""
        if not data:
            ended = len(self.open)
            self.sock.close()
            self.call()
            return ended
        steps = [m for m in map(frames.from_engine_decoder.decode, self._buffer.feed(data)) if isinstance(m, Step)]
        deltas = [delta for step in steps for delta in step.deltas]
        for delta in deltas:
            assert delta.id in self.open, "nothing follows an end"
            if delta.finish is not None:
                self.open.remove(delta.id)
        return sum(delta.finish is not None for delta in deltas)


class Stage:
    """A server that is driven by hand, one turn at a time, and its clients."""

    def __init__(self, path, listener, setup):
        args = Namespace(
            name="",
            fingerprint="f",
            vocab_size=50,
            eos_ids=[2],
            script="",
            journal=None,
            role="both",
            check_kv=False,
            head_dim=1,
            **setup,
        )
        self.loop, info = standin.build(args, lambda request_id: self.server.disconnect(request_id))
        self.server = Server(listener, self.loop, info, "")
        self.path = path
        self.peers = [Peer(path) for _ in range(3)]
        self.n_submitted = 0
        self.n_idle_turns = 0

    def submit(self, peer, wanted):
        ids = [f"r{self.n_submitted + n}" for n in range(len(wanted))]
        self.n_submitted += len(wanted)
        peer.send(Submit([request(id, **fields) for id, fields in zip(ids, wanted)]))
        peer.open.update(ids)

    def run_once(self):
        steps, was_busy = self.loop.load.steps, self.loop.busy
        self.server.run_once()
        n_ended = sum(peer.read() for peer in self.peers)
        moved = not was_busy or not self.loop.busy or self.loop.load.steps > steps or n_ended
        self.n_idle_turns = 0 if moved else self.n_idle_turns + 1
        assert self.n_idle_turns < 2, "work to do and nothing done"

    def run(self, script):
        for action, number, what in script:
            peer = self.peers[number]
            if action == "submit":
                self.submit(peer, what)
            elif action == "abort":
                peer.send(Abort([f"r{max(0, self.n_submitted - 1 - what)}"]))
            elif action == "leave":
                peer.sock.close()
                peer.call()
            for _ in range(what if action == "turns" else 1):
                if action != "turns" or self.loop.busy:
                    self.run_once()

    def finish(self):
        for _ in range(MAX_TURNS):
            if not self.loop.busy and not any(peer.open for peer in self.peers):
                return
            self.peers[0].send(Abort([]))  # so that an idle server wakes up and reads what is left
            self.run_once()
        raise AssertionError(f"these never end: {Counter(id for peer in self.peers for id in peer.open)}")


@settings(max_examples=n_examples(60), deadline=None)
@given(setups, st.lists(actions, min_size=1, max_size=12))
def test_every_request_ends_once_under_random_client_actions(setup, script):
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "a.sock")
        with listening(path) as (listener, _):
            stage = Stage(path, listener, setup)
            stage.run(script)
            stage.finish()
            load = stage.loop.load
            assert (load.running, load.waiting, load.waiting_tokens, load.kv_used_blocks) == (0, 0, 0, 0)
            assert not stage.server.n_requests
            stage.server.drain(0)
            stage.server.run()
            for peer in stage.peers:
                peer.sock.close()
