"""Prefill/decode disaggregation with two real vLLM servers behind the balancer. The tests build on each other."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from emberline.accounts.usage_ledger import UsageLedger
from emberline.balancer.admission_controller import AdmissionController
from emberline.balancer.balancer import Balancer
from emberline.balancer.endpoint import Endpoint
from emberline.cluster.served_models import ServedModels
from emberline.protocol.complete_response import Answer
from emberline.protocol.events import TextDelta
from emberline.protocol.request import GenerateRequest, Message, Principal, SamplingParams
from emberline.protocol.route_request import Route, RouteRequest
from emberline.service.core import LocalCore
from emberline.service.event_collector import collect_answer
from emberline.service.responses import DatabaseResponses
from emberline.service.service import Service
from emberline.service.sessions import Sessions
from emberline.service.work import Work
from emberline.store import open_store
from emberline.text.grammar.compiler_pool import GrammarCompiler
from emberline.upstream.models import UpstreamModels
from emberline.upstream.servers.client import UpstreamClient, UpstreamConfig
from tests.peers.vllm import MODEL, VllmServer

pytestmark = pytest.mark.timeout(1200)

BLOCK = 128  # tokens of a KV block on a CPU
N_TOKENS = 12
PRINCIPAL = Principal("tenant", salt=b"s" * 16)
PROMPTS = [
    f"Here are the minutes of meeting number {number}. "
    + "The members met, spoke, voted and went home again. " * 24
    + "Write one sentence about it."
    for number in range(8)
]


class PairAdmission(AdmissionController):
    """Routes to the pair while both are available, and to the prefill server alone without decode."""

    async def admit(self, ask: RouteRequest) -> Route:
        await super().admit(ask)
        if "decode" in ask.avoid:
            return Route(decode="spare")
        return Route(decode="decode", prefill="" if "prefill" in ask.avoid else "prefill")


class Setup:
    def __init__(self, service: Service, core: LocalCore) -> None:
        self.service = service
        self.core = core

    async def answer(self, number: int, request_id: str) -> Answer:
        return await collect_answer(self.service.run(Work(request(number, request_id), PRINCIPAL)))


def request(number: int, request_id: str, n_tokens: int = N_TOKENS) -> GenerateRequest:
    sampling = SamplingParams(temperature=0, max_tokens=n_tokens)
    messages = (Message("user", PROMPTS[number]),)
    return GenerateRequest(id=request_id, model=MODEL, messages=messages, sampling=sampling)


@pytest.fixture
async def setup(pair: dict[str, VllmServer], tmp_path: Path) -> AsyncIterator[Setup]:
    endpoints = [
        Endpoint(name="prefill", address=pair["prefill"].url, role="prefill", kind="vllm", models=(MODEL,)),
        Endpoint(name="decode", address=pair["decode"].url, role="decode", kind="vllm", models=(MODEL,)),
        Endpoint(name="spare", address=pair["prefill"].url, role="both", kind="vllm", models=(MODEL,)),
    ]
    upstreams = [UpstreamClient(UpstreamConfig(endpoint=endpoint)) for endpoint in endpoints]
    store = await open_store(tmp_path / "db")
    core = LocalCore(PairAdmission(Balancer()), upstreams, UsageLedger(store), Sessions(), DatabaseResponses(store, 30))
    models = UpstreamModels(upstreams)
    models.start(watch=True)

    async def close_core() -> None:
        return None

    service = Service(core, ServedModels(), {}, close_core, GrammarCompiler(), models)
    for upstream in upstreams:
        assert await upstream.wait_connected(60)
    yield Setup(service, core)
    await service.close()
    await store.close()


def alone(server: VllmServer, number: int, n_tokens: int = N_TOKENS) -> str:
    """The reply of a single server; a fresh salt avoids its prefix cache."""
    messages = [{"role": "user", "content": PROMPTS[number]}]
    body = {"messages": messages, "max_tokens": n_tokens, "cache_salt": f"alone-{time.monotonic_ns()}"}
    text = server.ask(body)["choices"][0]["message"]["content"]
    assert isinstance(text, str)
    return text


async def test_pair_matches_a_single_server_and_reports_cached_tokens(
    pair: dict[str, VllmServer], setup: Setup
) -> None:
    expected = await asyncio.to_thread(alone, pair["decode"], 0)
    first = await setup.answer(0, "first")
    second = await setup.answer(0, "second")
    assert first.choices[0].text == second.choices[0].text == expected
    assert first.usage.cached_tokens == 0
    n_prompt = first.usage.prompt_tokens
    assert n_prompt > 2 * BLOCK
    assert second.usage.cached_tokens == (n_prompt - 1) // BLOCK * BLOCK
    assert first.usage.completion_tokens == N_TOKENS
    cached = (first.usage.cached_tokens, second.usage.cached_tokens)
    print(f"\nprompt {n_prompt} tokens, cached {cached}: {expected!r}")


async def test_decode_fetches_kv_instead_of_computing(pair: dict[str, VllmServer], setup: Setup) -> None:
    """The decode server computes only the prompt tokens that the transfer left over."""
    before = pair["decode"].metric("prompt_tokens_total")
    computed = pair["prefill"].metric("prompt_tokens_total")
    found = await setup.answer(1, "fetched")
    assert pair["prefill"].metric("prompt_tokens_total") - computed == found.usage.prompt_tokens
    print(f"\ndecode counted {pair['decode'].metric('prompt_tokens_total') - before} prompt tokens")
    loads = [setup.service.upstream.clients[name].load for name in ("prefill", "decode")]
    assert all(load.kv_total_blocks > 0 for load in loads)


async def test_cancelled_request_leaves_no_block_leased(pair: dict[str, VllmServer], setup: Setup) -> None:
    for delay_s in (0.5, 1.5, 3.0):
        task = asyncio.create_task(setup.answer(2, f"left-{delay_s}"))
        await asyncio.sleep(delay_s)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    deadline_s = time.monotonic() + 25  # the lease would end after 30 s or more
    while (used := [pair[name].metric("kv_cache_usage_perc") for name in pair]) != [0.0, 0.0]:
        assert time.monotonic() < deadline_s, used
        await asyncio.sleep(0.5)


async def test_stream_survives_death_of_decode(pair: dict[str, VllmServer], setup: Setup) -> None:
    expected = await asyncio.to_thread(alone, pair["prefill"], 3, 30)
    text, killed = "", False
    async for event in setup.service.run(Work(request(3, "dies", 30), PRINCIPAL)):
        if isinstance(event, TextDelta):
            text += event.text
            if not killed and len(text) > len(expected) // 3:
                killed = True
                await asyncio.to_thread(pair["decode"].kill)
    assert killed
    assert text == expected
    pair["decode"].start()
    await asyncio.to_thread(pair["decode"].wait_ready)


async def test_decode_computes_the_prompt_when_prefill_dies(pair: dict[str, VllmServer], setup: Setup) -> None:
    expected = await asyncio.to_thread(alone, pair["decode"], 4)
    task = asyncio.create_task(setup.answer(4, "orphan"))
    await asyncio.sleep(0.7)  # the prompt takes several seconds
    await asyncio.to_thread(pair["prefill"].kill)
    found = await task
    assert found.choices[0].text == expected
    assert (await setup.answer(5, "after")).choices[0].text != ""
    assert not list(setup.core.admission.balancer.ledger)
