"""The images of requests: one account's slow addresses leave other accounts room."""

import asyncio
from typing import Any

from emberline.images.decoders import ImageDecoders
from emberline.images.request_images import MAX_READING_OF_ACCOUNT, RequestImages
from emberline.images.sources import ImageLimits
from emberline.protocol.request import ContentPart, GenerateRequest, Message
from emberline.text.template_processes import ConfinedProcess


class SlowSources:
    """Addresses that answer an account once they may."""

    def __init__(self) -> None:
        self.limits = ImageLimits()
        self.n_reading = {"slow": 0, "other": 0}
        self.may_answer = asyncio.Event()

    def needs_io(self, url: str) -> bool:
        return True

    async def read(self, url: str, account: str) -> bytes:
        self.n_reading[account] += 1
        if account == "slow":
            await self.may_answer.wait()
        return b"\x89PNG"


def no_process(module: str) -> ConfinedProcess:
    raise RuntimeError("nothing is decoded here")


async def test_an_account_reads_few_images_at_once() -> None:
    sources: Any = SlowSources()
    images = RequestImages(sources, ImageDecoders(no_process, 1))
    parts = tuple(ContentPart("image", f"https://host/{n}") for n in range(3 * MAX_READING_OF_ACCOUNT))
    request = GenerateRequest(id="a", model="m", messages=(Message("user", "", parts=parts),))
    slow = asyncio.create_task(images.inline(request, "slow", False))
    try:
        other = await asyncio.wait_for(images.inline(request, "other", False), 60)
        assert other.messages is not None
        assert other.messages[0].parts[0].value == "data:image/png;base64,iVBORw=="
        assert sources.n_reading == {"slow": MAX_READING_OF_ACCOUNT, "other": len(parts)}
        sources.may_answer.set()
        await asyncio.wait_for(slow, 60)
    finally:
        slow.cancel()
        images.close()
