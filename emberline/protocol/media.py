"""Requests for images, speech and video, and what is made of them. Only providers compute them."""

from typing import Any, Literal, NamedTuple

import msgspec

from emberline.protocol.request import Priority


class MediaFile(NamedTuple):
    field: str  # of the form
    name: str
    content_type: str
    data: bytes


class MediaRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The canonical request, in the words of OpenAI's API for its task."""

    id: str
    model: str
    task: Literal["image", "image_edit", "speech", "video"]
    fields: dict[str, Any]  # without the model
    files: tuple[MediaFile, ...] = ()  # of an edit
    session: str | None = None
    priority: Priority = Priority.DEFAULT
    api: str = ""

    @property
    def n_images(self) -> int:
        n = self.fields.get("n")
        return (n if type(n) is int and n > 0 else 1) if self.task in ("image", "image_edit") else 0


class Media(NamedTuple):
    """Images as the JSON body of OpenAI's API; speech and video as bytes."""

    body: bytes
    content_type: str = "application/json"
