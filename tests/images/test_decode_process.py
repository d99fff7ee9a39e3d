"""Decoding: the files that are read, as the tower sees them, and those that are refused, each with its reason."""

from collections.abc import Callable, Iterator

import msgspec
import pytest
from PIL import Image

from emberline.images.decode_job import DecodedImage, DecodeJob
from emberline.images.decode_process import UnreadableImage, handle, read_image
from emberline.images.decoders import MEMORY_BYTES, MODULE, ImageDecoders
from emberline.protocol.errors import Overloaded, Unavailable
from emberline.supervisor.sandbox.confinement import Confinement
from emberline.supervisor.sandbox.launcher import ConfinedProcess, Launcher
from tests.images import files
from tests.images.files import PROCESSOR, encoded, picture

MOST = 50_000_000
LEFT, RIGHT, CORNER = (220, 20, 20), (20, 20, 220), (20, 220, 20)


def near(found: object, expected: tuple[int, int, int], tolerance: int = 12) -> bool:
    assert isinstance(found, tuple)
    return all(abs(one - other) <= tolerance for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
@pytest.mark.parametrize("mode", ["RGB", "P", "L", "CMYK", "RGBA", "LA", "1"])
def test_every_kind_and_mode_is_read_as_rgb(kind: str, mode: str) -> None:
    given = picture(mode=mode)
    if (kind, mode) in {("PNG", "CMYK"), ("GIF", "CMYK"), ("JPEG", "RGBA"), ("JPEG", "LA"), ("JPEG", "P")}:
        given = picture()
    image = read_image(encoded(given, kind), MOST)
    assert (image.mode, image.size) == ("RGB", (60, 40))
    if given.mode not in ("L", "LA", "1"):
        assert near(image.getpixel((20, 30)), LEFT, 40)
        assert near(image.getpixel((50, 30)), RIGHT, 40)
        assert near(image.getpixel((3, 3)), CORNER, 40)


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF"])
def test_transparent_parts_are_white(kind: str) -> None:
    given = picture(mode="RGBA")
    given.paste((0, 0, 0, 0), (30, 0, 60, 40))
    image = read_image(encoded(given, kind), MOST)
    assert near(image.getpixel((50, 20)), (255, 255, 255), 2)
    assert near(image.getpixel((20, 30)), LEFT)
    half = Image.new("RGBA", (4, 4), (0, 0, 0, 128))
    if kind == "PNG":
        assert near(read_image(encoded(half), MOST).getpixel((1, 1)), (127, 127, 127), 2)


def test_a_colour_that_stands_for_transparency_is_white() -> None:
    image = read_image(encoded(picture(), transparency=RIGHT), MOST)
    assert near(image.getpixel((50, 30)), (255, 255, 255), 0)


def test_sixteen_bits_of_grey_are_not_clipped() -> None:
    given = Image.new("I;16", (8, 8), 0x8000)
    assert read_image(encoded(given), MOST).getpixel((4, 4)) == (128, 128, 128)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_exif_says_how_an_image_stands(orientation: int, kind: str) -> None:
    """All eight files show the same picture."""
    undo = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # the method of Pillow that makes the file's pixels
    stored = picture() if orientation == 1 else picture().transpose(Image.Transpose(undo[orientation]))
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = read_image(encoded(stored, kind, exif=exif), MOST)
    assert image.size == (60, 40)
    assert near(image.getpixel((3, 3)), CORNER, 40)
    assert near(image.getpixel((50, 30)), RIGHT, 40)


def test_exif_that_cannot_be_read_is_ignored() -> None:
    for exif in (b"Exif\0\0" + b"\xff" * 40, b"Exif\0\0MM\0*\0\0\0\x08\xff\xff", b"nonsense"):
        assert read_image(encoded(picture(), "JPEG", exif=exif), MOST).size == (60, 40)


def test_the_first_frame_of_a_gif_is_read() -> None:
    assert near(read_image(files.animated("GIF"), MOST).getpixel((50, 30)), RIGHT)


big = picture(640, 480)
REFUSED: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "no PNG"),
    "text": (lambda: b"hello", "no PNG"),
    "svg": (lambda: b"<svg xmlns='http://www.w3.org/2000/svg'/>", "no PNG"),
    "bmp": (lambda: encoded(picture(), "BMP"), "no PNG"),
    "tiff": (lambda: encoded(picture(), "TIFF"), "no PNG"),
    "icon": (lambda: encoded(picture(), "ICO"), "no PNG"),
    "animated WebP": (lambda: files.animated("WEBP"), "animated"),
    "animated PNG": (lambda: files.animated("PNG"), "animated"),
    "cut PNG": (lambda: encoded(big)[:900], "damaged"),
    "cut JPEG": (lambda: encoded(big, "JPEG")[:2000], "damaged"),
    "cut WebP": (lambda: encoded(big, "WEBP")[:300], "damaged"),
    "cut GIF": (lambda: encoded(big, "GIF")[:900], "damaged"),
    "header alone": (lambda: encoded(big)[:33], "damaged|no PNG"),
    "lying about its size": (
        lambda: files.png(4000, 4000, files.png_chunk(b"IDAT", b"x\x9c\x03\0\0\0\0\x01")),
        "damaged",
    ),
    "no pixels": (lambda: files.png(0, 5), "damaged|no pixels|no PNG"),
    "many pixels": (files.pixel_bomb, "30000 x 30000 pixels, and at most 50,000,000"),
    "many chunks": (files.chunk_bomb, "more than 16,384 chunks"),
    "much text": (files.text_bomb, "damaged"),
    "bad chunk length": (lambda: files.png(8, 8, b"\xff\xff\xff\xffIDAT"), "damaged"),
}


