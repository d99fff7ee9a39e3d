"""Speech to text with real weights, as a user has it: `emberline serve whisper-tiny-en`."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest

from emberline.catalog import wheels
from emberline.catalog.model_card import Wheel, WheelPart, WheelSource
from tests.conftest import pulled
from tests.lazy_modules import skip_without

pytestmark = pytest.mark.slow
skip_without("faster_whisper")

MODEL = "@cf/openai/whisper-tiny-en"
RECORDING = WheelSource(  # ten seconds, from Beckett's Worstward Ho
    {"beckett.wav": "e5a26b3d29e5b0bc8dbd72c11d16a3808a4ec0ac45b21f12a27d2a2fe5c5ae61"},
    (
        Wheel(
            "moonshine-voice==0.0.49",
            57_668_161,
            (WheelPart("beckett.wav", "moonshine_voice/assets/beckett.wav", 318_978),),
        ),
    ),
)


@pytest.fixture(scope="module")
def recording() -> bytes:
    cache = pulled("whisper-tiny-en").parent.parent / "recordings"
    return wheels.fetch(RECORDING, cache).read_bytes()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    home, model = tmp_path_factory.mktemp("home"), pulled("whisper-tiny-en")
    (home / "models").mkdir()
    (home / "models" / model.name).symlink_to(model)
    command = [sys.executable, "-m", "emberline.cli.main", "serve", "whisper-tiny-en", "--port", "0", "--json"]
    server = subprocess.Popen(
        [*command, "--http-workers", "2"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "EMBERLINE_HOME": str(home)},
        start_new_session=True,
    )
    assert server.stdout is not None
    try:
        yield json.loads(server.stdout.readline())["url"]
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)
        server.stdout.close()


def test_a_recording_is_transcribed(url: str, recording: bytes) -> None:
    with httpx.Client(base_url=url, timeout=300, trust_env=False) as client:
        native = client.post(f"/client/v4/accounts/acme/ai/run/{MODEL}", content=recording).json()["result"]
        assert native["text"] == "Ever tried. Ever failed. No matter. Try again. Fail again. Fail better."
        assert native["word_count"] == 12
        starts = [word["start"] for word in native["words"]]
        assert starts == sorted(starts)
        assert native["transcription_info"]["duration"] == pytest.approx(9.96, abs=0.01)
        files = {"file": ("beckett.wav", recording)}
        answer = client.post("/v1/audio/transcriptions", data={"model": MODEL, "response_format": "srt"}, files=files)
        assert answer.text.startswith("1\n00:00:00,000 --> ")


@pytest.mark.parametrize("content", [b"this is not audio" * 99, b"RIFF" + bytes(5000)])
def test_what_is_not_audio_is_refused_and_the_model_survives(url: str, content: bytes, recording: bytes) -> None:
    with httpx.Client(base_url=url, timeout=300, trust_env=False) as client:
        refused = client.post(f"/client/v4/accounts/acme/ai/run/{MODEL}", content=content)
        assert refused.status_code == 400
        assert "not audio" in refused.json()["errors"][0]["message"]
        data, files = {"model": MODEL}, {"file": ("beckett.wav", recording)}
        refused = client.post("/v1/audio/translations", data=data, files=files)
        assert refused.status_code == 400
        assert "cannot translate" in refused.json()["error"]["message"]
        assert client.post("/v1/audio/transcriptions", data=data, files=files).status_code == 200
