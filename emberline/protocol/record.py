"""A response that is kept for later, as it travels between a door and the store."""

import msgspec

MAX_DEPTH = 256  # records of one walk; whoever continues a longer conversation writes it down whole
MAX_HISTORY_BYTES = 32 << 20  # of one conversation
_ROW_BYTES = 256  # what a row takes beside its texts, roughly


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One response. `input` is the JSON list of the items its turn brought, `body` the JSON of its answer."""

    id: str
    account: str
    parent: str | None = None  # the response it continues
    depth: int = 0  # how many records it is built on
    created_us: int
    input: str
    body: str

    @property
    def n_bytes(self) -> int:
        return len(self.input) + len(self.body) + _ROW_BYTES
