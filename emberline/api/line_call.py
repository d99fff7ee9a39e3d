"""A request of a batch, where the doors' structs expect a request on its way through a door."""

from emberline.api.call import Call
from emberline.api.errors import Dialect
from emberline.api.naming import Names


class LineCall(Call):
    """It has an id and nothing else of a connection; one serves line after line."""

    def __init__(self, request_id: str, dialect: Dialect) -> None:
        self.id = request_id
        self.headers = {}
        self.names = Names()
        self.dialect = dialect
