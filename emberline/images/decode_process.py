"""The work of a confined process that decodes images: a stranger's file in, pixels of a model's tiles out.

`handle` takes a `DecodeJob` and returns a `DecodedImage`, both as msgpack. Importing this module loads Pillow's codecs,
while the process still has files.
"""

import struct
import warnings
from io import BytesIO

import msgspec
from PIL import Image, ImageFile, UnidentifiedImageError
from PIL.GifImagePlugin import GifImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.MpoImagePlugin import MpoImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from emberline.images.decode_job import DecodedImage, DecodeJob
from emberline.protocol.errors import BadInput
from emberline.text.image_pixels import image_pixels

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MAX_PNG_CHUNKS = 16_384  # 20 MiB in chunks of 4 KiB are 5,120
_OPENED = (PngImageFile, JpegImageFile, MpoImageFile, WebPImageFile, GifImageFile)
_PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
_ORIENTATION = 0x0112  # tag of EXIF
_TRANSPOSES = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_HAS_ALPHA = ("RGBA", "LA", "PA", "La", "RGBa")

Image.MAX_IMAGE_PIXELS = None  # the job's own limit is checked before anything is decoded
ImageFile.LOAD_TRUNCATED_IMAGES = False


class UnreadableImage(Exception):
    """The file is no image that is read here; the message says why."""


_jobs = msgspec.msgpack.Decoder(DecodeJob)


def handle(data: bytes) -> bytes:
    """Decode a job's file, and resize it as the model's processor does."""
    job = _jobs.decode(data)
    try:
        image = read_image(job.data, job.max_pixels)
        plan = job.processor.plan(*image.size, job.detail)
        decoded = DecodedImage("", image.width * image.height, plan, image_pixels(image, plan))
    except UnreadableImage as error:
        decoded = DecodedImage(str(error))
    except BadInput as error:
        decoded = DecodedImage(error.message)
    except MemoryError:
        decoded = DecodedImage("decoding it takes too much memory")
    return msgspec.msgpack.encode(decoded)


def read_image(data: bytes, max_pixels: int) -> Image.Image:
    """The first frame of an image as RGB: turned as its EXIF orientation says, transparent parts on white.

    Raises UnreadableImage."""
    _check_png_chunks(data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nobody reads what a stranger's file makes Pillow write
        return _read(data, max_pixels)


def _read(data: bytes, max_pixels: int) -> Image.Image:
    try:
        with Image.open(BytesIO(data), formats=FORMATS) as image:
            _check_header(image, max_pixels)
            image.load()
            orientation, opaque = _orientation(image), _on_white(image)
        return opaque if orientation is None else opaque.transpose(orientation)
    except (UnreadableImage, MemoryError):
        raise
    except UnidentifiedImageError:
        raise UnreadableImage("it is no PNG, JPEG, WebP or GIF file") from None
    except Exception as error:  # decoders raise anything
        raise UnreadableImage(f"its file is damaged or cut off ({error})"[:300]) from None


def _check_header(image: Image.Image, max_pixels: int) -> None:
    """Refuse by what the file says of itself, before anything is decoded."""
    width, height = image.size
    if not isinstance(image, _OPENED):
        raise UnreadableImage("it is no PNG, JPEG, WebP or GIF file")
    if width < 1 or height < 1:
        raise UnreadableImage("it has no pixels")
    if width * height > max_pixels:
        raise UnreadableImage(f"it has {width} x {height} pixels, and at most {max_pixels:,} are read: scale it down")
    # A GIF's frames would all have to be read to be counted: its first one is taken.
    if isinstance(image, PngImageFile | WebPImageFile) and getattr(image, "is_animated", False):
        raise UnreadableImage("it is animated: send one of its frames as an image of its own")


def _check_png_chunks(data: bytes) -> None:
    """Refuse a PNG file of very many chunks, which take far longer to read than their bytes.

    The image ends with its IEND chunk: what follows is never read."""
    if not data.startswith(_PNG_MAGIC):
        return
    at, n_chunks = len(_PNG_MAGIC), 0
    while at + 8 <= len(data):
        n_chunks += 1
        if n_chunks > MAX_PNG_CHUNKS:
            raise UnreadableImage(f"its file has more than {MAX_PNG_CHUNKS:,} chunks: save it anew")
        length, kind = struct.unpack_from(">I4s", data, at)
        if kind == b"IEND":
            return
        at += length + 12


def _orientation(image: Image.Image) -> Image.Transpose | None:
    """Return the transpose that turns the image upright. Returns None if the image stands upright, or if its EXIF data
    cannot be read."""
    try:
        return _TRANSPOSES.get(image.getexif().get(_ORIENTATION, 1))
    except MemoryError:
        raise
    except Exception:  # data of a stranger that the picture does not need
        return None


def _on_white(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):  # Pillow would clip 16 bits of grey to 8: the high bytes are the picture
        high = 0 if image.mode.endswith("B") else 1
        return Image.frombytes("L", image.size, image.tobytes()[high::2]).convert("RGB")
    if image.mode not in _HAS_ALPHA and "transparency" not in image.info:
        return image.convert("RGB")
    layers = image.convert("RGBA")
    white = Image.new("RGB", image.size, (255, 255, 255))
    white.paste(layers, mask=layers.getchannel("A"))
    return white


def _import_codecs() -> None:
    """Read a file of each kind, so that all that Pillow imports on the way is in memory."""
    for kind in FORMATS:
        for mode in ("P", "RGBA") if kind != "JPEG" else ("L", "CMYK"):
            file = BytesIO()
            Image.new(mode, (2, 2)).save(file, kind)
            read_image(file.getvalue(), 4)


_import_codecs()
