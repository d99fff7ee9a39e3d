"""Configurations of which every combination of a few features is in one: a covering array, made greedily."""

from collections.abc import Mapping, Sequence
from itertools import combinations, product

Configuration = dict[str, str]  # a value for each parameter


def covering_array(values: Mapping[str, Sequence[str]], strength: int) -> list[Configuration]:
    """Configurations in which each combination of `strength` values occurs. The same ones in every run."""
    missing = {
        tuple(zip(names, chosen))
        for names in combinations(sorted(values), strength)
        for chosen in product(*(values[name] for name in names))
    }
    found: list[Configuration] = []
    while missing:
        made = dict(min(missing))
        for name in sorted(values, key=lambda each: (-len(values[each]), each)):
            if name not in made:
                made[name] = max(values[name], key=lambda value: _n_covered({**made, name: value}, missing, strength))
        found.append({name: made[name] for name in values})
        missing -= _combinations(made, strength)
    return found


def _n_covered(made: Configuration, missing: set[tuple[tuple[str, str], ...]], strength: int) -> int:
    return len(_combinations(made, strength) & missing)


def _combinations(made: Configuration, strength: int) -> set[tuple[tuple[str, str], ...]]:
    return set(combinations(sorted(made.items()), strength))
