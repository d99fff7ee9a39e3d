"""Whisper models in CTranslate2's format: a folder with model.bin, config.json and the vocabulary."""

import hashlib
from pathlib import Path

import msgspec

from emberline.weights.model_config import BadCheckpoint

WEIGHTS = "model.bin"
CONTEXT_LEN = 448  # tokens of a segment's text
LIBRARY = "faster_whisper"  # which computes them
MISSING_LIBRARY = "speech to text needs faster-whisper: pip install 'emberline[speech]'"
_SAMPLE_BYTES = 1 << 16  # hashed at the start, middle and end of the weights


class WhisperFiles(msgspec.Struct, frozen=True):
    """Facts that the files tell without loading the weights."""

    fingerprint: str
    vocab_size: int


def is_whisper(folder: Path) -> bool:
    """CTranslate2's configurations name neither an architecture nor a type; Whisper's alone has these keys."""
    if not (folder / WEIGHTS).is_file():
        return False
    try:
        config = msgspec.json.decode((folder / "config.json").read_bytes(), type=dict[str, msgspec.Raw])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return False
    return "suppress_ids_begin" in config


def read_whisper(folder: Path) -> WhisperFiles:
    try:
        vocabulary = next(path for name in ("vocabulary.txt", "vocabulary.json") if (path := folder / name).is_file())
        digest = hashlib.blake2b((folder / "config.json").read_bytes(), digest_size=16)
        with (folder / WEIGHTS).open("rb") as file:
            n_bytes = file.seek(0, 2)
            digest.update(str(n_bytes).encode())
            for start in (0, n_bytes // 2, max(0, n_bytes - _SAMPLE_BYTES)):
                file.seek(start)
                digest.update(file.read(_SAMPLE_BYTES))
        return WhisperFiles(digest.hexdigest(), max(1, vocabulary.read_bytes().count(b"\n")))
    except StopIteration:
        raise BadCheckpoint(f"{folder.name} has no vocabulary.txt") from None
    except OSError as error:
        raise BadCheckpoint(f"{folder.name}: {error.strerror or error}") from None
