"""A model as one request uses it. Its name was looked up once, before; whatever serves the request is handed this."""

from dataclasses import dataclass
from typing import Literal

from emberline.catalog.model_card import ModelCard
from emberline.upstream.providers.access import Access

# Our engine workers, the operator's other servers, or a company's API.
Where = Literal["engine", "server", "provider"]

TRANSLATED = ("anthropic", "gemini")  # kinds of servers that speak neither our frames nor OpenAI's API


@dataclass(frozen=True, slots=True)
class Target:
    """A model that the caller may use, and how requests reach it. `Models.target` makes it and checks the scope."""

    card: ModelCard
    where: Where = "engine"
    remote: str = ""  # the model's name at its server
    kind: str = ""  # of server, as `upstream_request` knows them: which fields it takes
    access: Access | None = None  # to a provider: the key, and perhaps the account's own address
    # The server is a provider's: it gets every field that a client sends, and may fetch what a client names. A server
    # of the operator gets what is known to be harmless.
    takes_any_field: bool = False

    @property
    def is_upstream(self) -> bool:
        """True if another server computes the model, not an engine worker of ours."""
        return self.where != "engine"

    @property
    def is_translated(self) -> bool:
        """True if a `Dialect` writes the requests to the model's server."""
        return self.kind in TRANSLATED

    @property
    def fetches_images(self) -> bool:
        """True if the server fetches images behind https: URLs. A server of the operator must not."""
        return self.takes_any_field and self.kind != "gemini"

    @property
    def provider_access(self) -> Access:
        """The access to the provider whose model this is."""
        assert self.access is not None, "only a provider's model has one"
        return self.access
