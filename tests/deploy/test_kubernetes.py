"""The manifests for Kubernetes: they are well formed, and everything that they name exists here or among themselves.

Against the API's published schemas they are checked where `kubernetes-validate` is installed, and against the real
kustomize where that is.
"""

import argparse
import asyncio
import importlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from emberline.api.http.router import Policy
from emberline.api.routes import ROUTES
from emberline.balancer.worker import Snapshot
from emberline.catalog import hub
from emberline.catalog.model_card import WheelSource, slug
from emberline.catalog.model_store import ModelStore
from emberline.cli.main import _MODULES
from emberline.config import Config, resolve
from emberline.engine.worker import main as worker
from emberline.engine.worker.process import DRAIN_S
from emberline.telemetry.metrics import Metrics
from tests.deploy.kustomize import Manifest, identity, read, render
from tests.test_docs import config_keys

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
FOLDERS = [FOLDER / "base", *sorted((FOLDER / "overlays").iterdir())]
CUSTOM = ("LeaderWorkerSet", "ScaledObject", "PodMonitor", "RayCluster")  # kinds that are not built in
SECRETS = {each["metadata"]["name"]: each for each in read(FOLDER / "secrets.yaml")}
PLACEHOLDERS = {
    "EMBERLINE_SECRET": "s" * 32,
    "EMBERLINE_STORE_URL": "postgresql://emberline@db/emberline",
    "EMBERLINE_AUTH_KEY": "k" * 32,
}
OTHER_VARIABLES = set(re.findall(r"^\| `(EMBERLINE_\w+)`", (ROOT / "docs/configuration.md").read_text(), re.MULTILINE))
VARIABLES = OTHER_VARIABLES | {f"EMBERLINE_{section}_{key}".upper() for section, key in config_keys()}
each_folder = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)


def pods(manifests: list[Manifest]) -> Iterator[Manifest]:
    """The templates of pods, wherever they are, with what is claimed for them."""

    def below(value: Any, claims: list[Manifest]) -> Iterator[Manifest]:
        if isinstance(value, dict):
            claims = value.get("volumeClaimTemplates", claims)
            if "containers" in value.get("spec", ()):
                yield value | {"claims": claims}
            else:
                for each in value.values():
                    yield from below(each, claims)
        elif isinstance(value, list):
            for each in value:
                yield from below(each, claims)

    return below(manifests, [])


def containers(pod: Manifest) -> list[Manifest]:
    return [*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]]


def ours(manifests: list[Manifest]) -> Iterator[tuple[Manifest, Manifest]]:
    """Containers that run `emberline`, with their pods."""
    for pod in pods(manifests):
        for container in containers(pod):
            if container.get("command") == ["emberline"]:
                yield pod, container


def environment(container: Manifest) -> dict[str, str]:
    found = {}
    for variable in container.get("env", ()):
        field = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
        value = "1" if "worker-index" in field else "10.0.0.5"
        found[variable["name"]] = variable.get("value") or PLACEHOLDERS.get(variable["name"], value)
    return found


def words(container: Manifest) -> list[str]:
    """The command line after Kubernetes has put in variables. LeaderWorkerSet sets one itself."""
    known = environment(container) | {"LWS_LEADER_ADDRESS": "emberline-worker-0.emberline-worker"}
    return [re.sub(r"\$\((\w+)\)", lambda found: known[found[1]], word) for word in container["args"]]


def parsed(container: Manifest) -> argparse.Namespace:
    command, *rest = words(container)
    if command == "worker":
        return worker.parse_arguments(rest)
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.set_defaults(command=command)
    importlib.import_module(f"emberline.cli.{_MODULES.get(command, command)}").add_arguments(parser)
    return parser.parse_intermixed_args(rest)


def commands(manifests: list[Manifest], command: str) -> list[tuple[Manifest, Manifest, argparse.Namespace]]:
    return [(pod, each, parsed(each)) for pod, each in ours(manifests) if each["args"][0] == command]


def config_of(container: Manifest, args: argparse.Namespace, home: Path) -> Config:
    flags = {name: value for name, value in vars(args).items() if "." in name}
    return resolve(flags, environment(container), home)


def matches(selector: Manifest, pod: Manifest) -> bool:
    labels = pod["metadata"]["labels"]
    return all(labels.get(name) == value for name, value in selector.items())


def of_kind(manifests: list[Manifest], kind: str) -> dict[str, Manifest]:
    return {each["metadata"]["name"]: each for each in manifests if each["kind"] == kind}


