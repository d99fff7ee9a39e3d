"""An alias of several targets stands for the same one in all requests of a session, in every API."""

from typing import Any

import pytest

from tests.upstream.providers.conftest import SAYS, Gateway, Opener, StartProvider, configured

TARGETS = {"anthropic/claude-opus-5": 1, "gemini/gemini-3-pro": 1}
CHAT = {"model": "coder", "messages": SAYS, "max_tokens": 8}
LONG = "s" * 300  # hashed
# Path, body and headers of a request of session {}.
NAMED: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "messages, metadata": ("/v1/messages", {**CHAT, "metadata": {"user_id": "{}"}}, {}),
    "messages, header": ("/v1/messages", CHAT, {"x-claude-code-session-id": "{}"}),
    "messages, long": ("/v1/messages", {**CHAT, "metadata": {"user_id": "{}" + LONG}}, {}),
    "count_tokens, header": ("/v1/messages/count_tokens", {"model": "coder", "messages": SAYS}, {"session-id": "{}"}),
    "chat, user": ("/v1/chat/completions", {**CHAT, "user": "{}"}, {}),
    "chat, key": ("/v1/chat/completions", {**CHAT, "user": "x", "prompt_cache_key": "{}"}, {}),
    "chat, header": ("/v1/chat/completions", {**CHAT, "user": "x"}, {"x-session-affinity": "{}" + LONG}),
    "responses, safety": ("/v1/responses", {"model": "coder", "input": "Hi", "safety_identifier": "{}"}, {}),
    "run, key": ("/client/v4/accounts/x/ai/run/coder", {"messages": SAYS, "prompt_cache_key": "{}"}, {}),
    "run, header": ("/client/v4/accounts/x/ai/run/coder", {"messages": SAYS}, {"x-session-affinity": "{}"}),
    "ollama, header": ("/api/chat", {"model": "coder", "messages": SAYS, "stream": False}, {"x-session-id": "{}"}),
}


def of_session(value: Any, session: str) -> Any:
    if isinstance(value, dict):
        return {name: of_session(each, session) for name, each in value.items()}
    return value.replace("{}", session) if isinstance(value, str) else value


@pytest.fixture
async def made(gateway: Opener, provider_server: StartProvider) -> Gateway:
    servers = [configured(kind, await provider_server(kind)) for kind in ("anthropic", "gemini")]
    made = await gateway(*servers)
    await made.service.operations.change_alias("coder", TARGETS)
    return made


@pytest.mark.parametrize("name", NAMED)
async def test_a_session_stays_with_one_target(name: str, made: Gateway) -> None:
    path, body, headers = NAMED[name]
    used: dict[str, set[str]] = {}
    for number in range(16):
        session = f"session-{number % 4}"
        answer = await made.post(path, of_session(body, session), **of_session(headers, session))
        if path.endswith("count_tokens"):  # leaves no usage row; of the two, only Anthropic counts
            model = str(answer.status_code)
        else:
            assert answer.status_code == 200, answer.text
            model = (await made.rows())[-1][0]
        used.setdefault(session, set()).add(model)
    assert used
    assert all(len(models) == 1 for models in used.values()), used
    assert len(set.union(*used.values())) == 2  # sessions are spread


async def test_messages_of_a_session_follow_its_chat_completions(made: Gateway) -> None:
    for number in range(6):
        session = {"x-session-affinity": f"s{number}"}
        assert (await made.post("/v1/chat/completions", CHAT, **session)).status_code == 200
        assert (await made.post("/v1/messages", {**CHAT, "metadata": {"user_id": f"s{number}"}})).status_code == 200
    models = [row[0] for row in await made.rows()]
    assert models[::2] == models[1::2]
    assert len(set(models)) == 2