def test_what_follows_the_end_of_a_png_file_is_ignored() -> None:
    assert read_image(encoded(picture()) + bytes(200_000), MOST).size == (60, 40)


@pytest.mark.parametrize(("make", "why"), REFUSED.values(), ids=REFUSED)
def test_a_bad_file_is_refused_with_its_reason(make: Callable[[], bytes], why: str) -> None:
    with pytest.raises(UnreadableImage, match=why):
        read_image(make(), MOST)


def test_the_answer_has_the_pixels_of_all_tiles() -> None:
    job = DecodeJob(PROCESSOR, "auto", MOST, encoded(picture(60, 40)))
    decoded = msgspec.msgpack.decode(handle(msgspec.msgpack.encode(job)), type=DecodedImage)
    assert decoded.plan == PROCESSOR.plan(60, 40)
    assert (decoded.error, decoded.n_pixels) == ("", 2400)
    assert len(decoded.pixels) == decoded.plan.n_bytes


# --- the processes ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def launcher() -> Launcher:
    return Launcher(Confinement(memory_bytes=MEMORY_BYTES))


@pytest.fixture
def decoders(launcher: Launcher) -> Iterator[ImageDecoders]:
    decoders = ImageDecoders(launcher.start, 1, cpu_s=0.5)
    yield decoders
    decoders.close()


def job(data: bytes) -> DecodeJob:
    return DecodeJob(PROCESSOR, "auto", MOST, data)


async def test_a_file_that_takes_too_long_costs_its_process_alone(decoders: ImageDecoders) -> None:
    """Every kind is decoded without a file to import from, before and after."""
    for _ in range(2):
        for kind in ("PNG", "JPEG", "WEBP", "GIF"):
            assert not (await decoders.decode(job(encoded(picture(), kind)))).error
        slow = await decoders.decode(job(files.scan_bomb(1500)))
        assert "decoding it takes" in slow.error


async def test_a_file_that_takes_too_much_memory(launcher: Launcher) -> None:
    small = Launcher(Confinement(memory_bytes=64 << 20))
    decoders = ImageDecoders(small.start, 1)
    try:
        assert "memory" in (await decoders.decode(job(files.flat_png(6000, 6000)))).error
        assert not (await decoders.decode(job(encoded(picture())))).error
    finally:
        decoders.close()


@pytest.mark.parametrize("limits", [{"max_waiting": 0}, {"max_waiting_bytes": 3}])
async def test_too_many_images_wait(launcher: Launcher, limits: dict[str, int]) -> None:
    decoders = ImageDecoders(launcher.start, 1, **limits)
    for _ in range(2):
        with pytest.raises(Overloaded, match="too many images"):
            await decoders.decode(job(b"four"))
    decoders.close()


async def test_processes_that_do_not_start() -> None:
    def fail(module: str) -> ConfinedProcess:
        assert module == MODULE
        raise RuntimeError("no memory")

    decoders = ImageDecoders(fail, 1)
    with pytest.raises(Unavailable, match="no memory"):
        await decoders.decode(job(b""))
    decoders.close()
