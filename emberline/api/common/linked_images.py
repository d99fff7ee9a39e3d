"""Images in the messages of a relayed body that the core reads: where they are, and how the body gets their files.

A message without such images is sent on as it came.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw

from emberline.protocol.images import ImageLink
from emberline.upstream.upstream_request import LinkedImages

_encode = msgspec.json.Encoder().encode
_raw_messages = msgspec.json.Decoder(list[Raw])


Keys = tuple[str | int, ...]  # lead from a message to a value inside it


class LinkedImage(NamedTuple):
    """An image and the place of the value that names it."""

    link: ImageLink
    message: int
    keys: Keys


def linked_images(found: Sequence[LinkedImage], value: Callable[[str], Any]) -> LinkedImages | None:
    """Images for the core to read. `value` makes what takes the place of an image's name from the image's data: URL.

    Returns None if nothing was found."""
    if not found:
        return None

    def put(fields: dict[str, Any], urls: Sequence[str]) -> None:
        messages = _raw_messages.decode(fields["messages"])
        values = {image: value(url) for image, url in zip(found, urls, strict=True)}
        for number in {image.message for image in found}:
            message = msgspec.json.decode(messages[number])
            _replace(message, {image.keys: new for image, new in values.items() if image.message == number})
            messages[number] = Raw(_encode(message))
        fields["messages"] = Raw(_encode(messages))

    return LinkedImages([image.link for image in found], put)


def _replace(message: Any, values: Mapping[Keys, Any]) -> None:
    """Replace the values to which keys lead."""
    for (*outer, last), value in values.items():
        place = message
        for key in outer:
            place = place[key]
        place[last] = value
