"""Stand-ins for drafters: right, wrong, or partly right drafts of any length, decided by a hash."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from msgspec import structs

from emberline.engine.core.feature import Speculation
from emberline.engine.core.plan import UNKNOWN_DRAFT, DeviceLost, known_tokens
from emberline.engine.speculation.head_drafter import HeadDrafter
from emberline.protocol.request import SamplingParams
from emberline.protocol.token_ids import pack, unpack
from tests.engine.fakes import VOCAB, Drawn, LateHandle, LateRunner, expected, mix


@dataclass
class StandinDraft:
    speculation: "StandinSpeculation"
    seq: Any

    def take(self, most):
        seq, speculation = self.seq, self.speculation
        if seq.n_sampling and speculation.runs_ahead:
            return UNKNOWN_DRAFT * speculation.propose_ahead(seq, min(most, speculation.depth))
        return speculation.propose(seq, most + seq.n_sampling)[4 * seq.n_sampling :]


class StandinSpeculation(Speculation):
    """Proposes what `oracle(seq)` says will follow, with about one token in `wrong` replaced; 0: none, 1: all."""

    def __init__(self, oracle, wrong=0, vocab=7, most=15):
        self.oracle, self.wrong, self.vocab, self.most = oracle, wrong, vocab, most
        self.n_drafted = self.n_accepted = self.n_verified = self.n_appended = 0
        self.ended_ids = []

    drafts = True

    def draft(self, seqs):
        return {seq.number: StandinDraft(self, seq) for seq in seqs}

    def propose(self, seq, n):
        state = mix(seq.number, len(seq.ids))
        if not state % 5:
            return b""
        ids = self.oracle(seq)[: 1 + mix(state, 3) % min(n, self.most)]
        for place, token in enumerate(ids):
            if self.wrong and not mix(state, place) // 3 % self.wrong:
                ids[place] = (token + 1 + state % (self.vocab - 1)) % self.vocab
        return pack(ids)

    def verified(self, seq, n_drafted, n_accepted):
        assert 0 <= n_accepted <= n_drafted > 0
        self.n_verified += 1
        self.n_drafted += n_drafted
        self.n_accepted += n_accepted

    def appended(self, seq, n):
        self.n_appended += n

    def leave(self, seq):
        self.ended_ids.append(seq.id)


def output_of(seq):
    """The tokens that a sequence has so far."""
    return unpack(bytes(seq.ids[4 * seq.n_prompt :]))


class DeviceSpeculation(StandinSpeculation):
    """As a draft head on the device: it drafts by itself in every step, and the host asks for so many tokens of it."""

    runs_ahead = True

    def __init__(self, depth):
        super().__init__(lambda seq: [])
        self.depth, self.n_ahead, self.head = depth, 0, HeadDrafter()

    def begin_step(self, n_running):
        return self.depth

    def propose(self, seq, n):
        at, ids = self.head.proposal(seq.number)
        return ids[: 4 * n] if at == seq.n_tokens else b""

    def take_drafts(self, plan, sampled, drafts):
        assert self.head.take(self.core, plan, sampled, drafts)

    def propose_ahead(self, seq, n):
        self.n_ahead += 1
        return n


@dataclass
class DraftingHandle(LateHandle):
    drafts: Callable[[], list]

    def result(self):
        try:
            return super().result()
        except AssertionError as error:
            raise DeviceLost(f"what no device could do: {error}") from error  # the step loop does not retry it


class DraftingRunner(LateRunner):
    """A fake device with a draft head, right but for about one token in `wrong`: drafts and the position of a row
    whose predecessor is in flight are its own knowledge."""

    def __init__(self, cache, wrong=0, context_len=120):
        super().__init__(cache)
        self.wrong, self.context_len = wrong, context_len
        self.ends = {}  # by slot: the position of its next token
        self.proposed = {}  # by slot
        self.answers = {}  # by request id

    def launch(self, plan):
        def drafts():
            return [self.proposed[row.slot][: 4 * plan.depth] for row in plan.rows if row.samples]

        return DraftingHandle(super().launch(plan).compute, drafts)

    def _row(self, row):
        if row.n_ahead:
            assert row.start - row.n_ahead <= self.ends[row.slot] <= row.start
            row = structs.replace(row, start=self.ends[row.slot])
        unknown = row.draft_ids.startswith(UNKNOWN_DRAFT)
        if unknown:
            row = structs.replace(row, draft_ids=self.proposed[row.slot][: len(row.draft_ids)])
        drawn = super()._row(row)
        if row.samples:
            n_known = 1 if row.follows else len(row.token_ids) // 4
            n_drawn = len(known_tokens(row, drawn)) - len(row.token_ids) // 4
            if unknown:  # the host cannot tell which draws follow wrong drafts
                drawn[n_drawn:] = [Drawn(-1)] * (len(drawn) - n_drawn)
            self.ends[row.slot] = row.start + n_known + n_drawn - 1
            self.proposed[row.slot] = pack(self._propose(row.slot))
        return drawn

    def _propose(self, slot, most=15):
        asked, end = self.requests[slot], self.ends[slot]
        prompt = unpack(asked.prompt_ids)
        if asked.id not in self.answers:
            sampling = SamplingParams(ignore_eos=True, max_tokens=asked.sampling.max_tokens)
            self.answers[asked.id] = expected(prompt, sampling, self.layouts, self.context_len, salt=asked.salt)[0]
        state, first = mix(end, len(prompt)), end + 1 - len(prompt)
        ids = (self.answers[asked.id] + [0] * most)[first:][:most]
        return [
            (token + 1) % VOCAB if self.wrong and not mix(state, place) // 3 % self.wrong else token
            for place, token in enumerate(ids)
        ]
