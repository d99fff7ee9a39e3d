"""The load report, which the scheduler keeps as counters and arrays, against sums over all sequences."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emberline.protocol.request import Priority
from tests.engine.core.test_scheduler_properties import InvariantChecker, arrivals, play, setups
from tests.engine.fakes import LateRunner
from tests.engine.speculation.test_verification import Repeating
from tests.examples import n_examples


class LoadChecker(InvariantChecker):
    """Checks the load report after every step."""

    def check_blocks(self):
        super().check_blocks()
        sequences, load = self.scheduler.snapshot(), self.scheduler.load()
        running, waiting = ([seq for seq in sequences if seq.state == state] for state in ("running", "waiting"))
        n_left = [len(seq.ids) // 4 - seq.n_computed for seq in running]
        n_prefill = sum(n - 1 for n in n_left if n > 1)  # the last token of a prompt is computed with the first draw
        assert load.waiting_tokens == sum(len(seq.ids) // 4 for seq in waiting) + n_prefill
        assert (load.running, load.waiting) == (len(running), len(waiting))
        batch = [[seq.effective_class == Priority.BATCH for seq in each] for each in (running, waiting)]
        assert [load.running_batch, load.waiting_batch] == list(map(sum, batch))


@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafts"])
@settings(max_examples=n_examples(40), deadline=None)
@given(st.lists(arrivals, min_size=1, max_size=9), setups, st.integers(1, 3), st.sets(st.integers(0, 80), max_size=4))
def test_the_load_report_is_the_sum_over_all_sequences(drafts, crowd, setup, steps_in_flight, failing):
    speculation = Repeating() if drafts else None
    play(LoadChecker(setup, steps_in_flight, speculation, LateRunner), crowd, failing)
