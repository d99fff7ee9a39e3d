"""Decoding of audio that nobody has checked."""

import io
import struct

import pytest

from emberline.engine.speech import SAMPLE_RATE, Samples, decode_audio
from emberline.protocol.errors import BadInput
from emberline.protocol.speech import MAX_AUDIO_S, max_audio_ms

av = pytest.importorskip("av")
HOUR_MS = 3_600_000


def wav(seconds: float, rate: int = 8000) -> bytes:
    data = bytes(2 * int(seconds * rate))
    head = struct.pack("<IHHIIHH", 16, 1, 1, rate, rate * 2, 2, 16)
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
