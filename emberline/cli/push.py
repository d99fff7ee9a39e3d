"""`emberline push`: serve a model of one's own, from a folder with `cog.yaml` and a predictor.

emberline push DIR
emberline push DIR --name ocr --memory 4GiB --cpus 2
emberline push --image ocr:latest
"""

import argparse
from pathlib import Path
from urllib.parse import urlencode

import msgspec

from emberline.catalog.model_store import ModelStore
from emberline.catalog.predictor_cards import publish
from emberline.catalog.store_watch import wait_until_offered
from emberline.cli import common
from emberline.cli import http_client as client
from emberline.config import Config, parse_size
from emberline.predictor.fetch import FetchGrant
from emberline.predictor.project import read_project
from emberline.predictor.remote_push import pack
from emberline.predictor.versions import PredictorVersions, PushSettings, model_name
from emberline.protocol.errors import BadInput
from emberline.protocol.prediction import Resources, check_resources
from emberline.server.address import ServerAddress
from emberline.supervisor.engine_workers import granted_secrets
from emberline.supervisor.sandbox.protections import find_protections

_DEFAULTS = Resources()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("folder", type=Path, metavar="DIR", nargs="?", help="a folder with cog.yaml and a predictor")
    add(
        "--image",
        default="",
        metavar="REF",
        help="instead of a folder: an image of `cog build`, run by Docker or Podman",
    )
    add("--name", default="", help="the model's name: @me/NAME (default: of the image, or of the folder)")
    add("--memory", default="2GiB", metavar="SIZE", help="memory of the predictor (default 2GiB)")
    add("--scratch", default="1GiB", metavar="SIZE", help="files that it may write while it runs (default 1GiB)")
    add("--cpus", type=float, default=_DEFAULTS.cpus, metavar="N", help="CPU cores (default 1)")
    add("--setup-timeout", type=float, default=_DEFAULTS.setup_s, metavar="S", help="for setup() to end (default 300)")
    add("--timeout", type=float, default=_DEFAULTS.predict_s, metavar="S", help="for a prediction to end (default 600)")
    add(
        "--secret",
        action="append",
        default=[],
        metavar="NAME",
        help="a variable that the predictor gets: the server has its value as EMBERLINE_GRANT_NAME",
    )
    add(
        "--fetch-from",
        action="append",
        default=[],
        metavar="HOST",
        help="run setup() now, and let it fetch from HOST, such as huggingface.co or '*.example.org'",
    )
    add("--remote", action="store_true", help="push to a server over HTTP, if [predictors] remote_push allows it there")
    common.add_client_options(parser)


def run(args: argparse.Namespace) -> int:
    config = common.config_of(args)
    home = config.home
    if args.image and (args.folder is not None or args.remote or args.fetch_from):
        raise BadInput("--image needs neither DIR nor --fetch-from, and works on the server's machine alone")
    if not args.image and (args.folder is None or not args.folder.is_dir()):
        raise BadInput(f"there is no folder {args.folder}" if args.folder else "give the DIR of a project, or --image")
    resources = check_resources(
        Resources(
            memory_bytes=parse_size(args.memory),
            scratch_bytes=parse_size(args.scratch),
            cpus=args.cpus,
            setup_s=args.setup_timeout,
            predict_s=args.timeout,
        )
    )
    if args.remote:
        return _push_remotely(args, config, resources)
    for missing in () if args.image else find_protections().missing:
        common.print_note(f"this machine lacks {missing}")
    settings = PushSettings(
        name=args.name,
        resources=resources,
        secrets=tuple(args.secret),
        fetch=FetchGrant(
            hosts=(*config.predictors.fetch_hosts, *args.fetch_from),
            allowed_networks=config.predictors.allowed_networks,
            max_bytes=config.predictors.max_fetched_bytes,
        ),
        image_registries=config.predictors.image_registries,
        granted=granted_secrets(),
    )
    versions, store = PredictorVersions(home), ModelStore(home)
    if args.image:
        manifest = versions.push_image(args.image, settings, common.print_note)
    else:
        manifest = versions.push(args.folder, settings, common.print_note)
    entry = publish(store, manifest, versions.path(manifest))
    wait_until_offered(store.root)
    if args.json:
        common.print_json({"id": entry.card.id, "version": manifest.version, "path": str(entry.path)})
    else:
        inputs = " ".join(manifest.input.get("properties", {}))
        print(f"{entry.card.id} version {manifest.version} is ready to be served; its inputs: {inputs or 'none'}")
    return 0


def _push_remotely(args: argparse.Namespace, config: Config, resources: Resources) -> int:
    """Send the project to a server, which decides what its setup may fetch and has no secrets for it."""
    if args.secret or args.fetch_from:
        raise BadInput("--secret and --fetch-from are the operator's to give: leave them out with --remote")
    name = model_name(read_project(args.folder), args.name)
    query = urlencode({"name": name, **msgspec.structs.asdict(resources)})
    pushed = client.push(ServerAddress.for_client(config), pack(args.folder), query)
    if args.json:
        common.print_json(pushed)
    else:
        for note in pushed["notes"]:
            common.print_note(note)
        print(f"{pushed['id']} version {pushed['version']} is ready to be served")
    return 0
