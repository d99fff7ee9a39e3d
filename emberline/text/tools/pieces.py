"""What a reply is made of, as it comes."""

from typing import NamedTuple


class Said(NamedTuple):
    """Text for the user."""

    text: str


class Thought(NamedTuple):
    """Reasoning."""

    text: str


class CallBegun(NamedTuple):
    """A call to a declared tool; `number` is the model's own for it, where the family writes one."""

    name: str
    number: str


class Argued(NamedTuple):
    """More of the arguments of the call that was begun last, as the model writes them."""

    text: str


class CallEnded(NamedTuple):
    """The arguments of the call that was begun last are complete."""


Piece = Said | Thought | CallBegun | Argued | CallEnded
