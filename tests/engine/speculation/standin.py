"""Stand-ins for drafters: right, wrong, or partly right drafts of any length, decided by a hash."""

from emberline.protocol.token_ids import pack, unpack
from tests.engine.fakes import mix


class StandinSpeculation:
    """Proposes what `oracle(seq)` says will follow, with about one token in `wrong` replaced; 0: none, 1: all."""

    def __init__(self, oracle, wrong=0, vocab=7, most=15):
        self.oracle, self.wrong, self.vocab, self.most = oracle, wrong, vocab, most
        self.n_drafted = self.n_accepted = self.n_verified = self.n_appended = 0
        self.ended_ids = []

    drafts, runs_ahead = True, False

    def begin_step(self, n_running):
        return 0

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

    stats = ()

    def measured(self, plan, seconds):
        pass

    def launched(self):
        pass

    def appended(self, seq, n):
        self.n_appended += n

    def ended(self, seq):
        self.ended_ids.append(seq.id)


def output_of(seq):
    """The tokens that a sequence has so far."""
    return unpack(bytes(seq.ids[4 * seq.n_prompt :]))
