"""The predictors of examples/, with their packages from the index: speech, where it is, text in images."""

from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image, ImageDraw, ImageFont

from emberline.predictor import environments
from emberline.predictor.environments import Environment
from emberline.predictor.versions import PredictorVersions
from emberline.protocol.prediction import Resources
from emberline.supervisor.sandbox.protections import find_protections
from tests.predictor.conftest import ENVIRONMENTS
from tests.predictor.test_serving import push_folder, serving

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not find_protections().bubblewrap, reason="needs bubblewrap: it is not here"),
]

EXAMPLES = Path(__file__).parents[2] / "examples" / "predictors"
RESOURCES = Resources(cpus=2.0, setup_s=200.0, predict_s=300.0)


def shared_build(root: Path, requirements: Sequence[str], python: str, on_line: Callable[[str], None]) -> Environment:
    """Environments are kept on the machine: they have hundreds of megabytes."""
    return environments.build(ENVIRONMENTS, requirements, python, on_line)


async def test_speech_is_made_and_found(tmp_path: Path) -> None:
    versions = PredictorVersions(tmp_path / "home", shared_build)
    for name in ("speech", "voice-activity"):
        push_folder(versions, tmp_path, EXAMPLES / name, name=name, resources=RESOURCES)
    async with serving(versions, tmp_path, ["speech", "voice-activity"]) as server:
        spoken = await server.run("speech", text="Hello world. The lighthouse is bright tonight.")
        assert spoken.headers["content-type"] == "audio/wav", spoken.text
        wave = {"content-type": "audio/wav"}
        heard = await server.http.post("/run/@me/voice-activity", content=spoken.content, headers=wave)
        segments = heard.json()["result"]
        assert len(segments) == 2, "two sentences with a pause between them"
        assert sum(each["end"] - each["start"] for each in segments) > 1.5


async def test_text_in_an_image_is_read(tmp_path: Path) -> None:
    versions = PredictorVersions(tmp_path / "home", shared_build)
    push_folder(versions, tmp_path, EXAMPLES / "ocr", name="ocr", resources=RESOURCES)
    image = Image.new("RGB", (640, 120), "white")
    ImageDraw.Draw(image).text((20, 30), "EMBERLINE 2026", fill="black", font=ImageFont.load_default(40))
    file = BytesIO()
    image.save(file, "PNG")
    async with serving(versions, tmp_path, ["ocr"]) as server:
        png = {"content-type": "image/png"}
        answer = await server.http.post("/run/@me/ocr", content=file.getvalue(), headers=png)
        assert answer.json()["result"]["text"] == "EMBERLINE 2026", answer.text
