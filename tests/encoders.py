"""Small random encoders as checkpoint folders, and an engine in a thread that serves one."""

import socket
import string
import threading
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, normalizers, pre_tokenizers, processors
from tokenizers.models import WordPiece

from emberline.balancer.endpoint import Endpoint
from emberline.engine.encoders.encoder_loop import EncoderLimits, EncoderLoop
from emberline.engine.worker.socket_server import Server
from emberline.models.encoder import EncoderModel
from emberline.models.registry import load_encoder
from emberline.protocol.frames import EngineInfo
from emberline.weights.checkpoint import open_checkpoint
from emberline.weights.task_config import task_of
from tests.lazy_modules import transformers

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
VOCABULARY = [*SPECIAL, *string.ascii_lowercase, *(f"##{letter}" for letter in string.ascii_lowercase)]
MAX_LEN = 32
TOKEN = "encoder-token"


def tiny_bert(folder: Path, n_labels: int = 0, **config: Any) -> Path:
    """A model whose tokens are letters: an embedder, or with labels a reranker (1) or a classifier."""
    torch.manual_seed(1)
    settings = transformers.BertConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=MAX_LEN,
        initializer_range=0.3,
        **({"num_labels": n_labels} if n_labels else {}),
        **config,
    )
    kind = transformers.AutoModelForSequenceClassification if n_labels else transformers.AutoModel
    kind.from_config(settings).eval().save_pretrained(folder)
    words = WordPiece({token: index for index, token in enumerate(VOCABULARY)}, unk_token="[UNK]")
    tokenizer = Tokenizer(words)
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.enable_padding(length=MAX_LEN)  # as released files have it: it must not count
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


class EncoderThread:
    """An engine process's server and step loop, in a thread of this one."""

    def __init__(self, folder: Path, address: Path, name: str = "e0", token_budget: int = 64) -> None:
        checkpoint = open_checkpoint(folder)
        config, task = checkpoint.config, task_of(folder)
        self.model: EncoderModel = load_encoder(checkpoint)
        limits = EncoderLimits(config.vocab_size, config.context_len, token_budget)
        self.loop = EncoderLoop(self.model, limits, classifies=task.task != "embed")
        info = EngineInfo(
            model=folder.name,
            fingerprint=checkpoint.fingerprint,
            context_len=config.context_len,
            vocab_size=config.vocab_size,
            eos_ids=(),
            max_running=64,
            task=task.task,
        )
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(address))
        listener.listen()
        self.server = Server(listener, self.loop, info, TOKEN)
        self.endpoint = Endpoint(name=name, address=f"unix:{address}", token=TOKEN)
        threading.Thread(target=self.server.run, daemon=True).start()
