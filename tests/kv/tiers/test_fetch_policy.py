"""Fetch or recompute: invariants of the decision."""

from hypothesis import given
from hypothesis import strategies as st

from emberline.kv.tiers.fetch_policy import MIN_TOKENS, ComputeQueue, TierQueue, TierRun, choose, extended

rates = st.floats(1e5, 1e11)
queues = st.builds(TierQueue, rates, st.integers(0, 10**11), st.floats(0, 20))
computing = st.builds(ComputeQueue, st.floats(10, 1e6), st.integers(0, 10**6), st.booleans())
runs = st.lists(
    st.builds(lambda tier, n: TierRun(tier, 16 * n, n << 17), st.sampled_from(["host", "disk"]), st.integers(1, 900)),
    max_size=12,
)


def seconds(runs, n_tokens, tiers, mover):
    """Of the fetch of the first n_tokens, by hand."""
    left, by_tier = n_tokens, {}
    for run in runs:
        if left > 0:
            by_tier[run.tier] = by_tier.get(run.tier, 0) + run.n_bytes
        left -= run.n_tokens
    return max(*(tiers[tier].seconds(n) for tier, n in by_tier.items()), mover.seconds(sum(by_tier.values())))


@given(runs, queues, queues, queues, st.integers(0, 50_000), computing)
def test_a_fetch_is_predicted_to_be_done_before_recomputing(runs, host, disk, mover, n_tail, compute):
    tiers, total = {"host": host, "disk": disk}, sum(run.n_tokens for run in runs)
    chosen = choose(runs, tiers, mover, n_tail, compute)
    if chosen is None:
        return
    assert MIN_TOKENS <= chosen.n_tokens <= total
    fetch_s = seconds(runs, chosen.n_tokens, tiers, mover)
    before_s = compute.seconds(compute.n_before)
    done_s = max(fetch_s, before_s) + compute.seconds(total - chosen.n_tokens + n_tail)
    recomputed_s = before_s + compute.seconds(total + n_tail)
    assert done_s < recomputed_s
    # A fetch that never completes costs at most what it was to save, beside the predicted time.
    assert fetch_s <= chosen.deadline_s <= chosen.limit_s <= fetch_s + recomputed_s - done_s + 1e-9


@given(runs, queues, queues, st.integers(0, 50_000), computing)
def test_a_tier_that_does_not_answer_is_not_used(runs, disk, mover, n_tail, compute):
    silent_s = compute.seconds(compute.n_before + sum(run.n_tokens for run in runs) + n_tail) + 1
    silent = TierQueue(1e11, 0, silent_s)
    assert choose(runs, {"host": silent, "disk": silent}, mover, n_tail, compute) is None


@given(runs, queues, st.integers(0, 50_000), computing)
def test_windows_need_the_whole_prefix(runs, queue, n_tail, compute):
    chosen = choose(runs, {"host": queue, "disk": queue}, queue, n_tail, compute, whole=True)
    assert chosen is None or chosen.n_tokens == sum(run.n_tokens for run in runs)


def test_time_of_others_is_counted():
    """Fetching more than the soonest completion needs leaves the device to others, but is never slower than no tier."""
    runs = [TierRun("host", 8000, 10**9), TierRun("disk", 4000, 10**9)]
    tiers = {"host": TierQueue(5e10), "disk": TierQueue(2.2e9)}  # 0.45 s for what is computed in 0.4 s
    alone = choose(runs, tiers, TierQueue(5e10), 100, ComputeQueue(10_000.0))
    busy = choose(runs, tiers, TierQueue(5e10), 100, ComputeQueue(10_000.0, others_wait=True))
    assert alone is not None
    assert busy is not None
    assert (alone.n_tokens, busy.n_tokens) == (8000, 12_000)
    assert choose(runs[1:], tiers, TierQueue(5e10), 0, ComputeQueue(10_000.0, others_wait=True)) is None


def test_before_anything_was_measured_it_fetches():
    chosen = choose([TierRun("disk", 320, 1 << 20)], {"disk": TierQueue(1e9)}, TierQueue(1e9), 4, ComputeQueue(0.0))
    assert chosen is not None
    assert chosen.n_tokens == 320


@given(st.floats(0.001, 10), st.integers(0, 5000), st.integers(1, 5000), st.floats(0.001, 10), computing)
def test_a_late_fetch_goes_on_only_with_progress(elapsed_s, n_arrived, n_left, limit_s, compute):
    next_s = extended(elapsed_s, n_arrived, n_left, limit_s, compute)
    if next_s is None:
        return
    assert n_arrived > 0
    assert elapsed_s < next_s <= limit_s
    assert elapsed_s / n_arrived * n_left < compute.seconds(n_left)
