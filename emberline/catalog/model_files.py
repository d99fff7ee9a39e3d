"""Reads what a model's files tell without an engine: its tokenizer, its vocabulary, context and fingerprint."""

from pathlib import Path

import msgspec

from emberline.catalog.model_card import ModelCard, is_built_in
from emberline.protocol.errors import BadInput
from emberline.protocol.frames import EngineInfo, predictor_info
from emberline.text.template_renderer import LocalRenderer, RendererFactory
from emberline.text.text_encoder import TextEncoder
from emberline.text.text_model import TextModel
from emberline.weights.checkpoint import open_checkpoint
from emberline.weights.image_settings import read_image_processor
from emberline.weights.model_config import BadCheckpoint
from emberline.weights.task_config import task_of
from emberline.weights.whisper_files import CONTEXT_LEN, WhisperFiles, read_whisper


class PredictorFiles(msgspec.Struct, frozen=True):
    """Stands for the tokenizer of a predictor, which has none."""


class ModelFiles(msgspec.Struct, frozen=True):
    """A model on this machine: the GGUF file or the Hugging Face folder."""

    card: ModelCard
    path: str


Tokenizer = TextModel | TextEncoder | WhisperFiles | PredictorFiles


def read_text(files: ModelFiles, foreign: RendererFactory = LocalRenderer) -> Tokenizer:
    """The model's tokenizer, and its chat template if it generates. `foreign` runs the chat template of a model that is
    not of the built-in catalog. Raises BadInput for a model that cannot be served."""
    if files.card.predictor is not None:
        return PredictorFiles()
    try:
        task = task_of(Path(files.path))
        if task.task == "transcribe":
            return read_whisper(Path(files.path))
        if task.task != "generate":
            return TextEncoder.load(Path(files.path), task)
        renderers = LocalRenderer if is_built_in(files.card) else foreign
        return TextModel.load(Path(files.path), renderers, files.card.id)
    except BadCheckpoint as error:
        raise BadInput(f"{files.path} cannot be served: {error}") from None


def read_info(files: ModelFiles) -> EngineInfo:
    """The information that an engine would give. The context may turn out smaller: the KV cache has to hold it."""
    if (predictor := files.card.predictor) is not None:
        return predictor_info(files.card.id, predictor.digest, predictor.slots)
    try:
        if task_of(Path(files.path)).task == "transcribe":
            return whisper_info(files.card.id, read_whisper(Path(files.path)))
        checkpoint = open_checkpoint(Path(files.path))
    except BadCheckpoint as error:
        raise BadInput(f"{files.path} cannot be served: {error}") from None
    config, task = checkpoint.config, task_of(Path(files.path))
    checkpoint.close()
    return EngineInfo(
        model=files.card.id,
        fingerprint=checkpoint.fingerprint,
        context_len=min(config.context_len, task.max_len or config.context_len),
        vocab_size=config.vocab_size,
        eos_ids=config.eos_ids,
        task=task.task,
        images=read_image_processor(Path(files.path)),
    )


def whisper_info(model: str, files: WhisperFiles) -> EngineInfo:
    return EngineInfo(
        model=model,
        fingerprint=files.fingerprint,
        context_len=CONTEXT_LEN,
        vocab_size=files.vocab_size,
        eos_ids=(),
        task="transcribe",
    )