def port_numbers(pod: Manifest) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for each in containers(pod) for port in each.get("ports", ())}


@each_folder
def test_every_file_is_used_once(folder: Path) -> None:
    (kustomization,) = read(folder / "kustomization.yaml")
    named = [*kustomization["resources"], *(each.get("path") for each in kustomization.get("patches", ()))]
    files = {path.name for path in folder.iterdir()} - {"kustomization.yaml"}
    assert files == {name for name in named if name and "/" not in name}
    identities = [identity(each) for each in render(folder)]
    assert len(set(identities)) == len(identities)


@each_folder
def test_command_lines_and_variables_are_understood(folder: Path, tmp_path: Path) -> None:
    manifests = render(folder)
    assert commands(manifests, "worker")
    assert commands(manifests, "pull")
    for _, container in ours(manifests):
        parsed(container)
        names = {name for name in environment(container) if name.startswith("EMBERLINE_")}
        assert names <= VARIABLES
        resolve({}, environment(container), tmp_path)  # their values
    for pod, container, args in commands(manifests, "serve"):
        config = config_of(container, args, tmp_path)
        assert config.cluster.core_only
        assert config.server.auth == "keys"
        assert config.store.url.startswith("postgresql://")
        assert config.server.port == port_numbers(pod)["http"]


@each_folder
def test_workers_join_a_service_that_leads_to_cores_before_they_are_ready(folder: Path, tmp_path: Path) -> None:
    """A core is ready when it has a worker: a worker that waited for a ready core would wait forever."""
    manifests = render(folder)
    services, (core,) = of_kind(manifests, "Service"), commands(manifests, "serve")
    allowed = config_of(core[1], core[2], tmp_path).server.allowed_hosts
    for pod, _, args in commands(manifests, "worker"):
        if args.rank:
            continue
        (url,) = args.join
        service = services[urlsplit(url).hostname or ""]
        assert service["spec"]["publishNotReadyAddresses"]
        assert matches(service["spec"]["selector"], core[0])
        assert urlsplit(url).port in [port["port"] for port in service["spec"]["ports"]]
        assert urlsplit(url).hostname in allowed
        assert int(args.socket.rpartition(":")[2]) == port_numbers(pod)["engine"]
    for service in services.values():
        chosen = [pod for pod in pods(manifests) if matches(service["spec"]["selector"], pod)]
        assert chosen
        for pod in chosen:
            for port in service["spec"]["ports"]:
                assert port_numbers(pod)[port["targetPort"]] == port["port"]


@each_folder
def test_cores_and_workers_have_the_same_model_where_it_was_pulled(folder: Path) -> None:
    manifests = render(folder)
    store = ModelStore(Path("/data"))
    ((_, _, serving),) = commands(manifests, "serve")
    (name,) = getattr(serving, "engine.models")
    if name.startswith("hf:"):
        org, _, repo = hub.parse(name).repo.partition("/")
        aliases, path = {slug(repo)}, store.folder(f"@hf/{slug(org)}/{slug(repo)}")
    else:
        card = store.cards.find(name)
        assert card is not None
        assert isinstance(card.source, WheelSource)
        aliases, path = set(card.aliases), store.folder(card.id) / card.source.path
    assert {args.model for _, _, args in commands(manifests, "pull")} == {name}
    for _, _, args in commands(manifests, "worker"):
        assert args.name in aliases
        assert args.model == path


@each_folder
def test_secrets_exist_and_have_no_values(folder: Path) -> None:
    manifests = render(folder)
    assert not of_kind(manifests, "Secret")
    assert all(value == "" for secret in SECRETS.values() for value in secret["stringData"].values())
    referenced = set()
    for pod in pods(manifests):
        for container in containers(pod):
            for variable in container.get("env", ()):
                if reference := variable.get("valueFrom", {}).get("secretKeyRef"):
                    referenced.add(reference["name"])
                    assert reference["key"] in SECRETS[reference["name"]]["stringData"]
        for volume in pod["spec"].get("volumes", ()):
            if "secret" in volume:
                referenced.add(volume["secret"]["secretName"])
    assert {"emberline-core", "emberline-worker-credentials"} <= referenced <= SECRETS.keys()
    credentials = SECRETS["emberline-worker-credentials"]["stringData"]
    for kind in ("StatefulSet", "LeaderWorkerSet"):
        for name, workers in of_kind(manifests, kind).items():
            n_workers = workers["spec"].get("replicas", 1)
            assert {f"{name}-{number}" for number in range(n_workers)} <= credentials.keys()


