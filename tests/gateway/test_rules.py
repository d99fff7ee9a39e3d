"""The rules of a gateway, without I/O: retry schedules, chains and routes, options, guardrails, redaction."""

import asyncio
import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberline.gateway.gateway_errors import redact
from emberline.gateway.guardrails import HeldReply, check_guardrails, matches
from emberline.gateway.options import cache_ttl_s, check_settings, from_headers, merge, retry_policy
from emberline.gateway.retry import MAX_WAIT_S, RetryPolicy, wait_s
from emberline.gateway.routing import MAX_STEPS, holds, plan, share
from emberline.protocol.errors import BadInput, Overloaded, Unavailable
from emberline.protocol.events import ChoiceDone, Opaque, Started, TextDelta, TextEvent, ToolCallStarted, Usage
from emberline.protocol.gateway import (
    Condition,
    GatewayOptions,
    GatewaySettings,
    Guardrail,
    Retries,
    RouteRule,
    StepConfig,
)

NAMES = ("m0", "m1", "m2", "m3", "dynamic/r0", "dynamic/r1")


@given(st.integers(1, 5), st.integers(0, 5000), st.sampled_from(["constant", "linear", "exponential"]))
def test_a_retry_schedule(attempts: int, delay_ms: int, backoff: Any) -> None:
    delays = list(RetryPolicy(attempts, delay_ms, backoff).delays_s())
    assert len(delays) == attempts - 1
    assert delays == sorted(delays)
    assert all(0 <= delay <= MAX_WAIT_S for delay in delays)
    factors = {"constant": [1, 1, 1, 1], "linear": [1, 2, 3, 4], "exponential": [1, 2, 4, 8]}[backoff]
    assert delays == pytest.approx([min(MAX_WAIT_S, delay_ms * f / 1000) for f in factors[: attempts - 1]])


@given(st.floats(0, 1000), st.floats(0, MAX_WAIT_S))
def test_the_wait_before_an_attempt(asked_s: float, delay_s: float) -> None:
    waited = wait_s(Overloaded("busy", retry_after_s=asked_s), delay_s)
    assert waited == (None if asked_s > MAX_WAIT_S else max(asked_s, delay_s))
    assert wait_s(Unavailable("down", retry_after_s=asked_s), delay_s) == delay_s


_chains = st.dictionaries(st.sampled_from(NAMES[:4]), st.lists(st.sampled_from(NAMES), min_size=1, max_size=3))
_routes = st.fixed_dictionaries(
    {name: st.lists(st.sampled_from(NAMES), min_size=1, max_size=3) for name in ("r0", "r1")}
)


@given(_chains, _routes, st.sampled_from(NAMES))
def test_chains_that_are_accepted_do_not_loop(chains: Any, routes: Any, asked: str) -> None:
    settings = GatewaySettings(
        name="x",
        fallbacks={name: tuple(chain) for name, chain in chains.items()},
        routes={name: (RouteRule(models=tuple(models)),) for name, models in routes.items()},
    )
    try:
        check_settings(settings)
    except BadInput:  # the chain loops, which the next test is about
        return
    found = plan(settings, asked, {}, "caller").models
    assert 1 <= len(found) <= MAX_STEPS
    assert len(set(found)) == len(found)
    assert not any(model.startswith("dynamic/") for model in found)


def test_a_loop_is_refused_at_run_time_too() -> None:
    settings = GatewaySettings(name="x", fallbacks={"a": ("b",), "B": ("A",)})
    for check in (lambda: check_settings(settings), lambda: plan(settings, "a", {}, "")):
        with pytest.raises(BadInput, match="loops"):
            check()


def test_the_share_of_a_route() -> None:
    rules = (RouteRule(models=("a",), percent=20), RouteRule(models=("b",)))
    settings = GatewaySettings(name="x", routes={"r": rules})
    chosen = [plan(settings, "dynamic/r", {}, f"session {n}").models[0] for n in range(2000)]
    assert 0.15 < chosen.count("a") / 2000 < 0.25
    assert plan(settings, "dynamic/r", {}, "one") == plan(settings, "dynamic/r", {}, "one")
    assert 0 <= share("x") < 1


@pytest.mark.parametrize(
    ("condition", "metadata", "expected"),
    [
        (Condition(key="k", value="v"), {"k": "v"}, True),
        (Condition(key="k", value=5), {"k": "5"}, True),
        (Condition(key="k", value=True), {"k": "true"}, True),
        (Condition(key="k", op="ne", value="v"), {}, True),
        (Condition(key="k", op="in", value=("a", "b")), {"k": "b"}, True),
        (Condition(key="k", op="in", value=("a", "b")), {"k": "c"}, False),
        (Condition(key="k", op="ge", value=3), {"k": 3}, True),
        (Condition(key="k", op="lt", value=3), {"k": "not a number"}, False),
        (Condition(key="k", op="gt", value=3), {"k": 10**400}, False),
        (Condition(key="k", op="exists", value=False), {}, True),
        (Condition(key="k", op="exists"), {"k": ""}, True),
    ],
)
def test_conditions(condition: Condition, metadata: Any, expected: bool) -> None:
    assert holds(condition, metadata) is expected


