"""`emberline model`: the catalog of models: cards, aliases, and the models on this machine.

emberline model add CARD.toml | NAME | PATH | hf:org/repo
emberline model show NAME
emberline model alias [NAME [MODEL[=WEIGHT] …]] [--remove]
emberline model ls | rm MODEL
emberline model versions NAME [--remote]
emberline model rollback NAME [VERSION] [--remote]
emberline model rm NAME --remote
"""

import argparse
import difflib
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import msgspec

from emberline.catalog import hub
from emberline.catalog.model_card import HubSource, ModelCard, WheelSource, describe_path
from emberline.catalog.model_store import ModelStore, looks_like_path
from emberline.catalog.offers import names
from emberline.catalog.predictor_cards import publish
from emberline.catalog.store_watch import wait_until_offered
from emberline.cli import common, models
from emberline.cli import http_client as client
from emberline.predictor.versions import OWNER, PredictorVersions
from emberline.protocol.errors import BadInput, ModelNotFound
from emberline.server.address import ServerAddress
from emberline.server.model_memory import machine_memory
from emberline.weights.checkpoint import open_checkpoint
from emberline.weights.lossless_files import is_compressed
from emberline.weights.model_config import BadCheckpoint
from emberline.weights.summary import PartSize, part_sizes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    if parser.get_default("command") == "show":
        _add_show_arguments(parser)
        return
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    add = actions.add_parser("add", help="a model card, or a model as `emberline pull` takes it", allow_abbrev=False)
    add.add_argument("model", metavar="MODEL", help="a card's TOML file, a name, a path, or hf:org/repo")
    show = actions.add_parser("show", help="what is known of a model", allow_abbrev=False)
    _add_show_arguments(show)
    alias = actions.add_parser("alias", help="other names of the running server's models", allow_abbrev=False)
    alias.add_argument("name", nargs="?", metavar="NAME", help="the alias; without it, all are listed")
    alias.add_argument(
        "targets", nargs="*", metavar="MODEL[=WEIGHT]", help="what it stands for; several share by weight"
    )
    alias.add_argument("--remove", action="store_true", help="remove the alias")
    listing = actions.add_parser("ls", help="the models on this machine", allow_abbrev=False)
    remove = actions.add_parser("rm", help="remove models from this machine", allow_abbrev=False)
    remove.add_argument("models", nargs="+", metavar="MODEL", help="id or alias")
    past = actions.add_parser("versions", help="the versions of a model that was pushed", allow_abbrev=False)
    back = actions.add_parser("rollback", help="serve an earlier version of a pushed model", allow_abbrev=False)
    for action in (past, back):
        action.add_argument("name", metavar="NAME", help="@me/NAME, or NAME")
    back.add_argument("version", nargs="?", type=int, metavar="VERSION", help="default: the one before")
    for action in (remove, past, back):
        action.add_argument("--remote", action="store_true", help="of the key's account, on a server over HTTP")
    for action in (alias, remove, past, back):
        common.add_client_options(action)
    for action in (add, listing):
        common.add_data_dir(action)
        common.add_json(action)


def _add_show_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="id, alias, hf:org/repo, or the path of a GGUF file or folder")
    parser.set_defaults(action="show")
    common.add_data_dir(parser)
    common.add_json(parser)


def run(args: argparse.Namespace) -> int:
    config = common.config_of(args)
    if args.action == "alias":
        return _alias(ServerAddress.for_client(config), args)
    if getattr(args, "remote", False):
        return _change_remotely(ServerAddress.for_client(config), args)
    store = ModelStore(config.home)
    if args.action == "add" and args.model.endswith(".toml"):
        return _add_card(store, args)
    if args.action == "show":
        return _show(store, args)
    if args.action in ("versions", "rollback"):
        return _versions(store, PredictorVersions(config.home), args)
    args.command = {"add": "pull"}.get(args.action, args.action)
    return models.run(args)


