"""Decoding of audio that nobody has checked."""

import io
import struct
from collections.abc import Iterator

import pytest

from emberline.engine.encoders import speech
from emberline.engine.encoders.speech import SAMPLE_RATE, Samples, decode_audio
from emberline.protocol.errors import BadInput
from emberline.protocol.speech import MAX_AUDIO_S, max_audio_ms

av = pytest.importorskip("av")
HOUR_MS = 3_600_000


def wav(seconds: float, rate: int = 8000) -> bytes:
    data = bytes(2 * int(seconds * rate))
    head = struct.pack("<IHHIIHH", 16, 1, 1, rate, min(rate * 2, (1 << 32) - 1), 2, 16)
    return (
        b"RIFF" + struct.pack("<I", 36 + len(data)) + b"WAVEfmt " + head + b"data" + struct.pack("<I", len(data)) + data
    )


def flac(seconds: int) -> bytes:
    """Silence takes next to no space, so a small file can be hours long."""
    out = io.BytesIO()
    with av.open(out, "w", format="flac") as container:
        stream = container.add_stream("flac", rate=8000, layout="mono")
        frame = av.AudioFrame(format="s16", layout="mono", samples=8000)
        frame.planes[0].update(bytes(16_000))
        frame.rate = 8000
        for second in range(seconds):
            frame.pts = second * 8000
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return out.getvalue()


def test_audio_is_resampled() -> None:
    assert sum(map(len, decode_audio(wav(1.5), HOUR_MS))) == pytest.approx(1.5 * SAMPLE_RATE, abs=200)


@pytest.mark.parametrize(
    "audio", [b"hello" * 100, bytes(1000), b"RIFF", b"\xff" * 5000, b"\x89PNG\r\n\x1a\n" + bytes(99)]
)
def test_what_is_not_audio(audio: bytes) -> None:
    with pytest.raises(BadInput, match="not audio that can be decoded"):
        list(decode_audio(audio, HOUR_MS))


def test_a_damaged_packet_costs_itself_and_not_the_rest() -> None:
    audio = bytearray(flac(30))
    middle = audio.index(b"\xff\xf8", len(audio) // 2)  # where a frame begins
    audio[middle + 4 : middle + 8] = b"\xff\xff\xff\xff"
    assert sum(map(len, decode_audio(bytes(audio), HOUR_MS))) > 28 * SAMPLE_RATE
    frames = FakeContainer([[1], None, [2, 3], []])
    assert list(speech._frames(frames, av)) == [1, 2, 3, None]


class FakeContainer:
    """Packets of frames; None: one that is damaged."""

    def __init__(self, packets: list[list[int] | None]) -> None:
        self._packets = packets

    def demux(self, audio: int) -> Iterator["FakeContainer"]:
        for packet in self._packets:
            yield FakeContainer([packet])

    def decode(self) -> list[int]:
        (packet,) = self._packets
        if packet is None:
            raise av.InvalidDataError(1, "damaged")
        return packet


@pytest.mark.parametrize("rate", [100, 30_000_001, (1 << 31) - 1])
def test_no_resampling_that_would_take_minutes(rate: int) -> None:
    with pytest.raises(BadInput, match=f"{rate:,} samples a second"):
        list(decode_audio(wav(1000 / rate, rate), HOUR_MS))


def test_playlists_open_no_files(tmp_path: object) -> None:
    """FFmpeg's demuxers for playlists would read what the playlist names."""
    secret = f"{tmp_path}/secret.wav"
    with open(secret, "wb") as file:
        file.write(wav(1))
    hls = f"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\nfile://{secret}\n#EXT-X-ENDLIST\n"
    for playlist in (hls, f"ffconcat version 1.0\nfile '{secret}'\n", f"#EXTM3U\n{secret}\n"):
        with pytest.raises(BadInput, match="not audio that can be decoded"):
            list(decode_audio(playlist.encode(), HOUR_MS))


def test_long_audio_is_refused_before_all_of_it_is_decoded() -> None:
    audio = flac(400)
    decoded: list[Samples] = []
    with pytest.raises(BadInput, match="longer than 60 s"):
        decoded.extend(decode_audio(audio, 60_000))
    assert sum(map(len, decoded)) <= 60 * SAMPLE_RATE


def test_the_bound_follows_from_the_size() -> None:
    assert max_audio_ms(bytes(1 << 20)) == 1000 * MAX_AUDIO_S
    assert max_audio_ms(bytes(1250)) == 11_000


def test_a_video_without_sound_and_an_empty_file() -> None:
    with pytest.raises(BadInput):
        list(decode_audio(b"", HOUR_MS))
    with pytest.raises(BadInput, match="empty"):
        list(decode_audio(wav(0), HOUR_MS))
