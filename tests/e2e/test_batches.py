"""Batches on the real model through the official client: concurrent requests, results, cancellation, deletion."""

import json
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.lazy_modules import openai

MODEL = "smollm2"
N_LINES = 6


def line(n: int, **body: Any) -> str:
    asked = {"model": MODEL, "messages": [{"role": "user", "content": f"Say the number {n}."}], "max_tokens": 8}
    request = {"custom_id": f"c{n}", "method": "POST", "url": "/v1/chat/completions", "body": {**asked, **body}}
    return json.dumps(request)


def submit(client: "openai.OpenAI", lines: list[str]) -> Any:
    file = client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"for": "a test"}
    )


def ended(client: "openai.OpenAI", batch: Any) -> Any:
    end_s = time.monotonic() + 180
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        assert time.monotonic() < end_s, batch
        time.sleep(0.1)
        batch = client.batches.retrieve(batch.id)
    return batch


def results(client: "openai.OpenAI", file_id: str | None) -> dict[str, dict[str, Any]]:
    assert file_id is not None
    lines = [json.loads(text) for text in client.files.content(file_id).text.splitlines()]
    assert len({item["custom_id"] for item in lines}) == len(lines)
    return {item["custom_id"]: item for item in lines}


def test_a_batch_gets_what_requests_get(server: str) -> None:
    client = openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0)
    lines = [line(n, temperature=0) for n in range(N_LINES)] + [line(99, max_tokens=-1), "no json"]
    batch = submit(client, lines)

    def ask(n: int) -> str | None:
        question = f"Say the number {n}."
        answer = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": question}], max_tokens=8, temperature=0
        )
        return answer.choices[0].message.content

    with ThreadPoolExecutor(4) as pool:
        direct = list(pool.map(ask, range(N_LINES)))
    batch = ended(client, batch)
    counts = batch.request_counts
    assert (batch.status, counts.total, counts.completed, counts.failed) == ("completed", N_LINES + 2, N_LINES, 2)
    found = results(client, batch.output_file_id)
    said = [found[f"c{n}"]["response"]["body"]["choices"][0]["message"]["content"] for n in range(N_LINES)]
    assert said == direct
    assert found["c0"]["response"]["body"]["usage"]["completion_tokens"] > 0
    assert "c99" in results(client, batch.error_file_id)
    assert batch.metadata == {"for": "a test"}


def test_cancelling_stops_what_runs(server: str) -> None:
    client = openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0)
    batch = submit(client, [line(n, max_tokens=2000, ignore_eos=True) for n in range(4)])
    while not _load(server)["running"]:
        time.sleep(0.05)
    client.batches.cancel(batch.id)
    assert ended(client, batch).status == "cancelled"
    end_s = time.monotonic() + 180
    while _load(server)["running"] and time.monotonic() < end_s:
        time.sleep(0.05)
    assert _load(server)["running"] == 0


def test_a_background_response_is_watched_left_and_taken_up(server: str) -> None:
    client = openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0)
    ask: dict[str, Any] = {"model": MODEL, "input": "Tell a story.", "temperature": 0, "max_output_tokens": 20}
    sync = client.responses.create(**ask)
    seen: list[Any] = []
    with client.responses.create(**ask, background=True, stream=True) as events:
        for event in events:
            seen.append(event)
            if event.type == "response.output_text.delta":
                break  # the connection is cut
    response_id = seen[0].response.id
    while seen[-1].type != "response.incomplete":
        last = seen[-1].sequence_number
        with client.responses.retrieve(response_id, stream=True, starting_after=last) as events:
            seen += [event for event, _ in zip(events, range(9), strict=False)]
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    said = "".join(event.delta for event in seen if event.type == "response.output_text.delta")
    assert said == sync.output_text == client.responses.retrieve(response_id).output_text
    assert sum(event.type == "response.output_text.delta" for event in seen) > 1


def test_the_numbers_tell_of_it(server: str) -> None:
    with urllib.request.urlopen(f"{server}/metrics") as answer:
        text = answer.read().decode()
    assert 'emberline_queue_lines_total{event="completed"' in text
    assert "emberline_queue_dead_letters 0.0" in text
    with urllib.request.urlopen(f"{server}/api/queue") as answer:
        assert json.load(answer) == {"waiting": [], "n_dead": 0, "dead": []}


def _load(server: str) -> dict[str, int]:
    with urllib.request.urlopen(f"{server}/health") as answer:
        found: dict[str, int] = json.load(answer)["detail"]["engines"][0]["load"]
        return found
