"""Which of the request's fields an error is about, where what found it could not know."""

from collections.abc import Iterator
from contextlib import contextmanager

from emberline.protocol.errors import BadInput


@contextmanager
def blaming(param: str) -> Iterator[None]:
    try:
        yield
    except BadInput as error:
        if error.param is not None:
            raise
        raise type(error)(error.message, param=param) from None
