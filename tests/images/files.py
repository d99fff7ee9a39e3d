"""Image files for tests, made by Pillow or by hand: good ones, and hostile ones."""

import struct
import zlib
from io import BytesIO
from typing import Any

from PIL import Image, ImageDraw

from emberline.protocol.images import ImageProcessor

PROCESSOR = ImageProcessor(  # of a small SmolVLM
    family="idefics3",
    placeholder="<image>",
    image_token="<image>",
    image_token_id=5,
    patch=16,
    merge=4,
    resample=Image.Resampling.LANCZOS,
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
    tile=64,
    longest_edge=128,
)


def picture(width: int = 60, height: int = 40, mode: str = "RGB") -> Image.Image:
    """Red on the left, blue on the right, a green square in the corner above on the left."""
    image = Image.new("RGB", (width, height), (220, 20, 20))
    draw = ImageDraw.Draw(image)
    draw.rectangle((width // 2, 0, width, height), fill=(20, 20, 220))
    draw.rectangle((0, 0, width // 5, height // 5), fill=(20, 220, 20))
    return image.convert(mode)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """The image as a file."""
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def animated(kind: str, n_frames: int = 3) -> bytes:
    """Frames of different sizes of the corner's square, so that none is left out."""
    frames = [picture(60 + 2 * number, 40).resize((60, 40)) for number in range(n_frames)]
    return encoded(frames[0], kind, save_all=True, append_images=frames[1:], duration=50)


def png_chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int, *chunks: bytes, colour: int = 2) -> bytes:
    """A PNG file that says it has this size, with these chunks after its header."""
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + png_chunk(b"IEND", b"")


def pixel_bomb(width: int = 30_000, height: int = 30_000) -> bytes:
    """A few hundred kilobytes that decode to gigabytes."""
    row = zlib.compressobj(9)
    data = row.compress(bytes(1 + width * 3) * 64) + row.flush()
    return png(width, height, png_chunk(b"IDAT", data))


def flat_png(width: int, height: int) -> bytes:
    """A whole image of one colour, which takes little to send and much to hold."""
    data = zlib.compress(bytes((1 + width * 3) * height), 1)
    return png(width, height, png_chunk(b"IDAT", data))


def chunk_bomb(n_chunks: int = 200_000) -> bytes:
    return png(8, 8, png_chunk(b"tEXt", b"a\0b") * n_chunks)


def text_bomb() -> bytes:
    """Compressed text chunks that decode to far more than the file has."""
    text = b"k\0\0" + zlib.compress(bytes(4 << 20), 1)
    return png(8, 8, *([png_chunk(b"zTXt", text)] * 8), png_chunk(b"IDAT", zlib.compress(bytes(8 * 25))))


def comment_bomb(n_blocks: int = 2_000_000) -> bytes:
    """A GIF file that begins with a comment in very many blocks."""
    head = b"GIF89a" + struct.pack("<HHBBB", 8, 8, 0, 0, 0)
    return head + b"!\xfe" + b"\x01x" * n_blocks + b"\0;"


def scan_bomb(side: int = 6_000, n_scans: int = 2_000) -> bytes:
    """A progressive JPEG file whose last scan is repeated: each costs the time of the whole image."""
    data = encoded(Image.new("L", (side, side), 128), "JPEG", progressive=True, quality=30)
    at = data.rindex(b"\xff\xda")
    scan = data[at:-2]
    return data[:at] + scan * n_scans + data[-2:]
