"""Models with window groups over two engines, real pools, threads and sockets: tokens that depend on every block."""

import random
import threading
from contextlib import contextmanager

import pytest

from emberline.engine.addresses import listening
from emberline.engine.core.limits import Limits
from emberline.engine.core.step_loop import StepLoop
from emberline.engine.runners.cpu.torch_runner import TorchRunner
from emberline.engine.worker.build import build_scheduler
from emberline.engine.worker.socket_server import Server
from emberline.kv.cache import KVCache
from emberline.kv.transfer.group_transfers import GroupTransfers
from emberline.kv.transfer.host_transfers import host_transfers
from emberline.protocol.frames import Drain, EngineInfo
from tests.engine.client import Client
from tests.engine.fakes import VOCAB, expected, request
from tests.engine.runners.cpu.test_torch_runner import FULL, WINDOW, TorchFake
from tests.engine.transfer.test_prefill_decode import halves

LIMITS = Limits(context_len=300, vocab_size=VOCAB, eos_ids=(0,), max_running=4, token_budget=48)
LAYOUTS = {"full": (FULL,), "window": (FULL, WINDOW), "window first": (WINDOW, FULL)}


@contextmanager
def serving(address, layouts, shared):
    model, sizes = TorchFake(layouts), [60] * len(layouts)
    runner = TorchRunner(model, sizes, LIMITS, shared=shared)
    transfers = GroupTransfers(host_transfers("fake", layouts, runner.memory))
    cache = KVCache(layouts, sizes, chunk=LIMITS.token_budget)
    loop = StepLoop(build_scheduler(cache, LIMITS, "fake", transfers=transfers), runner)
    info = EngineInfo(
        model="fake",
        fingerprint="fake",
        context_len=300,
        vocab_size=VOCAB,
        eos_ids=(0,),
        kv_groups=layouts,
        transfers=transfers.own.receives_by,
    )
    with listening(str(address)) as (listener, at):
        server = Server(listener, loop, info, "secret", accept_sender=transfers.accept)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        with Client(at) as client:
            yield client, at
            client.send(Drain(0))
            thread.join(60)
        assert not thread.is_alive()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_tokens_are_those_of_one_engine(tmp_path, name, transport):
    layouts, rng = LAYOUTS[name], random.Random(2)
    head = [rng.randrange(1, VOCAB) for _ in range(90)]
    prompts = [head[: rng.randrange(20, 90)] + [rng.randrange(1, VOCAB) for _ in range(60)] for _ in range(8)]
    decode_address = tmp_path / "d.sock" if transport == "shm" else "tcp:127.0.0.1:0"
    with (
        serving(tmp_path / "p.sock", layouts, shared=False) as (prefill, _),
        serving(decode_address, layouts, shared=transport == "shm") as (decode, d),
    ):
        assert decode.greeting.info.transfers[0] == transport
        for turn in range(2):
            for n, prompt in enumerate(prompts):
                wanted = request(f"{turn}-{n}", prompt, temperature=0.0, max_tokens=20)
                first, second = halves(wanted, d, f"t{turn}-{n}")
                decode.submit(second)
                prefill.submit(first)
            for n, prompt in enumerate(prompts):
                id = f"{turn}-{n}"
                ids, finish = expected(prompt, request("x", prompt, max_tokens=20).sampling, layouts, 300)
                assert (decode.finish(id).finish, decode.tokens(id)) == (finish, ids)
                assert prefill.finish(f"{id}-p").finish == "stop"
        assert decode.deltas["0-0"][0].usage.cached_by_tier["pushed"] > 0
        for client in (prefill, decode):
            client.submit(request("rest", [1], max_tokens=1))
            client.finish("rest")
            load = client.steps[-1].load
            assert (load.kv_used_blocks, load.awaiting, load.pushing, load.quarantined) == (0, 0, 0, 0)
