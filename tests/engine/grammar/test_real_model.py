"""Replies of the real model: sensible text, and structured replies that end, valid, where the model alone would not."""

import json

import pytest

from emberline.protocol.grammar import Grammar, Text, encode
from emberline.protocol.request import EngineRequest, Message, SamplingParams
from emberline.text.text_model import TextModel
from tests.engine.client import LocalEngine
from tests.engine.grammar.samples import JSON, LINKED, NUMBERS, PERSON

ASKS = {
    "numbers": (NUMBERS, "List all prime numbers as a JSON array."),
    "linked": (LINKED, "Write a linked list of the numbers from 1 to 100 as nested JSON objects."),
    "person": (PERSON, "Invent a person. Reply in JSON."),
    "json": (JSON, "Reply with a large JSON document about the solar system."),
}


@pytest.fixture(scope="module")
def text(smollm2):
    return TextModel.load(smollm2)


@pytest.fixture(scope="module")
def engine(smollm2, text):
    flags = ("--deterministic", "--token-budget", 64, "--max-running", 8, "--kv-bytes", 6 << 20)
    local = LocalEngine(smollm2, *flags)
    local.set_vocabulary(text.vocabulary)
    return local


@pytest.fixture
def client(engine):
    engine.deltas.clear()  # of another test
    return engine


def request(id, text, name, salt=b"", **sampling):
    grammar, ask = ASKS[name]
    return EngineRequest(
        id=id,
        prompt_ids=text.encode(text.render([Message("user", ask)]), special=True),
        sampling=SamplingParams(**{"max_tokens": 60, "temperature": 0.0, "seed": 7, **sampling}),
        grammar=encode(grammar),
        salt=salt,
    )


def reply(client, text, id):
    return text.decode(client.tokens(id))


def test_greedy_text_is_sensible(client, text):
    counting = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21,"
    sampling = SamplingParams(max_tokens=6, temperature=0.0)
    client.submit(EngineRequest(id="count", prompt_ids=text.encode(counting, False), sampling=sampling))
    client.finish("count")
    assert reply(client, text, "count").startswith(" 22,")


@pytest.mark.parametrize(("temperature", "n_seeds"), [(0.0, 1), (1.0, 2)])
def test_replies_end_valid_within_max_tokens(client, text, temperature, n_seeds):
    ids = [f"{name} {n}" for name in ASKS for n in range(n_seeds)]
    client.submit(*(request(id, text, id.split()[0], temperature=temperature, seed=int(id[-1])) for id in ids))
    client.finish(*ids)
    for id in ids:
        last = client.deltas[id][-1]
        assert last.error is None
        assert last.usage.completion_tokens == len(client.tokens(id)) <= 60
        parsed = json.loads(reply(client, text, id))
        if id.startswith("numbers"):
            assert isinstance(parsed, list)
            assert all(isinstance(n, int | float) for n in parsed)
        if id.startswith("linked"):
            while parsed is not None:
                assert set(parsed) == {"value", "next"}
                parsed = parsed["next"]
        if id.startswith("person"):
            assert parsed["role"] in ("admin", "user", "userland")
    assert all(client.deltas[id][-1].finish == "stop" for id in ids if not id.startswith("json"))


@pytest.mark.slow
def test_the_same_tokens_alone_in_a_batch_and_after_preemption(client, text):
    names = list(ASKS) * 3
    salted = {f"{way} {n}": (name, way.encode()) for way in ("alone", "batch") for n, name in enumerate(names)}
    made = {
        id: request(id, text, name, salt, max_tokens=120, temperature=1.0, seed=int(id.split()[1]))
        for id, (name, salt) in salted.items()
    }
    for id in (id for id in made if id.startswith("alone")):
        client.submit(made[id])
        client.finish(id)
    before = client.loop.load.preemptions
    together = [id for id in made if id.startswith("batch")]
    client.submit(*(made[id] for id in together))
    client.finish(*together)
    assert client.loop.load.preemptions > before, "the cache is small"
    for n in range(len(names)):
        assert client.tokens(f"alone {n}") == client.tokens(f"batch {n}")


def test_a_bad_grammar_and_a_small_one(text, client):
    bad = EngineRequest(id="bad", prompt_ids=b"\1\0\0\0", sampling=SamplingParams(), grammar=b"no grammar")
    client.submit(bad, request("good", text, "numbers"))
    assert client.finish("good", "bad").error.param == "grammar"
    json.loads(reply(client, text, "good"))
    small = EngineRequest(
        id="yes", prompt_ids=b"\1\0\0\0", sampling=SamplingParams(), grammar=encode(Grammar((Text("yes"),)))
    )
    client.submit(small)
    client.finish("yes")
    assert reply(client, text, "yes") == "yes"