def _add_card(store: ModelStore, args: argparse.Namespace) -> int:
    card, path = store.cards.add(Path(args.model).expanduser())
    if args.json:
        common.print_json({"id": card.id, "path": str(path)})
    else:
        then = f"; `emberline pull {card.id}` downloads it" if isinstance(card.source, WheelSource) else ""
        print(f"{card.id} is in the catalog{then}:\n{path}")
    return 0


def _show(store: ModelStore, args: argparse.Namespace) -> int:
    card, path = known_model(store, args.model)
    shown = msgspec.to_builtins(card) | {"path": None if path is None else str(path)}
    parts = _compressed_parts(path)
    if args.json:
        common.print_json(shown | ({"compression": msgspec.to_builtins(parts)} if parts else {}))
        return 0
    lines = _lines(card, "not on this machine" if path is None else str(path))
    for name, value in [*lines, *_compression_lines(parts)]:
        print(f"{name:<16}{value}")
    return 0


def _compressed_parts(path: Path | None) -> list[PartSize]:
    """The parts of a model that is compressed on disk; none for another model."""
    if path is None or not is_compressed(path):
        return []
    try:
        checkpoint = open_checkpoint(path)
    except BadCheckpoint as error:
        raise BadInput(f"{path}: {error}") from None
    parts = part_sizes(checkpoint.weight(name) for name in checkpoint.names)
    checkpoint.close()
    return parts


def _compression_lines(parts: list[PartSize]) -> list[tuple[str, str]]:
    """The bytes on disk of each part and of all of them, as a share of those that they decode to."""
    if not parts:
        return []
    whole = PartSize("all", sum(part.n_bytes for part in parts), sum(part.stored_bytes for part in parts))
    rows = []
    for part in (whole, *parts):
        stored, decoded = common.format_size(part.stored_bytes), common.format_size(part.n_bytes)
        rows.append(("", f"{part.name}: {part.stored_bytes / part.n_bytes:.1%}, {stored} of {decoded}"))
    return [("compression", rows[0][1]), *rows[1:]]


def known_model(store: ModelStore, name: str) -> tuple[ModelCard, Path | None]:
    """The model that `emberline plan` and `pull` know by this name, and where it is on this machine."""
    if (entry := store.find(name)) is not None:
        return entry
    if (card := store.offer(name, on_gpu=machine_memory().on_gpu)) is not None:
        return card, None
    if looks_like_path(name):
        path = Path(name).expanduser().absolute()
        return describe_path(path), path
    known = [*names(store), *(each for entry in store.entries() for each in (*entry.card.aliases, entry.card.id))]
    similar = difflib.get_close_matches(name.lower(), dict.fromkeys(known), n=3)
    meant = f"did you mean {', '.join(similar)}?" if similar else "`emberline ls --all` lists them;"
    raise ModelNotFound(f"no model is called {name!r}; {meant} hf:org/repo and paths are names too")


def _lines(card: ModelCard, path: str) -> list[tuple[str, str]]:
    can = msgspec.to_builtins(card.capabilities)
    price = {} if card.price is None else msgspec.to_builtins(card.price)
    rows = [
        ("id", card.id),
        ("aliases", ", ".join(card.aliases)),
        ("task", card.task),
        ("description", card.description),
        ("context window", f"{card.context_window:,} tokens"),
        (
            "capabilities",
            ", ".join(name if value is True else f"{name}: {_text(value)}" for name, value in can.items()),
        ),
        ("architecture", card.architecture),
        ("size", common.format_size(card.weight_bytes) if card.weight_bytes else ""),
        ("parameters", f"{card.n_parameters:,}" if card.n_parameters else ""),
        ("quantization", card.quantization),
        ("licence", card.license),
        ("sampling", ", ".join(f"{name} {value:g}" for name, value in card.defaults.given.items())),
        ("price", ", ".join(f"{name} {value}" for name, value in price.items()) or "none on the card"),
        ("deprecation", card.deprecation_date),
        ("source", hub.spec_of(card.source) if isinstance(card.source, HubSource) else _kind(card)),
        ("path", path),
    ]
    return [(name, value) for name, value in rows if value]