def test_options_of_headers_and_body() -> None:
    headers = {
        "cf-aig-gateway-id": "g",
        "cf-aig-cache-ttl": "300",
        "cf-aig-max-attempts": "3",
        "cf-aig-metadata": '{"a": 1}',
        "cf-aig-custom-cost": '{"per_token_in": 0.5}',
        "authorization": "Bearer x",
    }
    options = from_headers(headers)
    assert options is not None
    assert (options.id, options.cache_ttl, options.retries, options.metadata) == (
        "g",
        300,
        Retries(max_attempts=3),
        {"a": 1},
    )
    assert from_headers({"cf-aig-authorization": "Bearer x"}) is None
    merged = merge(GatewayOptions(id="body", cache_ttl=600), options)
    assert (merged.id, merged.cache_ttl, merged.metadata) == ("body", 600, {"a": 1})
    settings = GatewaySettings(name="g", max_attempts=2, cache_ttl_s=60)
    assert retry_policy(settings, options).max_attempts == 3
    assert retry_policy(settings, options, StepConfig(max_attempts=1, request_timeout=5)) == RetryPolicy(
        1, 500, "exponential", 5
    )
    assert retry_policy(settings, GatewayOptions()).max_attempts == 2
    assert cache_ttl_s(settings, GatewayOptions()) == 60
    assert cache_ttl_s(settings, GatewayOptions(skip_cache=True, cache_ttl=600)) == 0


@given(st.text(max_size=40), st.text(max_size=40))
def test_any_header_is_read_or_refused(name: str, value: str) -> None:
    with contextlib.suppress(BadInput):
        assert isinstance(from_headers({f"cf-aig-{name}": value}), GatewayOptions)


# --- guardrails -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", ["(", "(?=x)", r"\1", "(((a{50}){50}){50}){50}", "\ud800"])
def test_a_pattern_that_cannot_be_used(pattern: str) -> None:
    with pytest.raises(BadInput):
        check_guardrails([Guardrail(name="g", pattern=pattern)])


def test_no_pattern_takes_more_than_linear_time() -> None:
    async def search(pattern: str, text: str) -> bool:
        return await matches(Guardrail(name="g", pattern=pattern), text)

    for pattern in ("(a*)*b", "(a|a)*b", "(.*a){12}b", ".*x.*y.*z"):
        assert not asyncio.run(search(pattern, "a" * 200_000))
    assert asyncio.run(search("(a|a)*b$", "a" * 200_000 + "b"))
    assert asyncio.run(search(r"\bSecret\b", "the SECRET is \ud800 out"))


@given(st.lists(st.text(alphabet="ab.! \n", min_size=1, max_size=6), max_size=20), st.booleans())
def test_a_held_reply_loses_nothing(pieces: list[str], whole: bool) -> None:
    """Every event comes out once, in order, and every character was checked before it came out."""
    events: list[TextEvent] = [Started(Usage()), *(TextDelta(0, piece) for piece in pieces), ChoiceDone(0, "stop")]
    held, out, checked = HeldReply(whole), [], ""
    for event in events:
        text = held.add(event)
        if text is not None:
            checked = text
            out += held.take()
            released = "".join(one.text for one in out if isinstance(one, TextDelta))
            assert checked.endswith(released[-1000:])
    out += held.take()
    assert out == events


def test_choices_of_a_held_reply_are_checked_apart() -> None:
    held = HeldReply(whole=False)
    for index, text in ((0, "the sec"), (1, "nothing "), (0, "ret"), (1, "here")):
        assert held.add(TextDelta(index, text)) is None
    held.add(ToolCallStarted(1, 0, "c", "tool"))
    checked = held.add(ChoiceDone(0, "stop"))
    assert checked == "the secret\nnothing here\ntool "
    held.take()
    held.add(TextDelta(1, "x"))
    assert held.add(TextDelta(1, "y.")) == "nothing here\ntool xy."


def test_a_held_reply_is_checked_with_its_marks() -> None:
    """Marks are texts that the client receives, too; one in the middle of a text does not hide it."""
    held = HeldReply(whole=False)
    hidden = {"type": "redacted_thinking", "data": "one"}
    signed = {"type": "thinking", "thinking": "Hm", "signature": "s"}
    held.add(Opaque(0, "thinking_blocks", [hidden]))
    held.add(TextDelta(0, "the sec"))
    held.add(Opaque(0, "thinking_blocks", [hidden, signed]))
    held.add(Opaque(0, "extra_content", {"google": ["two"]}, 0))
    checked = held.add(TextDelta(0, "ret."))
    assert checked is not None
    said, _, marks = checked.partition("\n")
    assert said == "the secret."
    assert sorted(marks.split()) == ["google", "one", "s", "two"]


def test_redaction() -> None:
    for secret in ("sk-abcdefgh12345678", "Bearer abcdefghijkl", "AIza" + "x" * 30, "ember_abcdefgh1234"):
        assert secret not in redact(f"wrong key {secret} was sent")
    assert redact("the task-oriented token limit") == "the task-oriented token limit"
    assert len(redact("x" * 5000)) == 1000


def test_settings_round_trip() -> None:
    settings = GatewaySettings(
        name="x", routes={"r": (RouteRule(models=("a",), when=(Condition(key="k", op="in", value=(1, "b")),)),)}
    )
    assert msgspec.json.decode(msgspec.json.encode(settings), type=GatewaySettings) == settings
