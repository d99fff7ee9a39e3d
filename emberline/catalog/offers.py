"""The models that can be had by name, and which of them suit this machine."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from emberline.catalog.model_card import BUILT_IN, DEFAULT_MODEL, TEXT_GENERATION, HubSource, ModelCard, WheelSource
from emberline.catalog.model_store import ModelStore
from emberline.catalog.published_shapes import PublishedShape

_OVERHEAD_BYTES = {
    False: 1 << 30,
    True: 6 << 30,
}  # beside the weights, on a CPU and a GPU: KV cache, workspace, runtime
_OPEN_LICENSES = ("apache-2.0", "mit")  # whose models the hub gives to anybody, without a token
_FAMILIES = ("qwen3-coder", "gpt-oss", "qwen3", "qwen2.5-coder")  # whose models serve agents best, the best first
_CPU_BYTES_PER_CORE = 3 << 28  # of weights that a core reads often enough for a chat


class ModelMemory(NamedTuple):
    """The memory that models of this machine have."""

    n_bytes: int
    on_gpu: bool
    n_cores: int = 1


class Offer(NamedTuple):
    card: ModelCard
    name: str  # the one to type
    fits: bool
    is_here: bool

    def body(self) -> dict[str, Any]:
        """The offer as JSON has it."""
        card = self.card
        return {
            "name": self.name,
            "id": card.id,
            "aliases": card.aliases,
            "bytes": card.weight_bytes,
            "quantization": card.quantization,
            "context_window": card.context_window,
            "capabilities": capability_names(card),
            "license": card.license,
            "fits": self.fits,
            "here": self.is_here,
        }


def capability_names(card: ModelCard) -> list[str]:
    """Names what a model can do beside its task, in the words of lists."""
    can = card.capabilities
    named = {"tools": can.function_calling, "thinking": can.reasoning, "images": can.vision}
    task = [] if card.task == TEXT_GENERATION else [card.task.lower()]
    return [*task, *(name for name, has in named.items() if has)]


def fits(card: ModelCard, memory: ModelMemory) -> bool:
    """True if the model's weights and a small KV cache fit into the memory."""
    return card.weight_bytes + _OVERHEAD_BYTES[memory.on_gpu] <= memory.n_bytes


def offers(store: ModelStore, memory: ModelMemory) -> list[Offer]:
    """Every model that can be pulled by name or is here, the smallest first."""
    here = {entry.card.id: entry.card for entry in store.entries()}
    shapes = (shape.offer(on_gpu=memory.on_gpu) for shape in store.shapes if shape.aliases)
    cards = {card.id: card for card in (*shapes, *store.cards.models(), *map(store.cards.apply, BUILT_IN))} | here
    rows = [Offer(card, short_name(card), fits(card, memory), card.id in here) for card in cards.values()]
    return sorted(rows, key=lambda offer: (offer.card.weight_bytes, offer.card.id))


def short_name(card: ModelCard) -> str:
    """The name that a person types: the alias with a tag and without a quantization, else the first alias."""
    tagged = [alias for alias in card.aliases if ":" in alias and not alias.startswith("hf:")]
    plain = [alias for alias in card.aliases if not alias.startswith("hf:")]
    return min(tagged or plain, key=len, default=card.id)


def recommended(found: Sequence[Offer], memory: ModelMemory, n: int = 3) -> list[Offer]:
    """The `n` models to begin with: the largest of each family that call tools, fit, answer at a bearable rate and need
    no token of the hub; on a CPU the small default model is one of them."""
    usable = [offer for offer in found if offer.fits and _is_for_beginners(offer.card, memory)]
    largest = {offer.name.partition(":")[0]: offer for offer in usable}  # ordered by size: the last of a family stays
    chosen = [largest[family] for family in _FAMILIES if family in largest]
    if memory.on_gpu:
        return chosen[:n]
    default = [offer for offer in found if offer.card.id == DEFAULT_MODEL]
    return [*chosen[: n - len(default)], *default]


def _is_for_beginners(card: ModelCard, memory: ModelMemory) -> bool:
    if not card.capabilities.function_calling or card.license not in _OPEN_LICENSES:
        return False
    if memory.on_gpu:
        return True
    is_quantized = isinstance(card.source, WheelSource) or (isinstance(card.source, HubSource) and card.source.file)
    return bool(is_quantized) and card.weight_bytes <= memory.n_cores * _CPU_BYTES_PER_CORE


def names(store: ModelStore) -> Iterator[str]:
    """Every name that `pull` knows, ids and aliases, in lower case."""
    for card in (*BUILT_IN, *store.cards.models()):
        yield from (name.lower() for name in (*card.aliases, card.id))
    for shape in store.shapes:
        yield from shape_names(shape)


def shape_names(shape: PublishedShape) -> list[str]:
    tags = [f"{alias}-{key}".lower() for alias in shape.aliases if ":" in alias for key in shape.variants]
    return [*shape.aliases, *tags, shape.id]
