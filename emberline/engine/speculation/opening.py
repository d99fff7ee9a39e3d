"""Opens the drafters of a worker that need weights: a draft head or a draft model, if the operator
asked for one and it fits the model."""

import argparse
import logging
from pathlib import Path
from typing import Any, NamedTuple

from emberline.engine.memory import free_host_bytes
from emberline.engine.speculation.head_drafter import HeadDrafter, ModelDrafter
from emberline.engine.speculation.speculator import AUTO
from emberline.models.registry import require_torch
from emberline.protocol.block_hash import KVGroup
from emberline.protocol.errors import BadInput
from emberline.weights.checkpoint import Checkpoint, open_checkpoint
from emberline.weights.generated import generate_checkpoint
from emberline.weights.model_config import BadCheckpoint
from emberline.weights.readahead import model_bytes
from emberline.weights.task_config import read_json, task_of
from emberline.weights.vocabulary import vocabulary_hash

_log = logging.getLogger(__name__)


class Drafting(NamedTuple):
    """The weights that the runner drafts with, and the drafter that proposes their drafts."""

    head: Any = None  # models.draft_head.DraftHead or DraftsElsewhere, or models.draft_model.DraftModel
    drafter: HeadDrafter | None = None
    here: bool = False  # this rank drafts: it is of the last stage

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        return () if self.head is None else self.head.kv_groups


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--draft-head", type=Path, metavar="FOLDER", help="an EAGLE-3 head of the model")
    parser.add_argument(
        "--draft-model", type=Path, metavar="PATH", help="a smaller model with the same tokenizer, which drafts"
    )


def open_drafting(model: Any, checkpoint: Checkpoint, args: argparse.Namespace) -> Drafting:
    """Open a draft head or a draft model. One that does not fit is an error if `--speculation` names it; with `auto` it
    is logged, and the model is served without it."""
    named = args.speculation in (HeadDrafter.name, ModelDrafter.name)
    if args.speculation != AUTO and not named:
        return Drafting()
    try:
        if args.speculation == ModelDrafter.name or (args.speculation == AUTO and args.draft_model is not None):
            return _draft_model(model, checkpoint.fingerprint, args)
        return _draft_head(model, checkpoint, args, named)
    except (BadInput, BadCheckpoint) as error:
        if named:
            raise
        _log.warning("no draft %s: %s", "head" if args.draft_model is None else "model", error)
        return Drafting()


def _draft_head(model: Any, checkpoint: Checkpoint, args: argparse.Namespace, named: bool) -> Drafting:
    """The one that was asked for, or the one that comes with the package."""
    # The head's own share of every step may outweigh what it gains, on a CPU and with many requests on a GPU: the one
    # that comes with the package is used where it is asked for.
    if args.draft_head is None and not named:
        return Drafting()
    require_torch("a draft head needs")

    from emberline.models.draft_head import DraftHead, DraftsElsewhere, GpuDraftHead, check_division, kv_group
    from emberline.models.eagle3_files import load_head, shipped_head

    fingerprint, shard = checkpoint.fingerprint, model.shard
    folder = args.draft_head or shipped_head(fingerprint)
    if folder is None:
        raise BadInput("--speculation eagle3 needs a head: --draft-head FOLDER", param="speculation")
    head = load_head(folder, model.config.n_layers)
    head.config.check(model.config, fingerprint)
    check_division(head.config, shard)
    if not shard.is_last:
        return Drafting(DraftsElsewhere.of(head.config.taps, [kv_group(head, model)]), HeadDrafter())
    if model.backend == "triton":
        return Drafting(GpuDraftHead(head, model), HeadDrafter(), here=True)
    embedding = None
    if model.embedding is None and not head.config.own_embedding:  # the first stage has it, and this one needs it, too
        embedding = model.kernels.load_matrix([shard.checkpoint(checkpoint).weight("token_embd.weight")])
    return Drafting(DraftHead(head, model, embedding), HeadDrafter(), here=True)


def _draft_model(model: Any, fingerprint: str, args: argparse.Namespace) -> Drafting:
    path = args.draft_model
    if path is None:
        raise BadInput("--speculation draft_model needs a model: --draft-model PATH", param="speculation")
    check_draft_model(path, args.model, _free_bytes(model.device))
    require_torch("a draft model needs")

    from emberline.models.draft_head import DraftsElsewhere
    from emberline.models.draft_model import DraftModel
    from emberline.models.registry import load_model

    generated = args.random_weights is not None
    checkpoint = (
        generate_checkpoint(read_json(path, "config.json"), args.random_weights) if generated else open_checkpoint(path)
    )
    try:
        if checkpoint.fingerprint == fingerprint and args.speculation == AUTO:
            raise BadInput(f"{path.name} is the model itself: drafting would take as long as its steps")
        decoder = load_model(checkpoint, model.device, args.deterministic, args.threads)
        drafting = DraftModel(decoder, checkpoint.fingerprint, model.config.n_layers, model.config.vocab_size)
    finally:
        checkpoint.close()
    if not model.shard.is_last:  # it was loaded for its KV groups alone
        return Drafting(DraftsElsewhere.of((), drafting.kv_groups), ModelDrafter())
    return Drafting(drafting, ModelDrafter(), here=True)


def _free_bytes(device: str) -> int:
    """Free bytes of the memory that weights on the device take."""
    if not device.startswith("cuda"):
        return free_host_bytes()
    import torch

    return torch.cuda.mem_get_info(device)[0]


def check_draft_model(draft: Path, model: Path, free_bytes: int) -> None:
    """BadInput: it cannot draft for the model. Before its weights are read."""
    if not draft.exists():
        raise BadInput(f"--draft-model {draft}: no such file or folder", param="draft_model")
    if (task := task_of(draft).task) != "generate":
        raise BadInput(f"--draft-model {draft.name} does not write text (its task is {task})", param="draft_model")
    hashes = [vocabulary_hash(path) for path in (draft, model)]
    if hashes[0] != hashes[1]:
        raise BadInput(
            f"--draft-model {draft.name} has another tokenizer than {model.name} (vocabularies {hashes[0]} and"
            f" {hashes[1]}): use a smaller model of the same family",
            param="draft_model",
        )
    n_bytes = model_bytes(draft)
    if n_bytes > free_bytes:
        raise BadInput(
            f"--draft-model {draft.name} needs about {n_bytes / 2**30:.1f} GiB of memory beside {model.name}, and"
            f" {free_bytes / 2**30:.1f} GiB are free: use a smaller one",
            param="draft_model",
        )
