"""Transcripts in replies: timed words as JSON, and subtitles as SubRip and WebVTT."""

from collections.abc import Sequence
from typing import Any

from emberline.protocol.speech import TimedWord, Transcript


def words_body(words: Sequence[TimedWord]) -> list[dict[str, Any]]:
    return [{"word": word.word.strip(), "start": word.start_s, "end": word.end_s} for word in words]


def srt(transcript: Transcript) -> str:
    blocks = [
        f"{number}\n{_time(segment.start_s, ',')} --> {_time(segment.end_s, ',')}\n{_line(segment.text)}\n"
        for number, segment in enumerate(transcript.segments, 1)
    ]
    return "\n".join(blocks)


def vtt(transcript: Transcript) -> str:
    cues = [
        f"{_time(segment.start_s, '.')} --> {_time(segment.end_s, '.')}\n{_line(segment.text)}\n"
        for segment in transcript.segments
    ]
    return "\n".join(["WEBVTT\n", *cues])


def _line(text: str) -> str:
    """An arrow or an empty line would end the cue."""
    return " ".join(text.replace("-->", "->").split())


def _time(seconds: float, separator: str) -> str:
    ms = round(seconds * 1000)
    minutes, ms = divmod(ms, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02d}:{minutes:02d}:{ms // 1000:02d}{separator}{ms % 1000:03d}"
