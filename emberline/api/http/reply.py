"""An answer that is whole before it is sent."""

from typing import Any, NamedTuple

import msgspec

HeaderList = list[tuple[bytes, bytes]]
JSON = b"application/json"
encode = msgspec.json.Encoder().encode


class Reply(NamedTuple):
    status: int
    body: bytes
    content_type: bytes = JSON  # exactly this for JSON: some clients compare
    headers: HeaderList = []  # beside content-type, content-length and x-request-id; never mutated


def json_reply(body: Any, status: int = 200, headers: HeaderList | None = None) -> Reply:
    return Reply(status, encode(body), headers=headers or [])
