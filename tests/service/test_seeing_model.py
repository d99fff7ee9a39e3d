"""A trained model that sees, behind the HTTP API: it names what pictures show that it never learned."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import torch

from benchmarks.seeing_model import QUESTIONS, Scenes, chat_body, render
from emberline.accounts.auth import Authenticator
from emberline.accounts.secret import Secret
from emberline.api.app import ApiSettings, App
from emberline.balancer.endpoint import Endpoint
from emberline.catalog.model_card import describe_path
from emberline.config import Config
from emberline.engine.worker.build import build
from emberline.engine.worker.main import parse_arguments
from emberline.engine.worker.socket_server import Server
from emberline.server.http_worker import open_images
from emberline.service import Served, open_service
from emberline.text.text_model import TextModel
from tests.service.conftest import PATIENCE_S

FOLDER, TOKEN = Path(__file__).parents[1] / "models" / "seeing", "token"
N_PICTURES = 4


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the API with an engine in a thread, and images decoded in confined processes."""
    flags = ["--threads", "1", "--kv-bytes", str(4 << 20), "--speculation", "off", "--max-running", "4"]
    arguments = parse_arguments(["--model", str(FOLDER), "--socket", "unix:e0", "--device", "cpu", *flags])
    loop, info, *_ = build(arguments)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "e0.sock"))
        listener.listen()
        threading.Thread(target=Server(listener, loop, info, TOKEN).run, daemon=True).start()
        endpoint = Endpoint(name="e0", address=f"unix:{tmp_path / 'e0.sock'}", token=TOKEN)
        served = Served(describe_path(FOLDER), TextModel.load(FOLDER), (endpoint,))
        service = await open_service([served], data_dir=tmp_path, images=open_images(Config(home=tmp_path)))
        try:
            assert await service.ready(PATIENCE_S)
            transport = httpx.ASGITransport(App(service, ApiSettings(auth=Authenticator(Secret("0" * 64), None))))
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
                yield client
        finally:
            await service.close()


async def test_a_served_model_sees(client: httpx.AsyncClient) -> None:
    generator = torch.Generator().manual_seed(5)
    scenes = Scenes.draw(N_PICTURES, generator, held_out=True)
    pictures = render(scenes, generator)

    async def ask(picture: int, question: str) -> str:
        answer = await client.post("/v1/chat/completions", json=chat_body(FOLDER.name, pictures[picture], question))
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["prompt_tokens_details"]["image_tokens"] == 16
        text: str = answer.json()["choices"][0]["message"]["content"]
        return text.strip()

    said = await asyncio.gather(*(ask(n, QUESTIONS[0]) for n in range(N_PICTURES)))
    assert said == [scenes.answer(n, 0) for n in range(N_PICTURES)]
    assert len(set(said)) == N_PICTURES
