"""A picture in, and a picture, a sound and a note out: what a form has to show. Standard library alone."""

import math
import struct
import wave
import zlib

from cog import BaseModel, BaseRunner, Input, Path


class Output(BaseModel):
    picture: Path
    tone: Path
    note: str


class Runner(BaseRunner):
    def run(
        self,
        image: Path = Input(description="Picture whose size sets the colour"),
        style: str = Input(description="How it is drawn", default="plain", choices=["plain", "striped"]),
        hertz: float = Input(description="Pitch of the tone", default=440, ge=50, le=4000),
        signed: bool = Input(description="Add the note", default=True),
        note: str = Input(default="With love"),
    ) -> Output:
        size = Path(image).stat().st_size % 256
        rows = b"".join(b"\0" + bytes([size, 80, 8 * y if style == "striped" else 0]) * 48 for y in range(32))
        head = struct.pack(">IIBBBBB", 48, 32, 8, 2, 0, 0, 0)
        chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
        picture = Path("/tmp/picture.png")
        picture.write_bytes(
            b"\x89PNG\r\n\x1a\n"
            + b"".join(struct.pack(">I", len(data)) + kind + data + _checksum(kind + data) for kind, data in chunks)
        )
        with wave.open("/tmp/tone.wav", "wb") as file:
            file.setparams((1, 2, 16000, 0, "NONE", ""))
            samples = (int(9000 * math.sin(2 * math.pi * hertz * n / 16000)) for n in range(8000))
            file.writeframes(b"".join(struct.pack("<h", sample) for sample in samples))
        print("drawn", style)
        self.record_metric("pixels", 48 * 32)
        return Output(picture=picture, tone=Path("/tmp/tone.wav"), note=note if signed else "")


def _checksum(data: bytes) -> bytes:
    return struct.pack(">I", zlib.crc32(data))