@each_folder
def test_volumes_are_mounted_where_they_are_used(folder: Path) -> None:
    for pod in pods(render(folder)):
        volumes = {volume["name"] for volume in pod["spec"].get("volumes", ())}
        volumes |= {claim["metadata"]["name"] for claim in pod["claims"]}
        mounted = {mount["name"] for each in containers(pod) for mount in each.get("volumeMounts", ())}
        assert volumes == mounted
        for each in containers(pod):
            paths = [Path(mount["mountPath"]) for mount in each.get("volumeMounts", ())]
            if each.get("command") == ["emberline"]:
                args = parsed(each)
                wanted = [environment(each)["EMBERLINE_HOME"], getattr(args, "alive_file", None)]
                wanted += [getattr(args, "credential", None), "/tmp/x"]
                for path in filter(None, wanted):
                    assert any(Path(path).is_relative_to(mount) for mount in paths), path


@each_folder
def test_pods_have_no_privileges_and_time_to_drain(folder: Path, tmp_path: Path) -> None:
    manifests = render(folder)
    for pod in pods(manifests):
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False  # EMBERLINE_PORT of a Service would be taken for ours
        for container in containers(pod):
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert security.get("readOnlyRootFilesystem") or container["image"].startswith("rayproject/")
            assert container["resources"]["requests"].keys() >= {"cpu", "memory"}
            assert "memory" in container["resources"]["limits"]
    for pod, container, args in commands(manifests, "serve"):
        waits_s = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
        drain_s = config_of(container, args, tmp_path).server.drain_timeout_s
        assert pod["spec"]["terminationGracePeriodSeconds"] >= waits_s + drain_s + 10
    for pod, _, _ in commands(manifests, "worker"):
        assert pod["spec"]["terminationGracePeriodSeconds"] >= DRAIN_S + 10


@each_folder
def test_probes_of_cores_are_open_routes(folder: Path) -> None:
    is_open = {route.path for route in ROUTES if route.method == "GET" and route.policy is Policy.OPEN}
    ((pod, container, _),) = commands(render(folder), "serve")
    for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
        probe = container[kind]["httpGet"]
        assert probe["path"] in is_open
        assert probe["port"] in port_numbers(pod)
    assert container["readinessProbe"]["httpGet"]["path"] == "/health"
    assert container["livenessProbe"]["httpGet"]["path"] != "/health"  # it depends on the workers


