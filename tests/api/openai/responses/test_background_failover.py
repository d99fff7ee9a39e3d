"""A background response streamed by the official client while the server is killed repeatedly."""

from pathlib import Path
from typing import Any

import pytest

from tests.api.server_process import Running, make_home, serving
from tests.lazy_modules import openai

N_TOKENS = 240
N_SEEN = (8, 4)  # events before each death; a third one would make it a dead letter
SCRIPT = "say=count,itl_ms=20"
ENDS = ("response.completed", "response.failed", "response.incomplete")
ASK: dict[str, Any] = {"model": "smollm2", "input": "Count.", "max_output_tokens": N_TOKENS}


@pytest.fixture
def home(smollm2: Path, tmp_path: Path) -> Path:
    return make_home(smollm2, tmp_path)


def client_of(server: Running) -> "openai.OpenAI":
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def watch(server: Running, seen: list[Any], most: int) -> None:
    """Resume the stream; at most `most` events."""
    client = client_of(server)
    if not seen:
        events = client.responses.create(**ASK, background=True, stream=True)
    else:
        last = seen[-1].sequence_number
        events = client.responses.retrieve(seen[0].response.id, stream=True, starting_after=last)
    seen += [event for event, _ in zip(events, range(most), strict=False)]


@pytest.mark.slow  # test_background_stream has it in one process
def test_no_event_is_lost_or_repeated(home: Path) -> None:
    """Events arrive as they are generated, and a client that resumes after each death gets every one once."""
    seen: list[Any] = []
    for n_events in N_SEEN:
        with serving(home, SCRIPT, 8, "--http-workers", "2") as server:
            watch(server, seen, n_events)
            server.kill()
    assert seen[-1].type not in ENDS
    with serving(home, SCRIPT, 8, "--http-workers", "2") as server:
        client = client_of(server)
        watch(server, seen, 10_000)
        sync = client.responses.create(**ASK)
        whole = client.responses.retrieve(seen[0].response.id)
        again = list(client.responses.retrieve(whole.id, stream=True))
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    assert [event.to_dict() for event in seen] == [event.to_dict() for event in again]
    assert seen[-1].response.to_dict() == whole.to_dict()
    assert whole.output_text == sync.output_text
    assert whole.usage is not None
    assert sync.usage is not None
    assert whole.usage.output_tokens == sync.usage.output_tokens == N_TOKENS
