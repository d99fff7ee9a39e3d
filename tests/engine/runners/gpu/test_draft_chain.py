"""Drafts that stay on the device: steps are launched before the host knows what the ones before them have given."""

from hypothesis import given, settings
from hypothesis import strategies as st

from emberline.engine.runners.gpu.draft_chain import CHAIN_DEPTHS, ChainShape
from emberline.kernels.decode_inputs import MAX_DRAFTS
from tests.engine.fakes import VOCAB, expected, mix, request
from tests.engine.runners.cpu.test_torch_runner import FULL, WINDOW, run, tokens
from tests.engine.runners.gpu.test_runner import Padded, loop_of
from tests.engine.speculation.standin import DeviceSpeculation


class StandinChain:
    """In place of a `DraftChain`: leaves in each slot what will follow, with about one token in `wrong` replaced."""

    depths = CHAIN_DEPTHS

    def __init__(self, runner, answers, wrong):
        self.state, self.answers, self.wrong = runner._slots.state, answers, wrong
        self.by_slot, self.slots, self.most = {}, [], 0
        self.drafts = self.state.drafts.new_zeros(64, MAX_DRAFTS)
        launch = runner.launch

        def launch_and_note(plan):
            for admission in plan.admissions:
                self.by_slot[admission.slot] = admission.request
            return launch(plan)

        runner.launch, runner._chain = launch_and_note, self

    def forget(self, slots):
        pass

    def reading(self, slots, drafts=False):
        return None

    def keep_accepted(self, starts, slots, positions):
        pass

    def send(self, slots, n_rows):
        self.slots = slots

    def run(self, shape):
        for row, slot in enumerate(self.slots):
            asked = self.by_slot[slot]
            first = int(self.state.positions[slot]) + 1 - len(asked.prompt_ids) // 4
            right = self.answers[asked.id][first : first + shape.depth]
            for place in range(shape.depth):
                token = right[place] if place < len(right) else 0
                if self.wrong and not mix(first, place) // 3 % self.wrong:
                    token = (token + 1) % VOCAB
                self.state.drafts[slot, place] = self.drafts[row, place] = token
        return self.drafts[: shape.n_rows]


@settings(max_examples=12, deadline=None)
@given(
    wrong=st.sampled_from([0, 1, 2, 5]),
    depth=st.sampled_from(CHAIN_DEPTHS),
    n_blocks=st.sampled_from([9, 12, 40]),
    windowed=st.booleans(),
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 45)), min_size=1, max_size=4),
)
def test_tokens_are_those_without_drafts(wrong, depth, n_blocks, windowed, lengths):
    """Whatever the drafts are, over preemption, prompts that come in between and replies that end within a run."""
    layouts = (FULL, WINDOW) if windowed else (FULL,)
    wanted = {
        f"r{n}": request(f"r{n}", [(n + i * i) % VOCAB for i in range(length)], max_tokens=most, temperature=0.0)
        for n, (length, most) in enumerate(lengths)
    }
    prompts = {f"r{n}": [(n + i * i) % VOCAB for i in range(length)] for n, (length, _) in enumerate(lengths)}
    answers = {id: expected(prompts[id], asked.sampling, layouts, 100)[0] for id, asked in wanted.items()}
    speculation = DeviceSpeculation(depth)
    loop, _ = loop_of(Padded(layouts), n_blocks, False, 2, speculation, context_len=100)
    StandinChain(loop.runner, answers, wrong)
    together = run(loop, *wanted.values())
    assert {id: tokens(deltas) for id, deltas in together.items()} == answers
    for id, asked in wanted.items():  # what was cached is right, too
        assert tokens(run(loop, asked)[id]) == answers[id]


def test_several_tokens_per_step_without_waiting_for_the_host():
    prompt, asked = [3, 1, 4], request("a", [3, 1, 4], max_tokens=60, temperature=0.0)
    answer = expected(prompt, asked.sampling, (FULL,), 200)[0]
    assert len(answer) > 40
    speculation = DeviceSpeculation(4)
    loop, _ = loop_of(Padded(), 40, False, 2, speculation)
    StandinChain(loop.runner, {"a": answer}, 0)
    loop.submit(asked, 0.0)
    most_in_flight = 0
    deltas = []
    while loop.busy:
        deltas += loop.step(0.0)
        most_in_flight = max(most_in_flight, loop.n_in_flight)
    assert tokens(deltas) == answer
    assert speculation.n_ahead > 5
    assert most_in_flight == 1, "one step is in flight when another was just absorbed"
    assert loop.load.steps < len(answer) / 2
    assert speculation.n_accepted > len(answer) / 2


def test_shapes():
    assert ChainShape.of(3, 3, 64) == (4, 4)
    assert ChainShape.of(1, 1, 64) == (1, 1)
    assert ChainShape.of(60, 9, 64) == (64, CHAIN_DEPTHS[-1])
    assert all(ChainShape.of(*shape, 64) == shape for shape in ChainShape.all(64))
