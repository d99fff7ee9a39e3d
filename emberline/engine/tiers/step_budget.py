"""How much of fetches one step handles: a long prompt has thousands of blocks, and those who decode wait meanwhile."""

from math import inf

STEP_S = 0.005  # that a step takes at least where many sequences decode; a longer one may handle more
MAX_STEPS = 16  # that one step counts for: in a long one as many tokens are fetched as it computes, and more


class StepBudget:
    """Blocks that the step may still handle, by what is done with them. Together they take some 0.3 ms of its thread,
    and are as many as are copied meanwhile."""

    LOOKED_UP = 512  # in the index and the tiers
    TAKEN = 112  # from the device pool, to be written
    PUBLISHED = 128  # in the index, or given back

    def __init__(self) -> None:
        self._began_s = -inf
        self.look_ups = self.takes = self.publications = 0

    def begin_step(self, now_s: float) -> None:
        steps = min(MAX_STEPS, max(1.0, (now_s - self._began_s) / STEP_S))
        self._began_s = now_s
        self.look_ups = int(steps * self.LOOKED_UP)
        self.takes, self.publications = int(steps * self.TAKEN), int(steps * self.PUBLISHED)

    def look_up(self, n: int) -> int:
        """How many of n blocks may be looked up now."""
        n = min(n, self.look_ups)
        self.look_ups -= n
        return n

    def take(self, n: int) -> int:
        n = min(n, self.takes)
        self.takes -= n
        return n

    def publish(self, n: int) -> int:
        n = min(n, self.publications)
        self.publications -= n
        return n
