"""The models of our engines, by name, and what a process needs to prepare requests for them.

Models that were named at start have their tokenizers from then on. For those that the core loads on demand, a process
reads the tokenizer when the first request for them comes, in a thread, while other requests go on.
"""

import asyncio
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from emberline.balancer.endpoint import Endpoint
from emberline.catalog.model_card import (
    MODEL_ID,
    PREDICTION,
    PUSHED,
    SPEECH_RECOGNITION,
    TEXT_CLASSIFICATION,
    TEXT_EMBEDDINGS,
    ModelCard,
    built_in,
)
from emberline.catalog.model_files import ModelFiles, Tokenizer, read_info, read_text
from emberline.protocol.errors import BadInput, MalformedModelId, ModelNotFound
from emberline.protocol.frames import EngineInfo
from emberline.text.template_renderer import LocalRenderer, RendererFactory
from emberline.text.text_encoder import TextEncoder
from emberline.text.text_model import TextModel

_MODEL_ID = re.compile(MODEL_ID)
_MODEL_ID_CHARS = 256
_USE = {
    TEXT_EMBEDDINGS: "ask for /v1/embeddings",
    TEXT_CLASSIFICATION: "ask for /v1/rerank, or for labels through `run`",
    PREDICTION: "ask for /ai/run/ with the model's own inputs",
    SPEECH_RECOGNITION: "ask for /v1/audio/transcriptions",
}


@dataclass(frozen=True, slots=True)
class Served:
    """A model, and the workers that serve it."""

    card: ModelCard
    tokenizer: Tokenizer
    endpoints: tuple[Endpoint, ...] = ()
    info: EngineInfo | None = None  # as its files tell; of a model that may have no engine yet

    @property
    def text(self) -> TextModel:
        """The tokenizer of a model that generates text. Raises BadInput for any other model."""
        if isinstance(self.tokenizer, TextModel):
            return self.tokenizer
        raise self._not_for("generates no text")

    @property
    def encoder(self) -> TextEncoder:
        """The tokenizer of a model that encodes text. Raises BadInput for one that generates it."""
        if isinstance(self.tokenizer, TextEncoder):
            return self.tokenizer
        raise self._not_for("has no embeddings, scores or labels")

    def check_speech(self) -> None:
        """Raise BadInput for a model that does not transcribe speech."""
        if self.card.task != SPEECH_RECOGNITION:
            raise self._not_for("transcribes no speech")

    def _not_for(self, what: str) -> BadInput:
        use = _USE.get(self.card.task, "ask for /v1/chat/completions")
        return BadInput(f"{self.card.id} {what}: it is for {self.card.task}; {use}", param="model")


LoadModel = Callable[[ModelFiles], Served]


