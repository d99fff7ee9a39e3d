"""Transcripts as subtitles: SubRip and WebVTT."""

from emberline.protocol.speech import Transcript


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
