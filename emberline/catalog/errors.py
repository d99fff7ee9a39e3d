"""What can go wrong while a model is fetched; each message says what to do about it."""

from emberline.protocol.errors import Unavailable


class PullFailed(Unavailable):
    """The model did not arrive; nothing of it is left that could be taken for whole."""


class NoSpace(PullFailed):
    pass


class NoNetwork(PullFailed):
    pass


class HashMismatch(PullFailed):
    pass


class AccessDenied(PullFailed):
    """The hub wants a token, or another one."""
