"""`[[endpoints]]`: from the file to servers, every mistake named."""

from pathlib import Path

import pytest

from emberline.config import ConfigError, resolve
from emberline.upstream.servers.client import UpstreamClient, upstream_configs
from emberline.upstream.servers.disaggregation import NixlTransfer


def endpoints(folder: Path, text: str, **environ: str):  # type: ignore[no-untyped-def]
    (folder / "emberline.toml").write_text(text)
    return resolve(environ=environ, home=folder).endpoints


def table(**fields: object) -> str:
    fields = {"name": "a", "url": "http://h:1", **fields}
    lines = [
        f"{key} = {str(value).replace(chr(39), chr(34)) if isinstance(value, list) else repr(value)}"
        for key, value in fields.items()
    ]
    return "[[endpoints]]\n" + "\n".join(lines) + "\n"


async def test_a_server_and_its_defaults(tmp_path: Path) -> None:
    (server,) = upstream_configs(endpoints(tmp_path, table(kind="vllm", role="prefill", models=["m"])))
    assert (server.name, server.endpoint.address, server.endpoint.models) == ("a", "http://h:1", ("m",))
    client = UpstreamClient(server)
    assert isinstance(client.adapter, NixlTransfer)
    assert client.peer.bootstrap == "h:8998"


def test_emberline_workers_are_left_out(tmp_path: Path) -> None:
    text = table(kind="emberline", url="tcp://h:1") + table(name="b")
    assert [server.name for server in upstream_configs(endpoints(tmp_path, text))] == ["b"]


def test_a_key_may_come_from_the_environment_and_is_never_shown(tmp_path: Path) -> None:
    (found,) = endpoints(tmp_path, table(name="my-gpu.1", key="in-the-file"), EMBERLINE_ENDPOINTS_MY_GPU_1_KEY="secret")
    assert found.key == "secret"
    assert "secret" not in repr(found)
    (server,) = upstream_configs([found])
    assert server.endpoint.token == "secret"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("endpoints = 3\n", "list of tables"),
        ("[endpoints]\nname = 'a'\n", "list of tables"),
        ("[[endpoints]]\nname = 'a'\n", "url"),
        (table(name="a b"), "name"),
        (table(kind="ollama"), "kind"),
        (table(colour="red"), "colour"),
        (table() + table(), "two"),
        (table(key="with space"), "key"),
        (table(max_running=-1), "max_running"),
    ],
)
def test_a_file_that_cannot_be_read_says_why(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        endpoints(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (table(url="tcp://h:1"), "url"),
        (table(role="decode"), "no prefill/decode disaggregation"),
        (table(kind="sglang", transfer="nixl"), "bootstrap, store"),
        (table(kind="vllm", bootstrap="h"), "host:port"),
        (table(kind="vllm", kv_events="h:5557"), "tcp"),
        (table(kind="vllm", kv_events="tcp://h:5557"), "tokenizer"),
        (
            table(name="p", kind="vllm", role="prefill", models=["m"])
            + table(name="d", kind="sglang", role="decode", models=["m"]),
            "cannot transfer KV",
        ),
        (
            table(name="p", kind="vllm", role="prefill", models=["m"])
            + table(name="d", kind="vllm", role="decode", transfer="mooncake", models=["m"]),
            "cannot transfer KV",
        ),
    ],
)
def test_invalid_endpoints_are_refused_with_a_reason(tmp_path: Path, text: str, says: str) -> None:
    found = endpoints(tmp_path, text)
    with pytest.raises(ConfigError, match=says):
        upstream_configs(found)
