"""The images of one request: read, bounded, decoded, and put into its messages as a model's tower will see them.

A decoded image is kept for the next turn of its conversation, which sends all its images again.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from hashlib import blake2b
from typing import Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import msgspec

from emberline.images.decode_job import DecodedImage, DecodeJob
from emberline.images.decoders import ImageDecoders
from emberline.images.sources import ImageLimits, ImageSources, data_url
from emberline.protocol.errors import BadInput, EmberlineError, TooLarge
from emberline.protocol.images import DIGEST_BYTES, MAX_PIXEL_BYTES, ImageLink, ImagePlan, ImageProcessor, image_digest
from emberline.protocol.request import ContentPart, GenerateRequest, Message, PreparedImage, Principal
from emberline.protocol.sizes import format_limit

CACHE_BYTES = 256 << 20  # of decoded images
OFF_LOOP_CHARS = 128 << 10  # of a data: URL; longer ones are decoded and hashed in a thread
MAX_READING = 16  # images at once that are fetched or read from the store, of all requests
MAX_READING_OF_ACCOUNT = 8  # of them: slow addresses that one account names leave the others room

T = TypeVar("T")


class Place(NamedTuple):
    """Position of an image in a request."""

    message: int
    part: int
    number: int  # among all images, from 1

    @property
    def field(self) -> str:
        return f"messages[{self.message}].content[{self.part}]"

    def link(self, url: str) -> ImageLink:
        """The image with its URL."""
        return ImageLink(self.number, self.field, url)


class ModelImages(NamedTuple):
    """A request whose images are `PreparedImage`s, and the pixels of each, by its value."""

    request: GenerateRequest
    pixels: Mapping[str, bytes]


class _Key(NamedTuple):
    """All that decides how an image comes out. Accounts share nothing: a hit would tell one what another has sent."""

    salt: bytes
    file: bytes  # digest
    processor: ImageProcessor
    detail: str


def image_places(messages: tuple[Message, ...] | None) -> Iterator[tuple[Place, ContentPart]]:
    """The images of a conversation, in order."""
    number = 0
    for at, message in enumerate(messages or ()):
        for index, part in enumerate(message.parts):
            if part.kind == "image":
                number += 1
                yield Place(at, index, number), part


class RequestImages:
    """Prepares the images of requests in one process."""

    def __init__(self, sources: ImageSources, decoders: ImageDecoders, cache_bytes: int = CACHE_BYTES) -> None:
        self.sources = sources
        self._decoders = decoders
        self._threads = ThreadPoolExecutor(2, "emberline-image-files")
        self._cache: OrderedDict[_Key, DecodedImage] = OrderedDict()  # least recently used first
        self._n_cached = 0  # bytes of pixels
        self._max_cached = cache_bytes
        self._decoding: dict[_Key, asyncio.Task[DecodedImage]] = {}
        self._reading = asyncio.Semaphore(MAX_READING)
        self._reading_of: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()  # by account, while used

    def close(self) -> None:
        """End the processes and threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._decoders.close()

    async def warm_up(self) -> None:
        """Start what the first image would have to wait for."""
        await self._decoders.warm_up()

    async def fetch(self, url: str, account: str) -> bytes:
        """The file behind a URL, whatever its type. Raises an error that says what is wrong with it."""
        async with self._turn(account):
            return await self.sources.read(url, account, accept="*/*")

    async def prepare(self, request: GenerateRequest, principal: Principal, processor: ImageProcessor) -> ModelImages:
        """Read and decode all images for a model. Raises an error that names the image that cannot be used."""
        places = self._places(request)
        budget = _Budget(self.sources.limits)
        found = await _all([self._one(place, part, principal, processor, budget) for place, part in places])
        n_bytes = sum(plan.n_bytes for _, plan, _ in found)
        if n_bytes > MAX_PIXEL_BYTES:
            raise TooLarge(
                f"the request's {len(found)} images have {n_bytes >> 20} MiB of pixels as the model sees them, and at "
                f"most {format_limit(MAX_PIXEL_BYTES)} fit into a request: send fewer, or with a low `detail`",
                param=places[-1][0].field,
            )
        images: dict[Place, ContentPart] = {}
        by_value: dict[str, bytes] = {}
        for (place, _), (file, plan, pixels) in zip(places, found, strict=True):
            digest = image_digest(file, plan, principal.salt).hex()
            images[place], by_value[digest] = PreparedImage("image", digest, plan=plan), pixels
        return ModelImages(_with_images(request, images), by_value)

    async def inline(self, request: GenerateRequest, account: str, fetches_itself: bool) -> GenerateRequest:
        """Put images that another server cannot read, or must not fetch, into the request as data: URLs."""
        places = [
            (place, part)
            for place, part in self._places(request)
            if self.sources.needs_io(part.value) and not (fetches_itself and part.value.startswith("http"))
        ]
        found = await self.data_urls([place.link(part.value) for place, part in places], account)
        changed = {
            place: msgspec.structs.replace(part, value=url) for (place, part), url in zip(places, found, strict=True)
        }
        return _with_images(request, changed) if changed else request

    async def data_urls(self, links: Sequence[ImageLink], account: str) -> list[str]:
        """Read the files of images, which become data: URLs in the same order."""
        self._check_number([link.field for link in links])
        budget = _Budget(self.sources.limits)
        return await _all([self._url(link, account, budget) for link in links])

    def _places(self, request: GenerateRequest) -> list[tuple[Place, ContentPart]]:
        places = list(image_places(request.messages))
        self._check_number([place.field for place, _ in places])
        return places

    def _check_number(self, fields: Sequence[str]) -> None:
        """Refuse a request with too many images, which `fields` name."""
        if len(fields) > (most := self.sources.limits.n_images):
            message = f"the request has {len(fields)} images, and at most {most} are taken: leave older ones out"
            raise TooLarge(message, param=fields[most])

    @asynccontextmanager
    async def _turn(self, account: str) -> AsyncIterator[None]:
        """Wait until one more image of the account may be read."""
        own = self._reading_of.setdefault(account, asyncio.Semaphore(MAX_READING_OF_ACCOUNT))
        async with own, self._reading:
            yield

    async def _url(self, link: ImageLink, account: str, budget: "_Budget") -> str:
        try:
            async with self._turn(account):
                data = await self.sources.read(link.url, account)
                budget.take_bytes(len(data))
            return await self._off_loop(len(data), lambda: data_url(data))
        except EmberlineError as error:
            raise link.named(error) from None

    async def _one(
        self,
        place: Place,
        part: ContentPart,
        principal: Principal,
        processor: ImageProcessor,
        budget: "_Budget",
    ) -> tuple[bytes, ImagePlan, bytes]:
        """Digest of the image's file, its plan, and its pixels."""
        url, sources = part.value, self.sources
        try:
            if sources.needs_io(url):
                async with self._turn(principal.account):
                    data = await sources.read(url, principal.account)
                    return await self._decoded(data, part.detail, principal, processor, budget)
            data = await self._off_loop(len(url), lambda: sources.decode(url))
            return await self._decoded(data, part.detail, principal, processor, budget)
        except EmberlineError as error:
            raise place.link(url).named(error) from None

    async def _decoded(
        self, data: bytes, detail: str, principal: Principal, processor: ImageProcessor, budget: "_Budget"
    ) -> tuple[bytes, ImagePlan, bytes]:
        budget.take_bytes(len(data))
        digest = await self._off_loop(len(data), lambda: blake2b(data, digest_size=DIGEST_BYTES).digest())
        key = _Key(principal.salt, digest, processor, "low" if detail == "low" else "auto")
        decoded = await self._decode_once(key, data)
        if decoded.error or decoded.plan is None:
            raise BadInput(decoded.error)
        budget.take_pixels(decoded.n_pixels)
        return digest, decoded.plan, decoded.pixels

    async def _off_loop(self, n_bytes: int, work: Callable[[], T]) -> T:
        if n_bytes <= OFF_LOOP_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def _decode_once(self, key: _Key, data: bytes) -> DecodedImage:
        """The decoded image, from the cache if it is there. Of requests for the same one, the first decodes it."""
        if (known := self._cache.get(key)) is not None:
            self._cache.move_to_end(key)
            return known
        if (task := self._decoding.get(key)) is None:
            job = DecodeJob(key.processor, key.detail, self.sources.limits.n_pixels, data)
            task = self._decoding[key] = asyncio.create_task(self._decode(key, job))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # its requests may all be gone
        return await asyncio.shield(task)

    async def _decode(self, key: _Key, job: DecodeJob) -> DecodedImage:
        try:
            decoded = await self._decoders.decode(job)
        finally:
            del self._decoding[key]
        if not decoded.error and len(decoded.pixels) <= self._max_cached:
            self._cache[key] = decoded
            self._n_cached += len(decoded.pixels)
            while self._n_cached > self._max_cached:
                _, dropped = self._cache.popitem(last=False)
                self._n_cached -= len(dropped.pixels)
        return decoded


