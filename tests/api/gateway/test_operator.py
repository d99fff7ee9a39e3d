"""The operator's gateways: accounts and requests may add rules to them, and never remove or loosen one."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberline.accounts.account_service import KeyGrant
from emberline.accounts.audit_log import Actor
from emberline.gateway.options import combined, retry_policy
from emberline.protocol.gateway import Budget, GatewayOptions, GatewaySettings, Guardrail, RouteRule, StepConfig
from standins.openai_script import ServerScript
from tests.api.gateway.conftest import MODEL, SAYS, Bench, Opener

A = f"a/{MODEL}"
BLOCKED = [{"role": "user", "content": "a forbidden word"}]
CORP: dict[str, Any] = {
    "name": "corp",
    "guardrails": (Guardrail(name="words", pattern="forbidden", on="request"),),
    "routes": {"tiered": (RouteRule(models=(A,), budget=Budget(amount=1)),)},
    "fallbacks": {"x": (A,)},
    "request_timeout_ms": 5000,
    "max_attempts": 2,
}
NOTHING = {"name": "corp"}


class Tenant:
    def __init__(self, gateway: Bench, key: str, account: str = "acme") -> None:
        self.client, self.headers = gateway.client, {"authorization": f"Bearer {key}"}
        self.account = account

    async def put(self, **settings: Any) -> Any:
        return await self.client.post("/api/gateways", json=NOTHING | settings, headers=self.headers)

    async def code(self, messages: Any = BLOCKED, **headers: str) -> int:
        """The error of a chat through the gateway, 0 for none."""
        answer = await self.client.post(
            f"/v1/{self.account}/corp/compat/chat/completions",
            json={"model": A, "messages": messages},
            headers=self.headers | {name.replace("_", "-"): value for name, value in headers.items()},
        )
        return 0 if answer.status_code == 200 else int(answer.json()["error"][0]["code"])


async def tenant(gateway: Bench, account: str = "acme", **grant: Any) -> Tenant:
    made = await gateway.accounts.create_key(Actor("test"), account, KeyGrant(**grant))
    return Tenant(gateway, made.key.text, account)


async def test_an_account_cannot_replace_or_delete_a_configured_gateway(bench: Opener) -> None:
    gateway = await bench(CORP, required=True)
    acme = await tenant(gateway)
    answer = await acme.put()
    assert answer.status_code == 200
    assert [rule["name"] for rule in answer.json()["guardrails"]] == ["words"]
    assert await acme.code() == 2016
    assert (await acme.client.delete("/api/gateways/corp", headers=acme.headers)).status_code == 200, "its additions"
    answer = await acme.client.delete("/api/gateways/corp", headers=acme.headers)
    assert (answer.status_code, "emberline.toml" in answer.text) == (409, True)
    assert (await acme.put(account="other")).status_code == 403
    assert await acme.code() == 2016
    assert await acme.code(SAYS) == 0


async def test_an_account_adds_rules_for_itself_alone(bench: Opener) -> None:
    gateway = await bench(CORP, required=True)
    acme, other = await tenant(gateway), await tenant(gateway, "other")
    answer = await acme.put(guardrails=[{"name": "more", "pattern": "hello", "on": "request"}], max_attempts=3)
    assert answer.status_code == 200, answer.text
    shown = answer.json()
    assert [rule["name"] for rule in shown["guardrails"]] == ["words", "more"]
    assert (shown["max_attempts"], shown["request_timeout_ms"], shown["source"]) == (3, 5000, "config")
    assert [await acme.code(), await acme.code(SAYS)] == [2016, 2016]
    assert [await other.code(), await other.code(SAYS)] == [2016, 0]


@pytest.mark.parametrize(
    "settings",
    [
        {"guardrails": [{"name": "words", "pattern": "nothing", "action": "flag"}]},
        {"routes": {"Tiered": [{"models": [A]}]}},
        {"fallbacks": {"X": [A]}},
    ],
)
async def test_additions_of_the_same_name_are_refused(bench: Opener, settings: Any) -> None:
    gateway = await bench(CORP, required=True)
    acme = await tenant(gateway)
    answer = await acme.put(**settings)
    assert (answer.status_code, "the operator's gateway corp" in answer.text) == (400, True), answer.text


async def test_what_an_admin_creates_for_an_account_is_the_operators(bench: Opener) -> None:
    gateway = await bench(required=True)
    admin, acme = await tenant(gateway, "ops", role="admin"), await tenant(gateway)
    rules = [{"name": "words", "pattern": "forbidden", "on": "request"}]
    assert (await acme.put()).status_code == 200
    assert (await admin.put(account="acme", guardrails=rules)).status_code == 200
    assert (await acme.put()).status_code == 200
    assert await acme.code() == 2016
    await acme.client.delete("/api/gateways/corp", headers=acme.headers)
    assert (await acme.client.delete("/api/gateways/corp", headers=acme.headers)).status_code == 403
    assert await acme.code() == 2016
    assert (await admin.put(account="acme")).status_code == 200
    assert await acme.code() == 0, "the operator may remove a rule"
    gone = await admin.client.delete("/api/gateways/corp?account=acme", headers=admin.headers)
    assert gone.status_code == 200
    assert await acme.code() == 2001


async def test_no_option_of_a_request_loosens_the_operators_rules(bench: Opener) -> None:
    gateway = await bench(CORP | {"log_content": True}, required=True, a=ServerScript(tokens=5))
    acme = await tenant(gateway)
    quiet = {"cf_aig_collect_log": "false", "cf_aig_collect_log_payload": "false"}
    for headers in (quiet, {"cf_aig_skip_cache": "true"}, {"cf_aig_cache_ttl": "60", "cf_aig_cache_key": "k"}):
        assert await acme.code(**headers) == 2016
    assert await acme.code(SAYS, **quiet) == 0
    rows = (await acme.client.get("/api/gateways/corp/logs", headers=acme.headers)).json()["data"]
    assert len(rows) == 4, "all are logged"
    query = {"log": rows[0]["id"]}
    (whole,) = (await acme.client.get("/api/gateways/corp/logs", headers=acme.headers, params=query)).json()["data"]
    assert (whole["request"], whole["response"]) > ("", ""), "with their content"
    steps = [{"provider": "a", "endpoint": "chat/completions", "query": {"model": MODEL, "messages": BLOCKED}}]
    answer = await acme.client.post("/v1/acme/corp", json=steps, headers=acme.headers)
    assert (answer.status_code, answer.json()["error"][0]["code"]) == (400, 2016)


GUARDS = st.lists(st.sampled_from("abc"), unique=True).map(
    lambda names: tuple(Guardrail(name=name, model=name) for name in names)
)
SETTINGS = st.builds(
    lambda **fields: GatewaySettings(name="g", **fields),
    guardrails=GUARDS,
    routes=st.dictionaries(st.sampled_from("xyXY"), st.just((RouteRule(models=("m",)),)), max_size=2),
    request_timeout_ms=st.sampled_from([0, 10, 20]),
    custom_cost_counts=st.booleans(),
    collect_logs=st.booleans(),
    log_content=st.booleans(),
    log_retention_days=st.sampled_from([1.0, 30.0]),
)


@given(floor=SETTINGS, added=SETTINGS, asked=st.sampled_from([None, 0, 5, 30]), step=st.sampled_from([None, 0, 30]))
def test_combined_settings_are_at_least_as_strict(
    floor: GatewaySettings, added: GatewaySettings, asked: int | None, step: int | None
) -> None:
    both = combined(floor, added)
    assert both.guardrails[: len(floor.guardrails)] == floor.guardrails
    assert {rule.name for rule in added.guardrails} <= {rule.name for rule in both.guardrails}
    assert floor.routes.items() <= both.routes.items()
    assert (both.collect_logs, both.log_content) >= (floor.collect_logs, floor.log_content)
    assert (both.custom_cost_counts, both.log_retention_days) == (floor.custom_cost_counts, floor.log_retention_days)
    options, config = GatewayOptions(request_timeout_ms=asked), StepConfig(request_timeout=step)
    timeout_ms = retry_policy(both, options, config, floor).timeout_ms
    if floor.request_timeout_ms:
        assert 0 < timeout_ms <= floor.request_timeout_ms
