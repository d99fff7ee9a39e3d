"""Prefill/decode disaggregation of worker processes: the tokens of one engine, by shared memory and by TCP."""

import random

import msgspec
import pytest

from emberline.protocol.frames import transfer_ticket
from emberline.protocol.request import EngineRequest, Push, SamplingParams
from emberline.protocol.token_ids import unpack
from emberline.text.text_model import TextModel
from tests.engine.client import Client, LocalEngine, engine
from tests.engine.grammar.test_real_model import request as structured

WORKER = "tests.engine.transfer.patient_worker"
STORY = (
    "Once upon a time there was a lighthouse keeper who lived alone on a small island. Every evening he climbed the "
    "stairs and lit the lamp, and every morning he put it out again. One day a ship came by that nobody had expected, "
)


def halves(request, address, transfer, token="secret", ranks=()):
    """The request for the prefill engine, and the one for the decode engine."""
    prefill = EngineRequest(
        id=f"{request.id}-p",
        prompt_ids=request.prompt_ids,
        sampling=SamplingParams(max_tokens=1),
        salt=request.salt,
        session=request.session,
        keys=request.keys,
        push=Push(transfer=transfer, address=address, ticket=transfer_ticket(token, "sender"), ranks=ranks),
    )
    return prefill, msgspec.structs.replace(request, awaits=transfer)


@pytest.fixture(scope="module")
def text(tiny_model):
    return TextModel.load(tiny_model)


@pytest.fixture(scope="module", params=["shm", pytest.param("tcp", marks=pytest.mark.slow)])
def engines(request, tiny_model, tmp_path_factory):
    """The addresses of a prefill engine and a decode engine, and an engine in this process with both roles."""
    folder = tmp_path_factory.mktemp("handover")
    both = ("--deterministic", "--token-budget", 64, "--kv-bytes", 16 << 20, "--max-running", 8)
    flags = ("--model", tiny_model, "--device", "cpu", "--threads", 1, *both)
    decode = folder / "decode.sock" if request.param == "shm" else "tcp:127.0.0.1:0"
    with (
        engine(WORKER, *flags, "--socket", folder / "prefill.sock", "--role", "prefill", "--id", "p") as (_, prefill),
        engine(WORKER, *flags, "--socket", decode, "--role", "decode", "--id", "d") as (_, decode_address),
    ):
        yield prefill, decode_address, LocalEngine(tiny_model, *both)


class Trio:
    def __init__(self, engines):
        self.decode_address = engines[1]
        self.prefill, self.decode, self.both = Client(engines[0]), Client(engines[1]), engines[2]
        self.both.deltas.clear()  # of another trio

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for client in (self.prefill, self.decode):
            client.close()

    def transfer_kv(self, *requests, transfer="t"):
        """Each request over two engines, and on one engine alone."""
        pairs = [halves(each, self.decode_address, f"{transfer}-{each.id}") for each in requests]
        self.decode.submit(*(second for _, second in pairs))
        self.prefill.submit(*(first for first, _ in pairs))
        self.both.submit(*requests)
        self.decode.finish(*(each.id for each in requests))
        self.prefill.finish(*(f"{each.id}-p" for each in requests))
        self.both.finish(*(each.id for each in requests))
        for each in requests:
            assert self.decode.deltas[each.id][-1].error is None
            end = self.prefill.deltas[f"{each.id}-p"][-1]
            assert (end.finish, end.usage.completion_tokens) == ("stop", 0)
            assert self.decode.tokens(each.id) == self.both.tokens(each.id)

    def assert_idle(self):
        """No block is held after the transfers."""
        for client in (self.prefill, self.decode):
            client.submit(EngineRequest(id="last", prompt_ids=b"\1\0\0\0", sampling=SamplingParams(max_tokens=1)))
            client.finish("last")
            load = client.steps[-1].load
            assert (load.running, load.waiting, load.awaiting, load.pushing) == (0, 0, 0, 0)
            assert (load.kv_used_blocks, load.quarantined, load.waiting_tokens) == (0, 0, 0)
            del client.deltas["last"]


def ask(id, ids, salt, **sampling):
    ids = ids if isinstance(ids, bytes) else b"".join(n.to_bytes(4, "little") for n in ids)
    return EngineRequest(
        id=id, prompt_ids=ids, salt=salt, sampling=SamplingParams(**{"max_tokens": 12, "temperature": 0.0, **sampling})
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_same_tokens_as_one_engine(engines, temperature):
    salt = f"{temperature}".encode()
    rng = random.Random(8)
    ids = [rng.randrange(256) for _ in range(400)]  # random: the output is sensitive to every token
    how = {"temperature": temperature, "seed": 5}
    with Trio(engines) as trio:
        info = trio.decode.greeting.info
        assert info.role == "decode"
        assert info.transfers[0] == ("tcp" if trio.decode_address.startswith("tcp") else "shm")
        trio.transfer_kv(ask("cold", ids[:200], salt, **how))
        assert trio.prefill.deltas["cold-p"][0].usage.cached_by_tier == {"device": 0}
        assert trio.decode.deltas["cold"][0].usage.cached_by_tier == {"device": 0, "pushed": 192}
        trio.transfer_kv(ask("both know it", ids[:230], salt, **how))
        assert trio.prefill.deltas["both know it-p"][-1].usage.cached_by_tier == {"device": 192}
        assert trio.decode.deltas["both know it"][0].usage.cached_by_tier == {"device": 192, "pushed": 32}
        trio.decode.submit(ask("its own", ids[100:300], salt, **how))
        trio.decode.finish("its own")
        trio.transfer_kv(ask("decode knows it", ids[100:330], salt, **how))
        assert trio.decode.deltas["decode knows it"][0].usage.cached_by_tier == {"device": 192, "pushed": 32}
        trio.prefill.submit(ask("p's own", ids[50:300], salt, **how))
        trio.prefill.finish("p's own")
        trio.transfer_kv(ask("prefill knows it", ids[50:298], salt, **how))
        assert trio.prefill.deltas["prefill knows it-p"][-1].usage.cached_by_tier == {"device": 240}
        trio.transfer_kv(ask("nothing to move", ids[:16], salt, **how), ask("one block", ids[:17], salt + b"1", **how))
        trio.transfer_kv(ask("all there", ids[:200], salt, **how))
        trio.assert_idle()


def test_concurrent_transfers(engines, text):
    ids = unpack(text.encode(STORY * 8, False))
    wanted = [ask(f"{n}", ids[7 * n : 100 + 40 * n], b"several", temperature=n % 2, seed=n) for n in range(8)]
    with Trio(engines) as trio:
        trio.transfer_kv(*wanted, transfer="several")
        trio.assert_idle()


def test_grammar_and_penalties_apply_after_a_transfer(engines, text):
    with Trio(engines) as trio:
        for client in (trio.decode, trio.both):
            client.set_vocabulary(text.vocabulary)
        ids = text.encode(STORY * 2, False)
        trio.transfer_kv(
            structured("bound", text, "linked", salt=b"g", temperature=1.0),
            ask("bent", ids, b"g", temperature=0.7, seed=2, frequency_penalty=0.5, repetition_penalty=1.3),
            transfer="grammar",
        )
        trio.assert_idle()