def _kind(card: ModelCard) -> str:
    if isinstance(card.source, WheelSource) and card.source.hub is not None:
        return f"{hub.spec_of(card.source.hub)}; mirror: {len(card.source.wheels)} wheels of the package index"
    return type(card.source).__name__.removesuffix("Source").lower()


def _text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _alias(address: ServerAddress, args: argparse.Namespace) -> int:
    if args.remove:
        if not args.name or args.targets:
            raise BadInput("--remove takes the name of one alias and nothing else")
        answer = client.delete(address, f"/api/aliases/{quote(args.name)}")
    elif args.targets:
        answer = client.post(address, "/api/aliases", {"name": args.name, "targets": dict(map(_target, args.targets))})
    else:
        answer = client.get(address, "/api/aliases")
    found = [row for row in answer["aliases"] if args.remove or args.name in (None, row["name"])]
    if args.json:
        common.print_json(found)
    elif not found:
        print(f"There is no alias {args.name}." if args.name and not args.remove else "There are no aliases.")
    else:
        rows = [(row["name"], _shares(row["targets"]), "emberline.toml" if row["configured"] else "") for row in found]
        common.print_table([("ALIAS", "STANDS FOR", "CONFIGURED IN"), *rows])
    return 0


def _target(text: str) -> tuple[str, int]:
    """`model` or `model=weight`."""
    model, equals, weight = text.rpartition("=")
    if not equals:
        return text, 1
    if not weight.isdecimal():
        raise BadInput(f"{text!r} is not of the form MODEL or MODEL=WEIGHT, such as smollm2=90")
    return model, int(weight)


def _shares(targets: dict[str, int]) -> str:
    if len(targets) == 1:
        return next(iter(targets))
    total = sum(targets.values())
    return ", ".join(f"{model} {100 * weight / total:.3g} %" for model, weight in targets.items())


def _versions(store: ModelStore, versions: PredictorVersions, args: argparse.Namespace) -> int:
    """List the versions of a pushed model, or serve another one of them."""
    model = args.name if args.name.startswith("@") else f"{OWNER}/{args.name}"
    known = versions.list(model)
    entry = store.find(model)
    if not known or entry is None or entry.card.predictor is None:
        raise ModelNotFound(f"no model {model} was pushed here: `emberline push DIR` pushes one")
    current = entry.card.predictor.version
    if args.action == "rollback":
        earlier = [each.version for each in known if each.version < current]
        if args.version is None and not earlier:
            raise BadInput(f"{model} has no version before {current}")
        manifest = versions.find(model, args.version if args.version is not None else earlier[-1])
        publish(store, manifest, versions.path(manifest))
        wait_until_offered(store.root)
        current = manifest.version
    rows = [{"version": each.version, "digest": each.digest, "served": each.version == current} for each in known]
    return _print_versions(rows, args)


def _change_remotely(address: ServerAddress, args: argparse.Namespace) -> int:
    """List the versions of a model that the key's account has pushed, serve an earlier one, or remove such models."""
    if args.action == "rm":
        for name in args.models:
            client.post(address, "/api/models/remove", {"model": name}, None)
            if not args.json:
                print(f"removed {name}")
        if args.json:
            common.print_json({"removed": args.models})
        return 0
    if args.action == "rollback":
        body = {"model": args.name, "version": args.version}
        found = client.post(address, "/api/models/rollback", body, None)
    else:
        found = client.get(address, f"/api/models/versions?{urlencode({'model': args.name})}")
    return _print_versions(found["data"], args)


def _print_versions(rows: list[dict[str, Any]], args: argparse.Namespace) -> int:
    if args.json:
        common.print_json(rows)
    else:
        shown = [(str(row["version"]), str(row["digest"]), "served" if row["served"] else "") for row in rows]
        common.print_table([("VERSION", "DIGEST", ""), *shown])
    return 0
