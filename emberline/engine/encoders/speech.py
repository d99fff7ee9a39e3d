"""Speech to text with Whisper models in CTranslate2's format, computed by faster-whisper (`emberline[speech]`).

Audio is untrusted: it is decoded here, in the engine's process, from memory only, in the formats that are listed and
within the seconds that were admitted.
"""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emberline.protocol.errors import BadInput
from emberline.protocol.speech import TimedWord, TranscribeParams, TranscriptSegment
from emberline.weights.whisper_files import MISSING_LIBRARY

SAMPLE_RATE = 16_000
MIN_SAMPLE_RATE, MAX_SAMPLE_RATE = 4_000, 768_000  # of audio that is sent: the cost of resampling grows with the ratio
Samples = NDArray[np.int16]
# FFmpeg's names. Playlists and other formats that name further files are not among them.
_FORMATS = "aac,ac3,aiff,amr,asf,au,caf,flac,flv,matroska,webm,mov,mp4,m4a,3gp,mp3,mpeg,mpegts,ogg,opus,w64,wav"


def decode_audio(audio: bytes, max_ms: int) -> Iterator[Samples]:
    """Mono samples at SAMPLE_RATE, in pieces. BadInput for what is not audio or is longer than `max_ms`."""
    try:
        import av
    except ImportError:
        raise BadInput(MISSING_LIBRARY) from None
    n_samples, most = 0, max_ms * SAMPLE_RATE // 1000
    # No protocol: what is inside the file must not make FFmpeg open anything else.
    options = {"protocol_whitelist": "none", "format_whitelist": _FORMATS}
    try:
        with av.open(io.BytesIO(audio), mode="r", options=options, metadata_errors="ignore") as container:
            if not container.streams.audio:
                raise BadInput("the file has no audio in it", param="file")
            if container.duration is not None and container.duration // 1000 > max_ms:
                raise _too_long(max_ms)
            resampler = av.AudioResampler(format="s16", layout="mono", rate=SAMPLE_RATE)
            for frame in _frames(container, av):
                if frame is not None and not MIN_SAMPLE_RATE <= frame.sample_rate <= MAX_SAMPLE_RATE:
                    raise BadInput(f"the audio has {frame.sample_rate:,} samples a second: convert it", param="file")
                for resampled in resampler.resample(frame):
                    piece = resampled.to_ndarray().reshape(-1).astype(np.int16, copy=False)
                    n_samples += len(piece)
                    if n_samples > most:
                        raise _too_long(max_ms)
                    yield piece
    except (av.FFmpegError, ValueError, EOFError) as error:
        raise BadInput(f"this is not audio that can be decoded: {_reason(error)}", param="file") from None
    if not n_samples:
        raise BadInput("the audio is empty", param="file")


def _frames(container: Any, av: Any) -> Iterator[Any]:
    """All frames; packets that are damaged are skipped. At the end None: what the resampler holds."""
    for packet in container.demux(audio=0):
        try:
            yield from packet.decode()
        except av.InvalidDataError:
            continue
    yield None


def _reason(error: BaseException) -> str:
    text = getattr(error, "strerror", None) or str(error)
    return text[:200] or type(error).__name__


def _too_long(max_ms: int) -> BadInput:
    return BadInput(
        f"the audio is longer than {max_ms // 1000:,} s, the most for a file of its size: cut it", param="file"
    )


class Transcriber:
    """A loaded model. Not safe for several threads."""

    def __init__(self, folder: Path, device: str, threads: int) -> None:
        try:
            from faster_whisper import WhisperModel
        except ImportError:
            raise BadInput(MISSING_LIBRARY) from None
        compute = "int8" if device == "cpu" else "float16"
        kind = device.partition(":")[0]
        try:
            self._model = WhisperModel(str(folder), device=kind, compute_type=compute, cpu_threads=threads)
        except (RuntimeError, ValueError, OSError) as error:
            raise BadInput(f"{folder} is not a Whisper model in CTranslate2's format: {error}") from None

    @property
    def is_multilingual(self) -> bool:
        return bool(self._model.model.is_multilingual)

    @property
    def languages(self) -> list[str]:
        return list(self._model.supported_languages)

    def transcribe(self, samples: Samples, params: TranscribeParams) -> tuple[str, float, Iterator[TranscriptSegment]]:
        """The language, its probability, and the segments, each computed when it is asked for."""
        fallback = [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]  # tried while the text repeats itself or is unlikely
        segments, info = self._model.transcribe(
            samples.astype(np.float32) / 32768.0,
            language=params.language,
            task="translate" if params.translate else "transcribe",
            initial_prompt=params.prompt or None,
            temperature=params.temperature or fallback,
            word_timestamps=params.words,
        )
        return info.language, float(info.language_probability), map(_segment, segments)


def _segment(segment: Any) -> TranscriptSegment:
    return TranscriptSegment(
        start_s=float(segment.start),
        end_s=float(segment.end),
        text=segment.text,
        words=tuple(TimedWord(word.word, float(word.start), float(word.end)) for word in segment.words or ()),
        tokens=tuple(segment.tokens),
        temperature=float(segment.temperature or 0.0),
        avg_logprob=float(segment.avg_logprob),
        compression_ratio=float(segment.compression_ratio),
        no_speech_prob=float(segment.no_speech_prob),
    )
