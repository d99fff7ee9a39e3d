"""The bodies that each KV transfer method sends to the two servers."""

import msgspec
import pytest

from emberline.upstream.servers.disaggregation import (
    Adapter,
    BadPrefillReply,
    MooncakeTransfer,
    NixlTransfer,
    Peer,
    SGLangBootstrap,
    adapter_for,
    encode,
)

P = Peer("p", "10.0.0.1", "10.0.0.1:8998")
BODY = {
    "model": "m",
    "messages": msgspec.Raw(b'[{"role":"user","content":"hi"}]'),
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_tokens": 99,
    "max_completion_tokens": 88,
    "min_tokens": 5,
}


def sent(fields: object) -> dict[str, object]:
    decoded = msgspec.json.decode(encode(fields))
    assert isinstance(decoded, dict)
    return decoded


@pytest.mark.parametrize("adapter", [NixlTransfer(), Adapter(), MooncakeTransfer()])
def test_a_vllm_prefill_request_asks_for_one_token_and_no_stream(adapter: Adapter) -> None:
    peer = Peer("p", "10.0.0.1", "10.0.0.1:8998", {"engine_id": "e"})
    plan = adapter.plan(BODY, peer)
    leg = sent(plan.prefill)
    assert leg["stream"] is False
    assert leg["max_tokens"] == leg["max_completion_tokens"] == 1
    assert "stream_options" not in leg
    assert "min_tokens" not in leg
    assert leg["messages"] == [{"role": "user", "content": "hi"}]
    decode = sent(plan.decode)
    assert decode["min_tokens"] == 5
    assert decode["max_tokens"] == 99
    assert decode["stream"] is True


def test_max_completion_tokens_is_not_invented() -> None:
    plan = NixlTransfer().plan({"model": "m", "stream": True}, P)
    assert "max_completion_tokens" not in plan.prefill


def test_nixl_passes_prefills_parameters_on_verbatim() -> None:
    plan = NixlTransfer().plan(BODY, P)
    assert plan.order == "serial"
    assert sent(plan.prefill)["kv_transfer_params"] == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    params = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "something_new": {"deep": [None]}}
    assert NixlTransfer().after_prefill({"choices": [], "kv_transfer_params": params}) == {"kv_transfer_params": params}


@pytest.mark.parametrize(
    "answer", [{}, [], {"kv_transfer_params": None}, {"kv_transfer_params": []}, {"kv_transfer_params": {"x": 1}}]
)
def test_nixl_refuses_a_reply_that_decode_cannot_use(answer: object) -> None:
    with pytest.raises(BadPrefillReply):
        NixlTransfer().after_prefill(answer)


async def test_mooncake_learns_the_engine_id_once_and_draws_a_fresh_transfer_id_each_time() -> None:
    asked: list[tuple[str, str]] = []

    async def fetch(authority: str, path: str) -> object:
        asked.append((authority, path))
        return {"0": {"engine_id": "eng-7"}}

    adapter, peer = MooncakeTransfer(), Peer("p", "10.0.0.1", "10.0.0.1:8998")
    await adapter.learn(peer, fetch)
    await adapter.learn(peer, fetch)
    assert asked == [("10.0.0.1:8998", "/query")]
    first, second = adapter.plan(BODY, peer), adapter.plan(BODY, peer)
    assert first.order == "concurrent"
    prefill, decode = (sent(leg)["kv_transfer_params"] for leg in (first.prefill, first.decode))
    assert isinstance(prefill, dict)
    assert isinstance(decode, dict)
    assert prefill["transfer_id"] == decode["transfer_id"] != sent(second.decode)["kv_transfer_params"]["transfer_id"]  # type: ignore[index]
    assert prefill["transfer_id"].startswith("xfer-")
    assert decode["remote_bootstrap_addr"] == "http://10.0.0.1:8998"
    assert decode["remote_engine_id"] == "eng-7"
    assert (prefill["do_remote_decode"], decode["do_remote_prefill"]) == (True, True)


@pytest.mark.parametrize("facts", [{}, [], {"0": {}}, {"0": {"engine_id": 3}}, {"1": {"engine_id": "x"}}])
async def test_mooncake_refuses_facts_that_name_no_engine(facts: object) -> None:
    async def fetch(authority: str, path: str) -> object:
        return facts

    with pytest.raises(BadPrefillReply):
        await MooncakeTransfer().learn(Peer("p", "h", "h:8998"), fetch)


def test_sglang_sends_the_same_body_and_a_fresh_room() -> None:
    rooms = set()
    for _ in range(50):
        plan = SGLangBootstrap().plan(BODY, P)
        assert plan.order == "concurrent"
        prefill, decode = sent(plan.prefill), sent(plan.decode)
        assert prefill == decode
        assert (prefill["bootstrap_host"], prefill["bootstrap_port"]) == ("10.0.0.1", 8998)
        room = prefill["bootstrap_room"]
        assert isinstance(room, int)
        assert 0 <= room < 1 << 63
        rooms.add(room)
    assert len(rooms) == 50


@pytest.mark.parametrize(
    ("body", "n"), [({"n": 3}, 3), ({"prompt": ["a", "b"]}, 2), ({"prompt": ["a", "b"], "n": 2}, 4)]
)
def test_sglang_has_a_room_for_every_sequence(body: dict[str, object], n: int) -> None:
    leg = SGLangBootstrap().plan(body, P).decode
    assert leg["bootstrap_host"] == ["10.0.0.1"] * n
    assert leg["bootstrap_port"] == [8998] * n
    assert len(set(leg["bootstrap_room"])) == n


def test_adapters_by_kind_and_transfer() -> None:
    assert isinstance(adapter_for("vllm", ""), NixlTransfer)
    assert isinstance(adapter_for("vllm", "mooncake"), MooncakeTransfer)
    assert isinstance(adapter_for("sglang", ""), SGLangBootstrap)
    assert adapter_for("openai", "") is None
    assert adapter_for("sglang", "nixl") is None
