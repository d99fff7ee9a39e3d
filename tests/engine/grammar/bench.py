"""A scheduler with the real grammars and a runner that draws what a taste prefers among what a mask allows."""

import time
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

import numpy as np

from emberline.engine.core.limits import Limits
from emberline.engine.core.step_loop import StepLoop
from emberline.engine.grammar.compiler import MatcherCompiler
from emberline.engine.grammar.grammar_automaton import Automaton
from emberline.engine.grammar.guide_jobs import GuideThreads, GuideTimings
from emberline.engine.grammar.guided_decoding import GuidedDecoding
from emberline.engine.worker.build import build_scheduler
from emberline.kv.cache import KVCache
from emberline.protocol.grammar import encode
from emberline.protocol.request import EngineRequest, SamplingParams, ThinkingLimit
from emberline.protocol.token_ids import pack, unpack
from tests.engine.fakes import FULL
from tests.engine.grammar.samples import ALL, END_ID, WORDS, frame

VOCAB = 302
PATIENT = {"step_wait_s": 60.0, "slow_cpu_s": 60.0}  # steps wait for grammars however busy the machine is
TASTES = {
    "digits": b"0123456789.,-",
    "strings": b'"abc \\xyz',
    "nesting": b'[{":abc,',
    "calls": b'<call>{f:"12',
    "none": b"",
}


@dataclass
class Drawn:
    token_id: int
    logprob: float = -1.0
    top: list = field(default_factory=list)


class Taste:
    """Draws by a hash of request and position: the same alone, in a batch and after preemption."""

    def __init__(self, vocab=VOCAB):
        self.vocab = vocab
        self.requests = {}
        self.rows = []
        self.steps = 0

    def launch(self, plan):
        self.steps += 1
        for admission in plan.admissions:
            self.requests[admission.slot] = admission.request
        return _Handle(self, [row for row in plan.rows if row.samples])

    def draw(self, row, allowed, position=None):
        request = self.requests[row.slot]
        name, _, seed = (request.session or "none:0").partition(":")
        rng = np.random.default_rng([row.end if position is None else position, int(seed)])
        taste = set(TASTES[name])
        liked = [t for t in allowed if t in taste and t not in row.banned]
        if liked and rng.random() < 0.9:
            return int(rng.choice(liked))
        return int(rng.choice([t for t in allowed if t not in row.banned]))


class _Handle:
    def __init__(self, runner, rows):
        self.runner, self.rows, self.drawn = runner, rows, []

    def sample(self, masks=None):
        bits = dict(zip(masks.rows, masks.bits)) if masks is not None else {}
        draws = [(row, row.end + n) for row in self.rows for n in range(1 + row.n_drafts)]
        for place, (row, position) in enumerate(draws):
            allowed = range(self.runner.vocab)
            if place in bits:
                mask = np.unpackbits(bits[place].view(np.uint8), bitorder="little")[: self.runner.vocab]
                allowed = mask.nonzero()[0].tolist()
            if position == row.end:
                self.drawn.append(Drawn(self.runner.draw(row, allowed)))
            else:
                self.drawn.append(Drawn(self.runner.draw(row, allowed, position) if allowed else -1))

    def result(self):
        return self.drawn


@contextmanager
def compiler(vocab_size=VOCAB, vocabulary=None, **bounds):
    """A compiler of grammars that knows a vocabulary, that of the samples unless another is given. It ends with the
    block: its thread and its process do not outlive the test."""
    made = MatcherCompiler(vocab_size, **bounds)
    made.learn(frame(WORDS) if vocabulary is None else vocabulary)
    with closing(made):
        yield made


class Bench:
    def __init__(
        self,
        n_blocks=200,
        max_running=4,
        token_budget=64,
        grammars=None,
        runner=None,
        speculation=None,
        in_flight=1,
        micro_batches=1,
        threads=GuideThreads,
        **timings,
    ):
        """`grammars` None: those of requests are ignored. `timings`: fields of GuideTimings."""
        cache = KVCache((FULL,), [n_blocks], chunk=token_budget)
        limits = Limits(min(2000, cache.capacity), VOCAB, (END_ID,), max_running, token_budget)
        self.cache = cache
        self.scheduler = build_scheduler(
            cache,
            limits,
            "fake",
            grammars,
            speculation=speculation,
            micro_batches=micro_batches,
            guide_threads=threads(GuideTimings(**timings)),
        )
        self.guided = None if grammars is None else self.scheduler.feature(GuidedDecoding)
        self.runner = runner or Taste()
        self.loop = StepLoop(self.scheduler, self.runner, in_flight)
        self.deltas = {}

    def submit(self, id, grammar, taste="none", prompt=(1, 2, 3), thinking=None, priority=1, **sampling):
        request = EngineRequest(
            id=id,
            prompt_ids=pack(prompt),
            sampling=SamplingParams(**{"max_tokens": 40, "seed": 1, **sampling}),
            priority=priority,
            session=taste if ":" in taste else f"{taste}:1",
            grammar=encode(ALL[grammar] if isinstance(grammar, str) else grammar) if grammar else b"",
            thinking_limit=None if thinking is None else ThinkingLimit(thinking[0], thinking[1], pack(thinking[2])),
        )
        self.scheduler.submit(request, 0.0)

    def step(self):
        for delta in self.loop.step(0.0):
            self.deltas.setdefault(delta.id, []).append(delta)

    def finish(self, limit_s=60.0):
        give_up = time.monotonic() + limit_s
        while self.loop.busy:
            assert time.monotonic() < give_up, "it never ends"
            if self.loop.blocked:
                time.sleep(0.0005)
            self.step()
        return self

    def tokens(self, id):
        return [token for delta in self.deltas[id] for token in unpack(delta.token_ids)]

    def end(self, id):
        return self.deltas[id][-1]


def valid(grammar, tokens, prefix=False):
    """Whether tokens (an end token aside) match a grammar."""
    automaton = Automaton(grammar)
    tokens = tokens[:-1] if tokens and tokens[-1] == END_ID else tokens
    words, state = frame(WORDS), automaton.start
    for token in tokens:
        state = automaton.token(state, token) if token in words.special else automaton.feed(state, words.tokens[token])
    return state.cost < 1 << 59 if prefix else state.cost == 0


def text(tokens):
    words = frame(WORDS)
    return b"".join(words.special.get(t, "").encode() or words.tokens[t] for t in tokens).decode(errors="replace")
