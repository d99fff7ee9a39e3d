"""The cluster file: defaults, and what is refused, by name."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from emberline.protocol.errors import BadInput
from emberline.protocol.member import MemberName
from emberline.supervisor.cluster.cluster_file import (
    ClusterFile,
    ModelEntry,
    NodeEntry,
    PortRange,
    parse_cluster_file,
    read_cluster_file,
    replica_prefix,
)

DEPLOYED = Path(__file__).parents[3] / "deploy" / "cluster.yaml"


def refused(content: Any) -> str:
    with pytest.raises(BadInput) as error:
        parse_cluster_file(content)
    return error.value.message


@pytest.mark.parametrize("content", [None, {}])
def test_an_empty_file_is_a_head_without_models(content: Any) -> None:
    file = parse_cluster_file(content)
    assert file == ClusterFile()
    assert file.core_urls("10.0.0.1") == ("http://10.0.0.1:8686",)
    assert file.core_urls("fd00::1") == ("http://[fd00::1]:8686",)
    assert file.node("10.0.0.7").gpus is None
    assert file.orders({}) == []


def test_the_file_in_deploy_is_valid_and_names_every_key() -> None:
    file = read_cluster_file(DEPLOYED)
    assert file.orders({})
    shown = yaml.safe_load(DEPLOYED.read_text())
    assert set(shown) == set(ClusterFile.__struct_fields__)
    assert set(shown["ports"]) == set(PortRange.__struct_fields__)
    assert set(shown["models"][0]) == set(ModelEntry.__struct_fields__)
    examples = [line for line in DEPLOYED.read_text().splitlines() if line.startswith("#")]
    for key in NodeEntry.__struct_fields__:  # a file with nodes would refuse other machines
        assert any(f" {key}:" in line for line in examples), f"{DEPLOYED.name} does not show nodes.{key}"


def test_orders_have_names_that_tell_the_model_and_the_role() -> None:
    file = parse_cluster_file(
        {"models": [{"name": "org/Smol LM2", "path": "/m/a.gguf", "prefill": 1, "decode": 2}, {"name": "big", "tp": 2}]}
    )
    orders = file.orders({"big": Path("/m/big")})
    assert [(each.name, each.role) for each in orders] == [
        ("smol-lm2-prefill0", "prefill"),
        ("smol-lm2-decode0", "decode"),
        ("smol-lm2-decode1", "decode"),
        ("big-0", "both"),
    ]
    assert orders[0].path == Path("/m/a.gguf")
    assert orders[3].path == Path("/m/big")
    assert orders[3].layout.tp == 2


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"node": []}, ["node is no key", "nodes"]),
        ({"models": [{"name": "m", "replica": 2}]}, ["models[0].replica is no key", "replicas"]),
        ({"nodes": [{"address": "a", "gpu_count": 2}]}, ["nodes[0].gpu_count", "gpus"]),
        ({"ports": {"firts": 1}}, ["ports.firts", "first"]),
        ({"models": [{}]}, ["models[0]", "name"]),
        ({"models": [{"name": "m", "tp": 0}]}, ["models[0].tp"]),
        ({"port": "ssh"}, ["port", "int"]),
        ([], ["object"]),
        ({"cores": ["10.0.0.1:8686"]}, ["cores[0]", "http://"]),
        ({"database": "postgresql://h/d"}, ["database is no key"]),  # cores have it
        ({"ports": {"first": 9, "last": 8}}, ["9", "8"]),
        ({"nodes": [{"address": "a"}, {"address": "a"}]}, ["nodes[1]", "twice"]),
        ({"models": [{"name": "m", "prefill": 1}]}, ["models[0] (m)", "decode"]),
        ({"models": [{"name": "m", "prefill": 1, "decode": 1, "replicas": 1}]}, ["not both"]),
        ({"models": [{"name": "m"}, {"name": "M"}]}, ["models[1] (M)", "m-0"]),
        ({"models": [{"name": "m", "max_replicas": 2}]}, ["models[0].max_replicas is no key"]),  # the planner's
        ({"nodes": [{"address": "a", "region": "eu"}], "models": [{"name": "m", "region": "us"}]}, ["region us"]),
    ],
)
def test_what_is_wrong_is_refused_by_name(content: Any, words: list[str]) -> None:
    message = refused(content)
    assert all(word in message for word in words), message


def test_more_gpus_than_exist_are_refused_by_name_and_number() -> None:
    nodes = [{"address": "a", "gpus": 8, "gpu": "h200"}, {"address": "b", "gpus": 4, "gpu": "l40s"}]
    message = refused({"nodes": nodes, "models": [{"name": "big", "tp": 8, "replicas": 2}]})
    assert "models[0] (big) needs 16 GPUs, and the nodes have 12" in message
    message = refused({"nodes": nodes, "models": [{"name": "big", "tp": 8, "gpu": "l40s"}]})
    assert "needs 8 GPUs of kind l40s, and the nodes have 4" in message
    message = refused({"nodes": nodes, "models": [{"name": "a", "replicas": 8}, {"name": "b", "replicas": 5}]})
    assert "models[1] (b) needs 5 GPUs" in message
    assert "4 of them left" in message
    parse_cluster_file({"nodes": nodes, "models": [{"name": "a", "replicas": 8}, {"name": "b", "replicas": 4}]})
    parse_cluster_file({"models": [{"name": "a", "replicas": 800}]})  # known only when the machines are there
    parse_cluster_file({"nodes": [{"address": "a", "gpus": 0}], "models": [{"name": "a"}]})  # computed on CPUs


def test_a_node_that_is_not_listed_is_refused() -> None:
    file = parse_cluster_file({"head": "h", "nodes": [{"address": "a", "gpus": 2}]})
    assert file.node("a").gpus == 2
    assert file.node("h").gpus is None
    with pytest.raises(BadInput, match="no node b"):
        file.node("b")


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    with pytest.raises(BadInput, match="cannot read"):
        read_cluster_file(path)
    path.write_text("a: [")
    with pytest.raises(BadInput, match="is not YAML"):
        read_cluster_file(path)
    path.write_text("ports: {first: 1, lats: 2}")
    with pytest.raises(BadInput, match=r"cluster\.yaml: ports\.lats"):
        read_cluster_file(path)
    path.write_text("!!python/object/apply:os.getpid []")
    with pytest.raises(BadInput, match="is not YAML"):
        read_cluster_file(path)


KEYS = st.sampled_from(["models", "nodes", "ports", "name", "address", "tp", "gpus", "head", "x"])
LEAVES = st.none() | st.booleans() | st.integers() | st.text(max_size=5)


@settings(max_examples=40, deadline=None)
@given(st.recursive(LEAVES, lambda each: st.lists(each) | st.dictionaries(KEYS, each), max_leaves=8))
def test_any_content_is_a_file_or_refused(content: Any) -> None:
    """What is accepted is kept: nothing that a file says is dropped without a word."""
    try:
        file = parse_cluster_file(content)
    except BadInput:
        assert content not in (None, {})
        return
    assert set(content or {}) <= set(ClusterFile.__struct_fields__)
    assert [model.name for model in file.models] == [model["name"] for model in (content or {}).get("models", [])]
    assert parse_cluster_file(msgspec.to_builtins(file)) == file


@settings(max_examples=40, deadline=None)
@given(st.text(max_size=80))
def test_names_of_replicas_are_names_of_members(model: str) -> None:
    msgspec.convert(f"{replica_prefix(model)}-prefill12", MemberName)
