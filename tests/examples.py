"""How many random examples a property test runs: a quarter of them every day, all of them in `make test-all`."""

import os

EVERY_EXAMPLE = bool(os.environ.get("EMBERLINE_TEST_ALL"))


def n_examples(n: int) -> int:
    return n if EVERY_EXAMPLE else max(5, n // 4)
