"""A model whose chat template runs in a confined process, behind the whole service."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from emberline.protocol.errors import BadInput
from emberline.service.service_factory import open_service
from emberline.supervisor.sandbox.confinement import Confinement
from emberline.supervisor.sandbox.launcher import Launcher
from emberline.text.chat_template import ChatTemplate
from emberline.text.template_processes import ConfinedTemplates
from emberline.text.template_renderer import LocalRenderer, Turn
from emberline.text.text_model import TextModel
from tests.service.conftest import offer
from tests.service.fake_engine import FakeEngine
from tests.service.test_service import PATIENCE_S, ask, events_of, text_of

ENDLESS = "{% if messages[0].content == 'endless' %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
ENDLESS += "{% endfor %}{% endif %}"


async def test_an_endless_template_fails_its_request_and_stalls_no_other(
    text_model: TextModel, engine: FakeEngine, tmp_path: Path
) -> None:
    templates = ConfinedTemplates(Launcher(Confinement(memory_bytes=128 << 20)).start, cpu_s=0.3)
    template = ChatTemplate(ENDLESS + text_model.template.source, {"eos_token": "<|end|>"}, templates)
    foreign = TextModel(text_model.tokenizer, template)
    service = await open_service([offer(foreign, engine)], data_dir=tmp_path / "data")
    try:
        assert await service.ready(PATIENCE_S)
        endless = asyncio.create_task(events_of(service, ask("endless")))
        assert text_of(await events_of(service, ask())) == "Hello!", (
            "another request passes it, so the event loop goes on"
        )
        with pytest.raises(BadInput, match=r"the model's chat template was stopped: it ran for more than 0.3 seconds"):
            await endless
        (first, *_) = engine.submitted
        assert first.prompt_ids == text_model.encode(text_model.render(ask().messages or ()), special=True), (
            "the prompt is what the template makes of it here"
        )
    finally:
        await service.close()


async def test_a_prompt_that_is_cut_is_rendered_off_the_event_loop(
    text_model: TextModel, engine: FakeEngine, tmp_path: Path
) -> None:
    threads: set[int] = set()

    class Elsewhere(LocalRenderer):
        blocks = True

        def render(self, turns: list[Turn], values: dict[str, Any]) -> str:
            threads.add(threading.get_ident())
            return super().render(turns, values)

    template = ChatTemplate(text_model.template.source, {"eos_token": "<|end|>"}, Elsewhere)
    service = await open_service([offer(TextModel(text_model.tokenizer, template), engine)], data_dir=tmp_path / "data")
    try:
        assert await service.ready(PATIENCE_S)
        cut = msgspec.structs.replace(ask("word " * 40), truncate=True, context_len=16)
        assert text_of(await events_of(service, cut)) == "Hello!"
        assert len(engine.submitted[0].prompt_ids) < 4 * 16
        assert threads, "the template was used"
        assert threading.get_ident() not in threads
    finally:
        await service.close()
