"""What happens around the answers: clients that leave, many at once, the health and the numbers."""

import json
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from tests.lazy_modules import openai

MODEL = "smollm2"
N_STORIES = 4


def load(server: str) -> dict[str, int]:
    with urllib.request.urlopen(f"{server}/health") as answer:
        return json.load(answer)["detail"]["engines"][0]["load"]


def wait_until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def test_a_client_that_leaves_stops_its_work(server: str) -> None:
    client = openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0)
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Count for ever."}],
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    wait_until(lambda: load(server)["running"] == 1)
    stream.close()
    wait_until(lambda: (now := load(server))["running"] == now["kv_used_blocks"] == 0)


def test_concurrent_requests_get_the_same_tokens_as_alone(server: str) -> None:
    client = openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0)

    def ask(i: int) -> str:
        answer = client.completions.create(
            model=MODEL, prompt=f"Story number {i}: once upon a time", seed=i, max_tokens=8, temperature=0.8
        )
        return answer.choices[0].text

    alone = [ask(i) for i in range(N_STORIES)]
    with ThreadPoolExecutor(N_STORIES) as pool:
        assert list(pool.map(ask, range(N_STORIES))) == alone


def test_metrics_count_tokens(server: str) -> None:
    def total() -> float:
        with urllib.request.urlopen(f"{server}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:generation_tokens_total"))

    before = total()
    client = openai.OpenAI(base_url=f"{server}/v1", api_key="none")
    usage = client.completions.create(model=MODEL, prompt="Hello", max_tokens=5, extra_body={"ignore_eos": True}).usage
    assert total() - before == usage.completion_tokens == 5
