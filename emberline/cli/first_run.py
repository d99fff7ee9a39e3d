"""`emberline` alone on a terminal: says what is here, offers models that fit, downloads one and chats with it."""

import argparse
import sys
from collections.abc import Sequence

from emberline import __version__
from emberline.catalog.model_store import ModelStore
from emberline.catalog.offers import ModelMemory, Offer, capability_names, offers, recommended
from emberline.cli import common, models
from emberline.cli import http_client as client
from emberline.cli.chat import ChatSession
from emberline.cli.server_target import served_names, server
from emberline.config import Config
from emberline.server.address import ServerAddress
from emberline.server.model_memory import machine_memory
from emberline.supervisor import machine


def run(args: argparse.Namespace) -> int:
    config = common.config_of(args)
    memory = machine_memory()
    found = offers(ModelStore(config.home), memory)
    here = [offer for offer in found if offer.is_here]
    address = ServerAddress.for_client(config)
    print("\n".join(f"  {line}" if line else "" for line in overview(config, memory, here, client.is_running(address))))
    chosen = _choose(here or recommended(found, memory), is_download=not here)
    if chosen is None:
        print("\n  `emberline --help` lists the commands.")
        return 0
    models.fetch(chosen.card.id, ModelStore(config.home), on_gpu=memory.on_gpu)
    served = served_names(config, required=False)
    with server(config, chosen.card.id, served, required=False) as (found_address, model_id):
        return ChatSession(found_address, model_id, {}, None, config.home / "history", verbose=False).interact()


def overview(config: Config, memory: ModelMemory, here: Sequence[Offer], is_running: bool) -> list[str]:
    """The lines that say what is on this machine."""
    device = "GPU" if memory.on_gpu else f"CPU, {machine.cores()} cores"
    names = ", ".join(offer.name for offer in here[:5]) + (f" and {len(here) - 5} more" if len(here) > 5 else "")
    running = f"running at {ServerAddress.for_client(config).url}" if is_running else "not running"
    return [
        "",
        f"Emberline {__version__}",
        "",
        f"device   {device}; {common.format_size(memory.n_bytes)} for models",
        f"models   {names or 'none yet'}",
        f"server   {running}",
        f"data     {config.home}",
    ]


def _choose(choices: Sequence[Offer], is_download: bool) -> Offer | None:
    """Ask which model to chat with. Returns None if the answer is empty or the input ends."""
    if not choices:
        return None
    print(f"\n  {'Three models that fit this machine' if is_download else 'Chat with'}:\n")
    for number, offer in enumerate(choices[:9], 1):
        can = ", ".join(capability_names(offer.card)) or "chat"
        size = common.format_size(offer.card.weight_bytes)
        license = offer.card.license or "licence unknown"
        print(f"  {number}  {offer.name:<22} {size:>9}   {can:<18} {license}")
    what = "download and chat" if is_download else "chat"
    while True:
        try:
            answer = input(f"\n  number to {what}, Enter to leave: ").strip()
        except EOFError:
            return None
        if not answer:
            return None
        if answer.isdecimal() and 1 <= int(answer) <= len(choices[:9]):
            return choices[int(answer) - 1]
        print(f"  a number from 1 to {len(choices[:9])}", file=sys.stderr)
