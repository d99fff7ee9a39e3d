"""Chooses how many tokens to draft, per row and step, from measured acceptance and measured step times.

A draft token gains as many tokens as the probability that it and all before it are drawn. It costs what one more token
lengthens a step by: hardly anything on a GPU until the step turns compute-bound, a good part of a step on a CPU. The
policy takes the length that gives the most tokens per second, which is none where drafts do not pay. Because a model
may be wrong, it also compares what drafting steps have gained with steps without drafts, and pauses when they lose.
"""

from collections.abc import Callable, Mapping, Sequence
from math import log2

_MEMORY = 64.0  # draft tokens after which older measurements of a cell have faded
_PRIOR_WEIGHT = 4.0  # draft tokens that a prior counts as
_CAUTION = 0.95  # of the expected gain counts: measurements are never exact
_TIME_GAIN = 0.1  # of a new step time
_TIME_MEMORY = 0.97  # weight of earlier measurements of what drafts cost, with every new one
_STEP_GAIN = 0.1  # of what the rows of a new step might draft
_PASS_GAIN = 0.3  # of a new measurement of a draft head's passes
_FIRST_PASS = 0.2  # of a step without drafts, which such a pass takes before it was measured
_PROBE_STEPS = 150  # whose drafts were all refused; the drafts of the next one are tried: they may pay by now
_PROBE_TOKENS = 2  # of each of these
_REFRESH_STEPS = 64  # drafting steps between two without drafts, which tell what those cost today
_TRIAL_STEPS = 12  # drafting steps after which their gain is judged
_FIRST_PAUSE, _LONGEST_PAUSE = 48, 1536  # steps without drafts after a loss; doubled with every further one


class _Rates(dict[int, float]):
    """By cell; the prior where nothing is known."""

    def __init__(self, prior: Callable[[int], float]) -> None:
        self._prior = prior

    def __missing__(self, cell: int) -> float:
        return self._prior(cell)


class AcceptanceRates:
    """Probability, by cell, that a draft token is drawn if all before it are. Older drafts fade."""

    def __init__(self, prior: Callable[[int], float]) -> None:
        self._prior = prior
        self._seen: dict[int, tuple[float, float]] = {}  # accepted and all, weighted
        self._rates = _Rates(prior)  # the share of these
        self.rate = self._rates.__getitem__

    def add(self, cells: Sequence[int], n_accepted: int) -> None:
        """Tokens behind the first that was not drawn tell nothing."""
        for place, cell in enumerate(cells[: n_accepted + 1]):
            accepted, total = self._seen.get(cell) or (_PRIOR_WEIGHT * self._prior(cell), _PRIOR_WEIGHT)
            kept = min(1.0, _MEMORY / (total + 1))
            self._seen[cell] = (accepted + (place < n_accepted)) * kept, (total + 1) * kept
            self._rates[cell] = (accepted + (place < n_accepted)) / (total + 1)


class PlainTimes:
    """Seconds of steps that decode without drafts, by rows."""

    def __init__(self) -> None:
        self._means: dict[int, tuple[float, float]] = {}  # rows and seconds, by size

    def add(self, n_rows: int, seconds: float) -> None:
        size = _size(n_rows)
        mean_n, mean_s = self._means.get(size, (float(n_rows), seconds))
        seconds = min(seconds, 2 * mean_s)  # an outlier: something was compiled, or the machine was busy
        self._means[size] = mean_n + _TIME_GAIN * (n_rows - mean_n), mean_s + _TIME_GAIN * (seconds - mean_s)

    def of(self, n_rows: int) -> float | None:
        """None: no step of about this size was measured."""
        size = _size(n_rows)
        if size not in self._means:
            return None
        mean_n, mean_s = self._means[size]
        other_n, other_s = self._means.get(size - 1) or self._means.get(size + 1) or (0.0, mean_s)
        slope = max(0.0, (mean_s - other_s) / (mean_n - other_n)) if mean_n != other_n else 0.0
        return max(mean_s / 2, mean_s + slope * (n_rows - mean_n))


class DraftTimes:
    """Seconds by which drafts lengthen a step of about so many rows: a line, by decaying least squares.

    The fixed part is what it takes that the device waits for the host, which plans a step with drafts late.
    """

    def __init__(self, token_s: float, fixed_s: float = 0.0) -> None:
        """token_s, fixed_s: before any was measured; count as one measurement at 0 and one at 4 drafts."""
        self._n, self._x, self._xx = 2.0, 4.0, 16.0
        self._y, self._xy = 2 * fixed_s + 4 * token_s, 4 * fixed_s + 16 * token_s
        self.fixed_s, self.token_s = fixed_s, token_s

    def add(self, n_drafts: int, seconds: float) -> None:
        kept = _TIME_MEMORY
        self._n, self._x, self._xx = self._n * kept + 1, self._x * kept + n_drafts, self._xx * kept + n_drafts**2
        self._y, self._xy = self._y * kept + seconds, self._xy * kept + n_drafts * seconds
        mean_x, mean_y = self._x / self._n, self._y / self._n
        variance = self._xx / self._n - mean_x * mean_x
        slope = (self._xy / self._n - mean_x * mean_y) / variance if variance > 0.01 else self.token_s
        self.token_s = min(max(0.0, slope), max(0.0, mean_y / max(mean_x, 1e-9)))
        self.fixed_s = max(0.0, mean_y - self.token_s * mean_x)


