"""The request pipeline as a gateway uses it: `Service` implements it, and every attempt goes through it once."""

from collections.abc import AsyncGenerator, Callable
from typing import Protocol

from emberline.catalog.model_card import ModelCard
from emberline.protocol.complete_response import Encoded
from emberline.protocol.events import Completed, TextEvent
from emberline.protocol.media import Media, MediaRequest
from emberline.protocol.rate_limits import RateLimits
from emberline.protocol.request import EncodeRequest, GenerateRequest, Principal, SpeechRequest
from emberline.protocol.speech import Transcript
from emberline.service.models import ModelLookup
from emberline.telemetry.request_log import AttemptContext
from emberline.upstream.models import UpstreamModels
from emberline.upstream.upstream_request import UpstreamRequest

OnAdmit = Callable[[RateLimits | None], None]
OnComplete = Callable[[Completed], None]


class Pipeline(Protocol):
    """Resolves models and runs requests; `attempt` says which attempt of a gateway it is."""

    @property
    def upstream(self) -> UpstreamModels: ...

    @property
    def models(self) -> ModelLookup: ...

    def generate(
        self,
        request: GenerateRequest,
        principal: Principal,
        *,
        on_admit: OnAdmit | None = None,
        on_complete: OnComplete | None = None,
        attempt: AttemptContext | None = None,
        card: ModelCard | None = None,
    ) -> AsyncGenerator[TextEvent, None]: ...

    def forward(
        self,
        request: UpstreamRequest,
        on_admit: OnAdmit | None = None,
        on_complete: OnComplete | None = None,
        attempt: AttemptContext | None = None,
    ) -> AsyncGenerator[tuple[bytes, bool], None]: ...

    async def encode(
        self,
        request: EncodeRequest,
        principal: Principal,
        *,
        on_admit: OnAdmit | None = None,
        on_complete: OnComplete | None = None,
        attempt: AttemptContext | None = None,
        card: ModelCard | None = None,
    ) -> Encoded: ...

    async def transcribe(
        self,
        request: SpeechRequest,
        principal: Principal,
        *,
        on_admit: OnAdmit | None = None,
        on_complete: OnComplete | None = None,
        attempt: AttemptContext | None = None,
        card: ModelCard | None = None,
    ) -> Transcript: ...

    async def make_media(
        self,
        request: MediaRequest,
        principal: Principal,
        *,
        on_admit: OnAdmit | None = None,
        on_complete: OnComplete | None = None,
        attempt: AttemptContext | None = None,
        card: ModelCard | None = None,
    ) -> Media: ...
