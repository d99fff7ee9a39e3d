"""Requests for images, speech and video, and what is made of them. Only providers compute them."""

import math
from typing import Any, Literal, NamedTuple

import msgspec

from emberline.protocol.request import Priority

MAX_IMAGES = 16  # of one request
MAX_IMAGE_TOKENS = 8192  # of output, where a provider counts them
DEFAULT_VIDEO_S = 20.0  # at most, where the request does not say
MAX_VIDEO_S = 3600.0


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

    @property
    def video_s(self) -> float:
        """Seconds of video that are asked for; 0: none are."""
        if self.task != "video":
            return 0.0
        try:
            seconds = float(self.fields.get("seconds") or DEFAULT_VIDEO_S)
        except (TypeError, ValueError, OverflowError):
            return DEFAULT_VIDEO_S
        return min(seconds, MAX_VIDEO_S) if seconds > 0 and not math.isnan(seconds) else DEFAULT_VIDEO_S


class Media(NamedTuple):
    """Images as the JSON body of OpenAI's API; speech and video as bytes."""

    body: bytes
    content_type: str = "application/json"
