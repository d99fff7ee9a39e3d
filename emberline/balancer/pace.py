"""How fast an endpoint really is: what work took there, over what it would take at the cost's own figures."""

KEEP = 0.95  # of the past, at each sample,
FADE = 0.9  # and at each look at an endpoint that has shown nothing of late
PRIOR_S = 0.05  # of predicted work that the first guess weighs
SLOWEST, FASTEST = 1e4, 1e-4  # no measurement is believed beyond


class Pace:
    """A ratio of sums, not a mean of ratios: prompts that are computed side by side end together, and the time of all
    then stands beside the work of all."""

    __slots__ = ("_guess", "_predicted_s", "_took_s", "n", "scale")

    def __init__(self, guess: float = 1.0) -> None:
        self.scale: float = guess
        self.n = 0
        self._guess = guess
        self._took_s = 0.0
        self._predicted_s = 0.0

    def add(self, took_s: float, predicted_s: float) -> None:
        if took_s < 0 or predicted_s <= 0:
            return
        self.n += 1
        self._took_s = KEEP * self._took_s + took_s
        self._predicted_s = KEEP * self._predicted_s + predicted_s
        self._settle()

    def relax(self, guess: float) -> None:
        """Let go of what was measured long ago: one slow beginning must not keep requests away for ever."""
        self._guess = guess
        self._took_s *= FADE
        self._predicted_s *= FADE
        self._settle()

    def _settle(self) -> None:
        scale = (self._took_s + PRIOR_S * self._guess) / (self._predicted_s + PRIOR_S)
        self.scale = min(SLOWEST, max(FASTEST, scale))
