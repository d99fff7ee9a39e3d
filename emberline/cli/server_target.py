"""The server a command talks to: the one that runs, or one of its own."""

import argparse
import contextlib
from collections.abc import Iterator

from emberline.cli import common
from emberline.cli import http_client as client
from emberline.cli.http_client import Address


@contextlib.contextmanager
def server(args: argparse.Namespace) -> Iterator[tuple[Address, str]]:
    """The server at the configured address if it has the model, otherwise one of our own for as long as it is used.

    Yields where it is and the model's id there.
    """
    config = common.config_of(args)
    address = Address.of(config)
    if client.is_there(address):
        ids = [str(card["id"]) for card in client.get(address, "/v1/models")["data"]]
        wanted = _id_of(args.model) if args.model else next(iter(ids), None)
        if wanted in ids:
            yield address, wanted
            return
    from emberline.cli.own_server import own_server

    with own_server(config, args.model) as (address, model):
        yield address, model


def _id_of(name: str) -> str:
    """The id behind a built-in model's alias; any other name is what it is."""
    from emberline.catalog.model_card import built_in

    card = built_in(name)
    return name if card is None else card.id
