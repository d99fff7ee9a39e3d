"""The parts that decode whole replies, each for one value of `--speculation`. Figures of two settings are compared by
`__main__`."""

import random
import statistics
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from benchmarks.gpu.large_models import Deadline
from benchmarks.gpu.speculation import verification
from benchmarks.gpu.speculation.engine import Decoded, Engine, Work
from benchmarks.gpu.speculation.inputs import Inputs, Recorded, ToolCall
from benchmarks.gpu.speculation.verification import Sizes

FEW = 24  # recorded requests that are replayed one at a time
CODER_ROUNDS = 3  # each as an account of its own: suffix decoding knows nothing of the rounds before
N_WORDS = (10_000, 50)  # of random replies: nothing to draft, and drafts that are found and always wrong


class Setup(NamedTuple):
    """What is measured with."""

    model: Path  # of Llama 8B's shape
    chat_model: Path | None  # the default model's file; None: it is pulled
    draft_head: Path | None  # of the chat model; None: the one that comes with the package
    inputs: Inputs | None
    device: str = "cuda"
    quick: bool = False
    coder: Path = Path()  # of Qwen2.5-Coder-1.5B's shape


class NoInputs(Exception):
    """The part needs what the file with its inputs does not have."""


def _inputs(setup: Setup) -> Inputs:
    if setup.inputs is None:
        raise NoInputs("needs a file with token ids: see --make")
    return setup.inputs


def verify(setup: Setup, setting: str, deadline: Deadline, figures: Any) -> None:
    sizes = Sizes(batches=(1, 2), contexts=(64,), drafts=(0, 1, 2), n_steps=4) if setup.quick else Sizes()
    if setting == "attention":
        verification.measure_attention(sizes, deadline, figures)
        return
    verification.measure(setup.model, setup.device, sizes, deadline, figures)


def tools(setup: Setup, setting: str, deadline: Deadline, figures: Any) -> None:
    """Recorded tool calls with their grammars, one after the other."""
    inputs = _inputs(setup)
    calls = inputs.calls[: 4 if setup.quick else None]
    engine = Engine(setup.model, setting, setup.device, 16)
    engine.loop.set_vocabulary(inputs.vocabulary)
    for request, reply in calls[:2]:  # compiles the grammar, and caches the prompt that all calls share
        engine.run([Work(request, reply)], 1)
    n_tokens, n_steps, seconds, n_calls = 0, 0, 0.0, 0
    for request, reply in calls:
        if deadline.passed:
            break
        done = engine.run([Work(request, reply)], 1)
        n_tokens, n_steps, seconds = n_tokens + done.n_tokens, n_steps + done.n_steps, seconds + done.seconds
        n_calls += 1
    figures.put("calls", n_calls)
    figures.put("tokens_per_s", {"1": n_tokens / seconds})
    figures.put("tokens_per_step", n_tokens / n_steps)
    figures.put("drafts", engine.drafts())
    assert (engine.n_drafted > 0) == (setting != "off"), f"{engine.n_drafted} draft tokens with {setting}"


def coder(setup: Setup, setting: str, deadline: Deadline, figures: Any) -> None:
    """The session of a coding agent with its grammars, request by request. Each round is as new to suffix decoding as
    the session was to the server."""
    session = _inputs(setup).coder
    if session is None:
        raise NoInputs("the file with token ids was made without --coder-model")
    requests = session.requests[: 3 if setup.quick else None]
    engine = Engine(setup.coder, setting, setup.device, 1)
    engine.loop.set_vocabulary(session.vocabulary)
    engine.run([_coder_work(requests[0], b"warm up", most=1)], 1)  # compiles the grammar
    rounds = list[Decoded]()
    for number in range(1 if setup.quick else CODER_ROUNDS):
        if deadline.passed:
            break
        found = [engine.run([_coder_work(each, b"round %d" % number)], 1) for each in requests]
        rounds.append(Decoded(*map(sum, zip(*found, strict=True))))
        figures.put("tokens_per_s", {"1": statistics.median(each.tokens_per_s for each in rounds)})
        figures.put("rounds", [each.tokens_per_s for each in rounds])
        figures.put("tokens_per_step", [each.n_tokens / each.n_steps for each in rounds])
        figures.put("drafts", engine.drafts())
    figures.put("requests", len(requests))
    figures.put("tokens", rounds[0].n_tokens)
    figures.put("untimed_tokens", rounds[0].n_untimed)
    assert (engine.n_drafted > 0) == (setting != "off"), f"{engine.n_drafted} draft tokens with {setting}"


