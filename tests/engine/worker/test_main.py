"""The worker process: the same tokens alone, in a batch, from the cache and after preemption; how a start fails."""

import json
import time
from pathlib import Path

import msgspec
import pytest

from emberline.protocol.errors import BadInput
from emberline.protocol.frames import Vocabulary
from emberline.protocol.grammar import Grammar, Text, encode
from emberline.protocol.token_ids import unpack
from emberline.text.text_model import TextModel
from tests.engine.client import Client, LocalEngine, engine, start, wait_until
from tests.engine.fakes import request

WORKER = "emberline.engine.worker"
KV_BYTES = 100_000  # too few for all TEXTS and their replies
TEXTS = (
    "The tides are caused by the gravity of the moon. At high tide the water",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21,",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Once upon a time there was a lighthouse keeper who lived alone on a small island. Every evening he climbed",
)


@pytest.fixture(scope="module")
def text(tiny_model):
    return TextModel.load(tiny_model)


@pytest.fixture(scope="module")
def worker(tiny_model, tmp_path_factory):
    path = tmp_path_factory.mktemp("worker") / "a.sock"
    flags = ("--name", "tiny", "--device", "cpu", "--deterministic", "--token-budget", 64, "--max-running", 8)
    flags += ("--kv-bytes", KV_BYTES, "--threads", 1)
    with engine(WORKER, "--model", tiny_model, "--socket", path, *flags) as (process, address):
        yield process, address


def ask(id, ids, **sampling):
    return request(id, ids, **{"max_tokens": 40, "temperature": 0.0, **sampling})


def test_the_ready_line_and_welcome_describe_the_model(worker):
    with Client(worker[1]) as client:
        info, load = client.greeting.info, client.greeting.load
    assert (info.model, info.vocab_size, info.device) == ("tiny", 260, "cpu")
    assert info.kv_tokens == 16 * load.kv_total_blocks
    assert sum(group.block_bytes for group in info.kv_groups) * (load.kv_total_blocks + 1) <= KV_BYTES
    assert info.context_len == info.kv_tokens < 8192, "the pool bounds the context"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_same_tokens_alone_cached_in_a_batch_and_after_preemption(worker, text, temperature):
    prompts = [unpack(text.encode(each, False)) for each in TEXTS]
    salt = f"{temperature}".encode()
    with Client(worker[1]) as client:
        alone = []
        for n, ids in enumerate(prompts):
            client.submit(ask(f"alone{n}", ids, temperature=temperature, salt=salt, max_tokens=60))
            assert client.finish(f"alone{n}").usage.cached_tokens == 0
            alone.append(client.tokens(f"alone{n}"))
        before = client.steps[-1].load.preemptions
        again = [ask(f"again{n}", ids, temperature=temperature, max_tokens=60) for n, ids in enumerate(prompts)]
        client.submit(*again)
        client.finish(*(each.id for each in again))
        assert client.steps[-1].load.preemptions > before
        assert [client.tokens(each.id) for each in again] == alone
        turn = prompts[3] + alone[3]
        client.submit(ask("before", prompts[3], temperature=temperature, salt=salt, max_tokens=60))
        client.finish("before")
        client.submit(ask("turn", turn, temperature=temperature, salt=salt, max_tokens=8))
        client.finish("turn")
        cold = ask("cold", turn, temperature=temperature, salt=b"another tenant", max_tokens=8)
        client.submit(cold)
        client.finish("cold")
        assert client.deltas["turn"][0].usage.cached_tokens == (len(turn) - 1) // 16 * 16
        assert client.deltas["cold"][0].usage.cached_tokens == 0
        assert client.tokens("turn") == client.tokens("cold")


def test_logprobs_bias_and_bans(worker, text):
    ids = unpack(text.encode(TEXTS[0], False))
    with Client(worker[1]) as client:
        client.submit(
            ask("plain", ids, logprobs=3, max_tokens=2),
            ask("biased", ids, logit_bias={100: 1000.0}, max_tokens=2),
            ask("repeats", ids, logit_bias={100: 1000.0}, presence_penalty=2000.0, max_tokens=2),
        )
        client.finish("plain", "biased", "repeats")
        [chosen] = client.deltas["plain"][0].logprobs
        assert chosen.token_id == client.tokens("plain")[0] == chosen.top[0][0]
        assert len(chosen.top) == 3
        assert chosen.logprob == pytest.approx(chosen.top[0][1])
        assert client.tokens("biased") == [100, 100]
        assert client.tokens("repeats")[0] == 100 != client.tokens("repeats")[1]


def test_a_vocabulary_that_differs_is_not_listened_to(worker, text):
    with Client(worker[1]) as client, Client(worker[1]) as other:
        client.set_vocabulary(text.vocabulary)
        structured = msgspec.structs.replace(ask("yes", [1, 2, 3]), grammar=encode(Grammar((Text("yes"),))))
        client.submit(structured)
        client.finish("yes")
        assert text.decode(client.tokens("yes")) == "yes"
        words = Vocabulary(list(text.vocabulary.tokens), text.vocabulary.special)
        words.tokens[100], words.tokens[200] = words.tokens[200], words.tokens[100]
        other.set_vocabulary(words)
        with pytest.raises(ConnectionError):
            receive_all(other)


def receive_all(client):
    while True:
        client.receive()


def test_idle_costs_no_cpu(worker):
    process, address = worker
    with Client(address) as client:
        client.submit(ask("a", [1, 2, 3], max_tokens=3))
        client.finish("a")

        def cpu_ticks():
            fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            return int(fields[11]) + int(fields[12])

        def is_idle():
            before = cpu_ticks()
            time.sleep(0.5)
            return cpu_ticks() <= before + 1  # of a hundredth of a second: a thread wakes once a second

        wait_until(is_idle)  # what follows a request, and another test, may take a while on a busy machine


@pytest.mark.parametrize(
    ("flags", "reason"),
    [(("--kv-bytes", 1000), "hold no sequence"), (("--token-budget", 4), "must be at least --max-running")],
)
def test_bad_flags_are_refused(tiny_model, flags, reason):
    with pytest.raises(BadInput, match=reason):
        LocalEngine(tiny_model, *flags)


@pytest.mark.parametrize(
    ("model", "device", "reason"), [("any", "abacus", "not abacus"), ("nothing.gguf", "cpu", "nothing.gguf")]
)
def test_a_failed_start_reports_its_reason(tmp_path, model, device, reason):
    flags = ("--model", tmp_path / model, "--device", device)
    process, ready = start(WORKER, "--socket", tmp_path / "a.sock", *flags)
    assert ready["ready"] is False
    assert reason in ready["error"]
    assert process.wait(60) == 1
    assert any(json.loads(line)["level"] == "error" for line in process.stderr.read().splitlines())
    process.communicate()