@each_folder
def test_probes_of_workers_tell_a_fresh_file_from_an_old_one(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "alive"
    now_s = time.time()
    for _, container, args in commands(render(folder), "worker"):
        if args.rank:
            continue
        for kind, is_old_s in (("startupProbe", 60), ("readinessProbe", 60), ("livenessProbe", 300)):
            command = container[kind]["exec"]["command"]
            assert str(args.alive_file) in command[-1]
            probe = [word.replace(str(args.alive_file), str(file)) for word in command]

            def passes(probe: list[str] = probe) -> bool:
                return subprocess.run(probe, capture_output=True).returncode == 0

            file.unlink(missing_ok=True)
            assert not passes()
            file.touch()
            assert passes()
            os.utime(file, (now_s - is_old_s, now_s - is_old_s))
            assert not passes()


@each_folder
def test_network_policies_let_through_what_is_needed_and_no_more(folder: Path) -> None:
    manifests = render(folder)
    policies = [each["spec"] for each in of_kind(manifests, "NetworkPolicy").values()]
    ((core, _, _),) = commands(manifests, "serve")
    worker_pod = commands(manifests, "worker")[0][0]
    other = {"metadata": {"labels": {"app": "other"}}}

    def selects(selector: Manifest, pod: Manifest) -> bool:
        return matches(selector.get("matchLabels", {}), pod)

    def direction(kind: str, pod: Manifest, peer: Manifest, port: int) -> bool:
        applied = [
            each for each in policies if selects(each["podSelector"], pod) and kind.title() in each["policyTypes"]
        ]
        assert applied, "nothing is denied"
        for rule in (rule for each in applied for rule in each.get(kind, ())):
            peers = rule.get("from", rule.get("to"))
            ports = [each["port"] for each in rule.get("ports", ())]
            is_peer = peers is None or any(selects(each["podSelector"], peer) for each in peers)
            if is_peer and (not ports or port in ports):
                return True
        return False

    def connects(source: Manifest, target: Manifest, port: int) -> bool:
        return direction("egress", source, target, port) and direction("ingress", target, source, port)

    has_ranks = folder.name in ("leader-worker-set", "kuberay")  # their pods use ports that the system chooses
    assert connects(core, worker_pod, 7070)
    assert connects(worker_pod, worker_pod, 7070)
    assert connects(worker_pod, core, 8686)
    assert direction("ingress", core, other, 8686)
    assert direction("egress", core, other, 5432)
    assert not direction("ingress", worker_pod, other, 7070)
    assert not direction("egress", worker_pod, other, 5432)
    assert not connects(core, worker_pod, 7001)
    assert not direction("ingress", core, other, 22)
    assert connects(worker_pod, worker_pod, 7001) == has_ranks
    assert not direction("ingress", other, core, 80)


@each_folder
def test_budgets_and_controllers_name_what_exists(folder: Path) -> None:
    manifests = render(folder)
    everything = {(each["kind"], each["metadata"]["name"]) for each in manifests}
    for budget in of_kind(manifests, "PodDisruptionBudget").values():
        assert any(matches(budget["spec"]["selector"]["matchLabels"], pod) for pod in pods(manifests))
    for each in manifests:
        if each["kind"] in ("Deployment", "StatefulSet"):
            labels = each["spec"]["template"]["metadata"]["labels"]
            assert each["spec"]["selector"]["matchLabels"] == labels
        if each["kind"] == "StatefulSet":
            assert ("Service", each["spec"]["serviceName"]) in everything
        if each["kind"] == "ScaledObject":
            target = each["spec"]["scaleTargetRef"]
            assert (target["kind"], target["name"]) in everything
            assert "replicas" not in of_kind(manifests, "StatefulSet")[target["name"]]["spec"]
            assert each["spec"]["maxReplicaCount"] <= len(SECRETS["emberline-worker-credentials"]["stringData"])
        if each["kind"] == "LeaderWorkerSet":
            group = each["spec"]["leaderWorkerTemplate"]
            ranks = [args for _, _, args in commands(manifests, "worker")]
            assert {args.tp * args.pp for args in ranks} == {group["size"]}
            assert group["restartPolicy"] == "RecreateGroupOnPodRestart"
            assert len({args.rendezvous.rpartition(":")[2] for args in ranks}) == 1


def test_autoscaling_uses_metrics_that_are_exported() -> None:
    snapshot = Snapshot(workers=[], waiting={}, dispatched=0, index_blocks=0)
    exposed = asyncio.run(Metrics(lambda: snapshot).expose()).decode()
    exported = set(re.findall(r"^# TYPE (\w+)", exposed, re.MULTILINE))
    (scaled,) = of_kind(render(FOLDER / "overlays" / "keda"), "ScaledObject").values()
    for trigger in scaled["spec"]["triggers"]:
        names = re.findall(r"emberline_\w+", trigger["metadata"]["query"])
        assert names
        assert set(names) <= exported
        float(trigger["metadata"]["threshold"])


@each_folder
def test_built_in_kinds_follow_the_published_schemas(folder: Path) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate (108 MB)")
    checked = 0
    for manifest in [*render(folder), *SECRETS.values()]:
        if manifest["kind"] not in CUSTOM:
            validate.validate(manifest, "1.34", strict=True)
            checked += 1
    assert checked > 10
    # Kinds of others hold templates of pods, which are built in.
    for pod in pods([each for each in render(folder) if each["kind"] in CUSTOM]):
        template = {"metadata": {"name": "pod", **pod["metadata"]}, "spec": pod["spec"]}
        validate.validate({"apiVersion": "v1", "kind": "Pod", **template}, "1.34", strict=True)


@each_folder
def test_kustomize_renders_the_same(folder: Path) -> None:
    program = shutil.which("kustomize")
    if program is None:
        pytest.skip("kustomize is not installed: rendered by tests/deploy/kustomize.py alone")
    output = subprocess.run([program, "build", str(folder)], capture_output=True, check=True, text=True).stdout
    rendered = {identity(each): _sorted(each) for each in yaml.safe_load_all(output)}
    assert rendered == {identity(each): _sorted(each) for each in render(folder)}


def _sorted(value: Any) -> Any:
    """Without the order of lists that may be merged by a key."""
    if isinstance(value, dict):
        return {name: _sorted(each) for name, each in value.items()}
    if isinstance(value, list):
        items = [_sorted(each) for each in value]
        return sorted(items, key=str) if all(isinstance(each, dict) for each in items) else items
    return value