def _coder_work(call: ToolCall, salt: bytes, most: int | None = None) -> Work:
    request, reply = call
    replace = msgspec.structs.replace
    sampling = request.sampling if most is None else replace(request.sampling, max_tokens=most)
    return Work(replace(request, id=f"{request.id} {salt.decode()}", salt=salt, sampling=sampling), reply)


def auto(setup: Setup, setting: str, deadline: Deadline, figures: Any) -> None:
    """Replies that no draft fits, and recorded ones where there are any, at every batch size."""
    batches = (1, 4) if setup.quick else (1, 4, 16, 32, 64, 128, 256)
    length, repeats = (12, 2) if setup.quick else (128, 3)
    engine = Engine(setup.model, setting, setup.device, max(batches))
    rates: dict[str, float] = {}
    for n_words in N_WORDS:
        rng = random.Random(n_words)
        words = rng.sample(range(100, engine.info.vocab_size - 100), min(n_words, engine.info.vocab_size // 2))
        for batch in batches:
            if deadline.passed:
                break
            found = []
            for _ in range(1 + repeats):  # other ones every time: suffix decoding remembers replies
                drawn = [(rng.choices(words, k=100), rng.choices(words, k=length)) for _ in range(batch)]
                found.append(engine.run([engine.work(*each) for each in drawn], batch).tokens_per_s)
            rates[f"random tokens of {n_words}, batch {batch}"] = statistics.median(found[1:])
            figures.put("tokens_per_s", rates)
    recorded = [] if setup.inputs is None else setup.inputs.recorded
    for batch in (each for each in batches if recorded and each <= len(recorded) // 2):
        if deadline.passed:
            break
        rates[f"recorded, batch {batch}"] = _replay(engine, recorded, batch)
        figures.put("tokens_per_s", rates)
    figures.put("drafts", engine.drafts())


def head(setup: Setup, setting: str, deadline: Deadline, figures: Any) -> None:
    """Greedy replies of the chat model to prompts that no head was trained with; computed and drawn in earnest."""
    inputs = _inputs(setup)
    model = setup.chat_model
    if model is None:
        from benchmarks.emberline_contender import default_gguf

        model = default_gguf()
    batches, n_prompts, most = ((1, 2), 4, 8) if setup.quick else ((1, 8, 32), len(inputs.chats), 256)
    given = setting != "off" and setup.draft_head is not None
    flags = ["--draft-head", str(setup.draft_head)] if given else []
    engine = Engine(model, setting, setup.device, max(batches), *flags)
    chats = inputs.chats[:n_prompts]
    engine.run([engine.work(chat, most=1) for chat in chats], max(batches))  # caches the prompts
    rates: dict[str, float] = {}
    for batch in batches:
        if deadline.passed:
            break
        engine.run([engine.work(chat, most=min(most, 32)) for chat in chats[:batch]], batch)  # lets the policy learn
        before = _totals(engine)
        done = engine.run([engine.work(chat, most=most) for chat in chats], batch)
        drafted, accepted = (now - then for now, then in zip(_totals(engine), before, strict=True))
        rates[str(batch)] = done.tokens_per_s
        figures.put("tokens_per_s", rates)
        figures.put(
            f"batch {batch}",
            {
                "tokens": done.n_tokens,
                "steps": done.n_steps,
                "drafted": drafted,
                "accepted": accepted,
                "tokens_per_row_and_step": done.n_tokens / max(1, done.n_tokens - accepted),
            },
        )
    figures.put("drafts", engine.drafts())
    assert (engine.n_drafted > 0) == (setting != "off"), f"{engine.n_drafted} draft tokens with {setting}"


def replies(setup: Setup, setting: str, deadline: Deadline, figures: Any) -> None:
    """Recorded replies of agents."""
    recorded = _inputs(setup).recorded
    if not recorded:
        raise NoInputs("the file with token ids was made without --trace")
    batches = (1, 2) if setup.quick else (1, 16)
    engine = Engine(setup.model, setting, setup.device, max(batches))
    engine.run([engine.work(each.prompt, each.reply, most=1) for each in recorded], max(batches))  # caches the prompts
    rates: dict[str, float] = {}
    for batch in batches:
        if deadline.passed:
            break
        rates[str(batch)] = _replay(engine, recorded, batch)
        figures.put("tokens_per_s", rates)
    figures.put("drafts", engine.drafts())


def asked_for(recorded: list[Recorded], batch: int) -> list[Recorded]:
    return recorded[:FEW] if batch == 1 else recorded


def _replay(engine: Engine, recorded: list[Recorded], batch: int) -> float:
    return engine.run([engine.work(*each) for each in asked_for(recorded, batch)], batch).tokens_per_s


def _totals(engine: Engine) -> tuple[int, int]:
    found = engine.drafts().values()
    return sum(sum(each["drafted"]) for each in found), sum(sum(each["accepted"]) for each in found)
