"""Replies of one model that were computed in two ways: their logprobs agree, and near ties may fall either way.

Several ranks add partial sums in another order than one. In bf16 that changes logprobs a little, and now and then which
of two tokens is the likelier one; from there on the replies have nothing to do with each other.
"""

from collections.abc import Sequence

from emberline.protocol.events import TokenLogprobs

TOP = 20  # logprobs to ask for


class RepliesDiffer(Exception):
    """By more than rounding."""


def compare(
    expected: Sequence[TokenLogprobs], found: Sequence[TokenLogprobs], tolerance: float, greedy: bool = True
) -> int:
    """How many tokens were compared: up to and with the first that is another one, which must have been a near tie.

    What a sampled reply drew there depends on noise, too: then only the logprobs are compared.
    """
    if len(expected) != len(found):
        raise RepliesDiffer(f"{len(found)} tokens instead of {len(expected)}")
    for n, (one, other) in enumerate(zip(expected, found, strict=True), 1):
        off = difference(one.top, other.top)
        if off > tolerance:
            raise RepliesDiffer(f"the logprobs of token {n} differ by {off:.3f}")
        if one.token_id != other.token_id:
            known = dict(one.top)
            margin = one.logprob - known.get(other.token_id, known[one.top[-1][0]])
            if greedy and margin > tolerance:
                raise RepliesDiffer(f"token {n} is another one, less likely by {margin:.3f}")
            return n
    return len(expected)


def difference(one: Sequence[tuple[int, float]], other: Sequence[tuple[int, float]]) -> float:
    """The largest difference of a logprob. A token that only one of the lists has is at most as likely in the other one
    as the last of that."""
    worst = 0.0
    for these, those in ((dict(one), dict(other)), (dict(other), dict(one))):
        last = min(those.values(), default=float("-inf"))
        for token_id, logprob in these.items():
            worst = max(worst, abs(logprob - those[token_id]) if token_id in those else logprob - last)
    return worst
