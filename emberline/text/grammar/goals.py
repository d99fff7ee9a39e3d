"""Goals: sets of numbered sub-schemas that one value must satisfy (positive) or must not (negative) at once."""

from typing import TypeAlias

Goal: TypeAlias = frozenset[int]

TRUE: Goal = frozenset()
FALSE: Goal = frozenset((-1,))  # number 1 is the schema `true`


def negate(goal: Goal) -> list[Goal]:
    """The goals of which at least one holds where `goal` does not."""
    return [frozenset((-number,)) for number in sorted(goal, key=abs)]


def impossible(goal: Goal) -> bool:
    return -1 in goal or any(-number in goal for number in goal if number > 0)
