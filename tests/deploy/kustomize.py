"""What our kustomizations use of kustomize, for machines without it: resources, namespace, strategic merge patches."""

import copy
from pathlib import Path
from typing import Any

import yaml

Manifest = dict[str, Any]
# Lists that are merged by a key of their items, as the Kubernetes API declares it; others are replaced.
MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "ports": "containerPort",
}
KNOWN = {"apiVersion", "kind", "namespace", "resources", "patches"}


def read(path: Path) -> list[Manifest]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def render(folder: Path) -> list[Manifest]:
    (kustomization,) = read(folder / "kustomization.yaml")
    assert kustomization.keys() <= KNOWN
    found: list[Manifest] = []
    for name in kustomization["resources"]:
        path = folder / name
        found += render(path) if path.is_dir() else read(path)
    for listed in kustomization.get("patches", ()):
        assert listed.keys() <= {"path", "patch"}
        patches = read(folder / listed["path"]) if "path" in listed else [yaml.safe_load(listed["patch"])]
        for patch in patches:
            (target,) = [each for each in found if identity(each) == identity(patch)]
            found.remove(target)
            if patch.get("$patch") != "delete":
                found.append(_merged(target, patch))
    for each in found:
        if each["kind"] != "Namespace":
            each["metadata"]["namespace"] = kustomization["namespace"]
    return found


def identity(manifest: Manifest) -> tuple[str, str, str]:
    return manifest["apiVersion"], manifest["kind"], manifest["metadata"]["name"]


def _merged(old: Any, new: Any, field: str = "") -> Any:
    if isinstance(old, dict) and isinstance(new, dict):
        result = {name: value for name, value in old.items() if name not in new}
        for name, value in new.items():
            if value is not None:
                result[name] = _merged(old.get(name), value, name)
        return result
    if isinstance(old, list) and isinstance(new, list) and field in MERGE_KEYS:
        key = MERGE_KEYS[field]
        by_key = {item[key]: item for item in old}
        for item in new:
            by_key[item[key]] = _merged(by_key.get(item[key]), item)
        return list(by_key.values())
    return copy.deepcopy(new)
