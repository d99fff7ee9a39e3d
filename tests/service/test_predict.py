"""Files of predictions that are behind URLs: they are fetched within bounds, an account's share at a time."""

import asyncio
from typing import Any

import pytest

from emberline.catalog.model_card import CogSource, ModelCard
from emberline.images.decoders import ImageDecoders
from emberline.images.request_images import MAX_READING_OF_ACCOUNT, RequestImages
from emberline.images.sources import ImageLimits
from emberline.protocol.errors import TooLarge
from emberline.protocol.request import PredictRequest, Principal
from emberline.service.predict import MAX_FETCHES, with_files
from emberline.text.template_processes import ConfinedProcess

FILES = {"type": "array", "items": {"type": "string", "format": "uri"}}
CARD = ModelCard(
    id="@me/thing",
    description="",
    author="me",
    created_at="2026-01-01",
    context_window=0,
    source=CogSource(version=1, digest="", input={"properties": {"files": FILES}}, output={}),
)


class Sources:
    """Addresses that answer with a file, an account's once they may."""

    def __init__(self, n_bytes: int) -> None:
        self.limits = ImageLimits()
        self.file = bytes(n_bytes)
        self.n_read = {"slow": 0, "other": 0}
        self.may_answer = asyncio.Event()

    async def read(self, url: str, account: str, accept: str) -> bytes:
        self.n_read[account] += 1
        if account == "slow":
            await self.may_answer.wait()
        return self.file


def no_process(module: str) -> ConfinedProcess:
    raise RuntimeError("nothing is decoded here")


async def fetched(sources: Any, account: str, n_urls: int, images: RequestImages | None = None) -> PredictRequest:
    request = PredictRequest(id="a", model="m", input={"files": ["data:,x"] + ["https://host/a.txt"] * n_urls})
    images = images or RequestImages(sources, ImageDecoders(no_process, 1))
    return await with_files(request, CARD, Principal(account), images)


async def test_files_are_bounded_together() -> None:
    found = await fetched(Sources(3), "other", 2)
    assert found.input == {"files": ["data:,x", *["data:text/plain;base64,AAAA"] * 2]}
    large, small = Sources(12 << 20), Sources(1)
    with pytest.raises(TooLarge) as caught:
        await fetched(large, "other", 10)
    assert caught.value.message == "the file of `files` cannot be used: an input has at most 32 MiB"
    assert large.n_read["other"] == 3
    with pytest.raises(TooLarge, match="at most 100 URLs"):
        await fetched(small, "other", 10 * MAX_FETCHES)
    assert small.n_read["other"] == MAX_FETCHES


async def test_slow_addresses_of_an_account_leave_others_room() -> None:
    sources = Sources(3)
    images = RequestImages(sources, ImageDecoders(no_process, 1))  # type: ignore[arg-type]
    slow = [asyncio.create_task(fetched(sources, "slow", 1, images)) for _ in range(3 * MAX_READING_OF_ACCOUNT)]
    try:
        await asyncio.wait_for(fetched(sources, "other", 1, images), 60)
        assert sources.n_read == {"slow": MAX_READING_OF_ACCOUNT, "other": 1}
    finally:
        sources.may_answer.set()
        await asyncio.wait_for(asyncio.gather(*slow), 60)
        images.close()