class _Budget:
    """Bytes and pixels that the images of one request have used of its limits."""

    def __init__(self, limits: ImageLimits) -> None:
        self._limits = limits
        self._n_bytes = self._n_pixels = 0

    def take_bytes(self, n_bytes: int) -> None:
        self._n_bytes += n_bytes
        if self._n_bytes > self._limits.n_total_bytes:
            most = format_limit(self._limits.n_total_bytes)
            raise TooLarge(f"the files of the request's images are larger than {most} together: send fewer")

    def take_pixels(self, n_pixels: int) -> None:
        self._n_pixels += n_pixels
        if self._n_pixels > (most := self._limits.n_total_pixels):
            raise TooLarge(f"the request's images have more than {most:,} pixels together: send fewer, or smaller ones")


async def _all(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results, in order. If some fail, the others are cancelled, and the first failure in order is raised."""
    tasks = [asyncio.create_task(work) for work in works]
    if not tasks:
        return []
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in tasks:
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error
    return [task.result() for task in tasks]


def _with_images(request: GenerateRequest, images: Mapping[Place, ContentPart]) -> GenerateRequest:
    """The request with other parts in these places."""
    assert request.messages is not None
    parts = [list(message.parts) for message in request.messages]
    for place, image in images.items():
        parts[place.message][place.part] = image
    messages = tuple(
        msgspec.structs.replace(message, parts=tuple(found)) if message.parts else message
        for message, found in zip(request.messages, parts, strict=True)
    )
    return msgspec.structs.replace(request, messages=messages)