class ServedModels:
    """The models of our engines in one process. Their names are those of their cards, in any case of letters."""

    def __init__(self, served: Sequence[Served] = (), load: LoadModel | None = None) -> None:
        self._load = load or load_served
        self._cards = {item.card.id: _with_own_name(item.card) for item in served}
        self.card = self._cards.get  # returns the card of the model with an id; None if there is none
        self._served = {item.card.id: item for item in served}
        self.named_at_start = frozenset(self._cards)  # ids; other models are loaded when a request asks for them
        self.states: dict[str, str] = {}  # by id, of the models that the core loads and unloads
        self.problems: dict[str, str] = {}  # by id: why a model could not be loaded, or its worker ended
        # Those keep their files while this process runs; of a predictor another version may be pushed.
        self._at_start = frozenset(item.card.id for item in served if item.card.predictor is None)
        self._files: dict[str, ModelFiles] = {}  # of the models that are loaded on demand, or can be again, by id
        self._loading: dict[str, asyncio.Future[Served]] = {}
        self._names: dict[str, str] = {}
        self._owners: dict[str, str] = {}  # the account, by id, of the models that no other account sees
        self._own: dict[tuple[str, str], str] = {}  # their ids, by account and the name by which it asks for them
        self._index()

    def cards(self) -> list[ModelCard]:
        return list(self._cards.values())

    def known(self) -> list[Served]:
        """The models whose tokenizers are in memory."""
        return list(self._served.values())

    def model_id(self, name: str) -> str | None:
        return self._names.get(name.lower())

    def find(self, name: str, account: str | None = None) -> ModelCard | None:
        """The card of the model with this id or short name, in any case of letters, if the account sees it (None: the
        operator, who sees all). An account's own model comes before the operator's."""
        name = name.lower()
        model = (account and self._own.get((account, name))) or self._names.get(name)
        if model is None or (account is not None and self._owners.get(model, account) != account):
            return None
        return self._cards[model]

    def resolve(self, name: str) -> ModelCard:
        """The card of the model with this name. Raises ModelNotFound or MalformedModelId."""
        if (card := self.find(name)) is None:
            raise self.not_found(name)
        return card

    def not_found(self, name: str, hint: str = "", account: str | None = None) -> ModelNotFound | MalformedModelId:
        """The error for a name that no model has which the account sees (None: any). It says what to do about it, with
        the hint if there is one."""
        if len(name) > _MODEL_ID_CHARS or not _MODEL_ID.fullmatch(name):
            return MalformedModelId(f"{name[:_MODEL_ID_CHARS]!r} is not a model id", param="model")
        if built_in(name) is not None:
            return ModelNotFound(f"{name} is not on this machine: run `emberline pull {name}` there", param="model")
        seen = [card.id for card in self._cards.values() if card.is_seen_by(account)]
        return ModelNotFound(f"no model {name} here; there are {', '.join(seen) or 'none'}{hint}", param="model")

    def text_of(self, model: str) -> TextModel:
        """The tokenizer of a model that generates text, which is in memory already."""
        return self._served[model].text

    async def get(self, card: ModelCard) -> Served:
        """The model of the card, its tokenizer read if it was not yet. A file that cannot be read is tried again."""
        served = self._served.get(card.id)
        if served is not None and not self._lacks_info(served):
            return served
        loading = self._loading.get(card.id)
        if loading is None:
            if (files := self._files.get(card.id)) is None:
                raise self.not_found(card.id)  # it was removed after the request had found it
            loading = asyncio.ensure_future(asyncio.to_thread(self._load, files))
            self._loading[card.id] = loading
            loading.add_done_callback(lambda done: self._loaded(card.id, done))
        return await asyncio.shield(loading)

    def offer(self, models: Iterable[ModelFiles]) -> None:
        """Let these models, and no others, be loaded on demand. Those that were named at start stay as they are."""
        files = {model.card.id: model for model in models}
        for model in self._files.keys() - files.keys() - self._at_start:
            del self._cards[model]
        changed = {model for model, found in self._files.items() if files.get(model) != found} - self._at_start
        self._served = {model: item for model, item in self._served.items() if model not in changed}
        self._files = files
        self._cards |= {
            model: _with_own_name(found.card) for model, found in files.items() if model not in self._at_start
        }
        self._index()

    def _lacks_info(self, served: Served) -> bool:
        """True if a model was named at start and was unloaded since: its engine is not there to be asked."""
        model = served.card.id
        return served.info is None and model in self._files and self.states.get(model, "loaded") != "loaded"

    def _index(self) -> None:
        cards = list(reversed(self._cards.values()))  # of equal names, the first one's counts
        self._owners = {card.id: card.predictor.account for card in cards if card.predictor and card.predictor.account}
        self._own = {
            (owner, name.lower()): model for model, owner in self._owners.items() for name in self._cards[model].aliases
        }
        self._names = {name.lower(): card.id for card in cards if card.id not in self._owners for name in card.aliases}
        self._names |= {card.id.lower(): card.id for card in cards}

    def _loaded(self, model: str, loading: "asyncio.Future[Served]") -> None:
        self._loading.pop(model, None)
        if loading.cancelled() or loading.exception() is not None or model not in self._files:
            return
        if self._files[model].card == loading.result().card:  # else it was replaced meanwhile
            self._served[model] = loading.result()


def _with_own_name(card: ModelCard) -> ModelCard:
    """The card with the name by which its account asks for it, if an account has pushed the model."""
    if card.predictor is None or not card.predictor.account:
        return card
    return msgspec.structs.replace(card, aliases=(f"{PUSHED}{card.id.rpartition('/')[2]}",))


def load_served(files: ModelFiles, templates: RendererFactory = LocalRenderer) -> Served:
    """Read a model's tokenizer and facts from its files. `templates` run foreign chat templates. Blocks."""
    return Served(files.card, read_text(files, templates), info=read_info(files))
