"""Which call a request for embeddings, a transcript or media becomes, by the API of its provider."""

from typing import Any

from emberline.protocol.errors import Unsupported
from emberline.protocol.media import MediaRequest
from emberline.protocol.request import EncodeRequest, SpeechRequest
from emberline.upstream.dialects import gemini_media, openai_media
from emberline.upstream.providers.whole_call import WholeTask


def whole_task(kind: str, model: str, request: EncodeRequest | SpeechRequest | MediaRequest) -> WholeTask[Any]:
    """Unsupported where the provider's API has no such call."""
    if kind == "anthropic":
        raise Unsupported("Anthropic's API has no embeddings, images or speech", param="model")
    if kind == "any-llm":
        raise Unsupported("providers of kind any-llm have chats only", param="model")
    if kind == "gemini":
        if isinstance(request, EncodeRequest):
            return gemini_media.embeddings(model, request)
        if isinstance(request, MediaRequest):
            return gemini_media.media(model, request)
        raise Unsupported("Gemini's API has no transcriptions: send the audio in a chat", param="model")
    if isinstance(request, EncodeRequest):
        return openai_media.embeddings(model, request)
    if isinstance(request, SpeechRequest):
        return openai_media.transcription(model, request)
    return openai_media.media(model, request)
