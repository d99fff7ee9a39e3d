"""Budgets of a request that are counted exactly: calls, JSON passes and look-ups on the core's event loop."""

import asyncio
import json
import tomllib
from pathlib import Path

import msgspec
import pytest

from benchmarks.core_calls import PACKAGE, Profile, counts, profiled, request_profiles
from emberline.api.http.wire import decode
from emberline.text.text_model import TextModel

BUDGET = tomllib.loads((Path(__file__).parent / "request_budget.toml").read_text())


@pytest.fixture(scope="module")
def profiles(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Profile]:
    """Profiles of every kind of request; the model lends its tokenizer."""
    most_calls = {kind: limits["calls"] for kind, limits in BUDGET.items() if "calls" in limits}
    return asyncio.run(request_profiles(TextModel.load(smollm2), tmp_path_factory.mktemp("core"), most_calls))


def test_requests_stay_within_their_budgets(profiles: dict[str, Profile]) -> None:
    found = counts(profiles)
    assert found.keys() == BUDGET.keys()
    for kind, limits in BUDGET.items():
        assert found[kind].keys() == limits.keys()
        for name, limit in limits.items():
            assert found[kind][name] <= limit, (
                f"a {kind} request costs {found[kind][name]} {name}, request_budget.toml allows {limit}: "
                "`python -m benchmarks.core_calls --list` shows every function; make it cheaper instead of raising this"
            )
            assert found[kind][name] >= limit * 0.9, (
                f"a {kind} request costs only {found[kind][name]} {name}: lower {limit} in request_budget.toml"
            )


def test_a_request_passes_through_the_whole_core(profiles: dict[str, Profile]) -> None:
    for kind, files in {
        "local": ["api/app.py", "service/request_run.py", "cluster/engine_client.py", "balancer/balancer.py"],
        "relayed": ["api/app.py", "service/request_run.py", "upstream/transport.py", "accounts/usage_ledger.py"],
        "gateway": ["api/gateway/paths.py", "gateway/attempts.py", "net/http_client.py"],
    }.items():
        called = {path.removeprefix(PACKAGE) for path, _ in profiles[kind].functions}
        assert called.issuperset(files), kind


def test_a_target_is_made_once(profiles: dict[str, Profile]) -> None:
    for kind, profile in profiles.items():
        made = [n for code, n in profile.calls.items() if code.co_qualname == "Models.target"]
        assert made == [1], kind


def test_json_passes_are_those_over_the_body() -> None:
    body = json.dumps({"text": "x" * 1000}).encode()
    decoder = msgspec.json.Decoder(dict[str, str])
    with profiled(body) as profile:
        decode(body, decoder)
        decode(b"{}", decoder)
        decode(body, decoder)
    assert profile.n_json == 2
    assert profile.n_calls >= 3