def _size(n_rows: int) -> int:
    return n_rows if n_rows <= 8 else 8 + int(4 * (log2(n_rows) - 3) + 1e-9)


class LengthPolicy:
    """marginal: what one more token lengthens a step by, as a share of a step of one row, before it was measured.
    fixed_s: what drafts lengthen it by, however few, before that."""

    def __init__(self, prior: Callable[[int], float], marginal: float, fixed_s: float = 0.0) -> None:
        self.rates = AcceptanceRates(prior)
        self._marginal, self._first_fixed_s = marginal, fixed_s
        self._plain = PlainTimes()
        self._drafts: dict[int, DraftTimes] = {}  # by power of two of the rows
        self._passes: dict[int, float] = {}  # seconds that a pass of the draft head takes; likewise
        # Of the step being planned:
        self._expected = 0.0  # tokens that it gives so far
        self._step_s = 0.0  # what it takes so far
        self._fixed_s = 0.0  # what the first row that drafts lengthens it by, in addition to its tokens
        self._token_s = 0.0  # of one more draft token
        self._asked = False  # some row of it has a draft to choose from
        self._n_worth, self._worth = 0, 0.0  # draft tokens that pay without the fixed cost, and what they gain
        self._n_rows, self._plain_s = 0, 0.0
        self._probes = False  # it tries drafts that would not pay
        self._refused = False  # some draft does not pay
        # Of steps before it:
        self._row_worth, self._row_gain = 1.0, 1.0  # the same for each row, of steps that were asked: moving averages
        self._since_plain = 0  # drafting steps since one without
        self._n_refused = 0  # steps whose drafts were all refused, since the last one with drafts
        self._pause, self._resting = _FIRST_PAUSE, 0
        self._n_trial, self._gained, self._spent = 0, 0.0, 0.0  # drafting steps against plain ones

    def calibrate(self, step_s: Mapping[tuple[int, int], float]) -> None:
        """step_s: what steps without a cache take, by rows and tokens; measured before any request."""
        for n_rows in {rows for rows, n in step_s if n == rows}:
            plain_s = step_s[n_rows, n_rows]
            longer = [(n - n_rows, s - plain_s) for (rows, n), s in step_s.items() if rows == n_rows < n]
            if longer and n_rows.bit_length() not in self._drafts:
                token_s = max(0.0, sum(x * y for x, y in longer) / sum(x * x for x, _ in longer))
                self._drafts[n_rows.bit_length()] = DraftTimes(token_s, self._first_fixed_s)

    def begin_step(self, n_rows: int) -> bool:
        """Return True if the step may draft at all."""
        if self._resting:
            self._resting -= 1
            return False
        plain_s = self._plain.of(n_rows) if n_rows else None
        if plain_s is None or self._since_plain >= _REFRESH_STEPS:
            return False
        self._n_refused += self._refused
        self._refused, self._probes = False, self._n_refused >= _PROBE_STEPS
        if self._asked:
            self._row_worth += _STEP_GAIN * (self._n_worth / self._n_rows - self._row_worth)
            self._row_gain += _STEP_GAIN * (self._worth / self._n_rows - self._row_gain)
        times = self._draft_times(n_rows, plain_s)
        self._n_rows, self._plain_s = n_rows, plain_s
        self._asked, self._n_worth, self._worth = False, 0, 0.0
        self._expected, self._step_s = float(n_rows), plain_s
        self._fixed_s, self._token_s = times.fixed_s, times.token_s
        if self._row_gain * plain_s > times.fixed_s + n_rows * self._row_worth * times.token_s:
            self._step_s, self._fixed_s = plain_s + times.fixed_s, 0.0  # the drafts of all rows pay for it together
        return True

    def choose(self, cells: Sequence[int], n_guessed: int = 0, trust: float = 1.0) -> tuple[int, float]:
        """Choose how many tokens of a row's draft to verify. Returns also the number of tokens expected to be drawn.

        n_guessed: leading tokens that are being sampled already, and are not verified. trust: of the sequence, times
        the measured rates.
        """
        rate, token_s, expected = self.rates.rate, self._token_s, self._expected
        best, best_n, best_gain = expected / self._step_s, 0, 0.0
        worth = best * token_s  # the least gain for which a token pays
        self._asked = True
        n, tokens, likely, seconds = 0, expected, _CAUTION * trust, self._step_s + self._fixed_s
        if n_guessed:
            for cell in cells[:n_guessed]:
                likely *= rate(cell)
            cells = cells[n_guessed:]
        for cell in cells:
            likely *= rate(cell)
            if likely <= worth:
                break  # neither it nor what follows it raises the rate, which is no lower than at the start
            n += 1
            tokens += likely
            seconds += token_s
            if tokens > best * seconds:
                best, best_n, best_gain = tokens / seconds, n, tokens - expected
        self._n_worth += n
        self._worth += tokens - expected
        if not best_n:
            self._refused = True
            if not self._probes:
                return 0, 0.0
            best_n = min(_PROBE_TOKENS, len(cells))
        self._expected += best_gain
        self._step_s += self._fixed_s + best_n * self._token_s
        self._fixed_s = 0.0
        return best_n, best_gain

    def depth(self, cells: list[int]) -> int:
        """How many tokens a draft head is to propose behind every row of this step, for the next one to verify: as many
        as pay if all rows draft, its own passes included. (In `choose` these are spent already.)"""
        n, pass_s = self._n_rows, self._pass_s(self._n_rows)
        fixed_s = self._draft_times(n, self._plain_s).fixed_s
        best, best_n, gain, likely = 1.0 / self._plain_s, 0, 0.0, _CAUTION
        for depth, cell in enumerate(cells, 1):
            likely *= self.rates.rate(cell)
            gain += likely
            per_s = (1 + gain) / (self._plain_s + fixed_s + depth * (pass_s + n * self._token_s))
            if per_s > best:
                best, best_n = per_s, depth
        if not best_n:
            self._refused = True
            return _PROBE_TOKENS if self._n_refused >= _PROBE_STEPS - 1 else 0
        return min(len(cells), best_n + 1)  # one more: else its acceptance is never measured

    def measured(self, n_rows: int, n_drafts: int, n_output: int, seconds: float, depth: int = 0) -> None:
        """A step without prompts took so long, until the next one could begin, and gave n_output tokens. depth: of what
        a draft head has proposed behind it, in this time. Such a step does not count as one without drafts,
        even if it verified none."""
        if not n_rows or seconds <= 0:
            return
        if not n_drafts and not depth:
            self._since_plain = 0
            self._plain.add(n_rows, seconds)
            return
        self._since_plain += 1
        if n_drafts:
            self._n_refused, self._refused = 0, False
        plain_s = self._plain.of(n_rows)
        if plain_s is not None:
            seconds = min(seconds, 4 * plain_s * (1 + n_drafts / n_rows))  # something was compiled
            if n_drafts:
                self._bound_passes(n_rows, depth, seconds - plain_s)
                own_s = seconds - plain_s - depth * self._pass_s(n_rows)
                self._draft_times(n_rows, plain_s).add(n_drafts, own_s)
            else:
                first_s, size = _FIRST_PASS * plain_s, n_rows.bit_length()
                known = self._passes.get(size, first_s)
                pass_s = min(max(0.0, seconds - plain_s) / depth, 4 * max(known, first_s))
                self._passes[size] = known + _PASS_GAIN * (pass_s - known)
            self._judge(n_output / n_rows, seconds / plain_s)

    def _bound_passes(self, n_rows: int, depth: int, seconds: float) -> None:
        """Passes and drafts have lengthened a step by so much together: passes by no more. Alone they are measured
        rarely, in steps behind plain ones."""
        size = n_rows.bit_length()
        known = self._passes.get(size)
        if depth and known is not None and depth * known > max(0.0, seconds):
            self._passes[size] = known + _PASS_GAIN * (max(0.0, seconds) / depth - known)

    def _pass_s(self, n_rows: int) -> float:
        """Seconds of a draft head's pass for each token that it proposes to `n_rows` rows."""
        nearest = min(self._passes, key=lambda size: abs(size - n_rows.bit_length()), default=None)
        return 0.0 if nearest is None else self._passes[nearest]

    def _draft_times(self, n_rows: int, plain_s: float) -> DraftTimes:
        size = n_rows.bit_length()
        found = self._drafts.get(size)
        if found is None:
            nearest = min(self._drafts, key=lambda other: abs(other - size), default=None)
            token_s = self._marginal * plain_s / n_rows**0.5 if nearest is None else self._drafts[nearest].token_s
            found = self._drafts[size] = DraftTimes(token_s, self._first_fixed_s)
        return found

    def _judge(self, gained: float, spent: float) -> None:
        """Pause when drafting steps give fewer tokens per second than plain ones do."""
        self._gained += gained
        self._spent += spent
        self._n_trial += 1
        if self._n_trial < _TRIAL_STEPS:
            return
        if self._gained < self._spent:
            self._resting, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE)
            self._n_trial, self._gained, self._spent = 0, 0.0, 0.0
        else:
            self._pause = _FIRST_PAUSE
            self._gained, self._spent = self._gained * 0.95, self._spent * 0.95
