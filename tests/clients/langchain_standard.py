"""LangChain's standard tests of chat models, run in the clients' environment by test_langchain.py.

The server's address is in EMBERLINE_URL. A property that is false skips the tests of what models here do not do.
"""

import os
from typing import Any

from langchain_anthropic import ChatAnthropic
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

URL = os.environ["EMBERLINE_URL"]
MODEL = "smollm2"


class TextModelTests(ChatModelIntegrationTests):
    """A model that reads text alone: no images, recordings or PDF files."""

    @property
    def supports_image_inputs(self) -> bool:
        return False

    @property
    def supports_image_urls(self) -> bool:
        return False

    @property
    def supports_image_tool_message(self) -> bool:
        return False

    @property
    def supports_pdf_inputs(self) -> bool:
        return False

    @property
    def supports_pdf_tool_message(self) -> bool:
        return False

    @property
    def supports_audio_inputs(self) -> bool:
        return False

    @property
    def has_tool_choice(self) -> bool:
        return True

    @property
    def supports_json_mode(self) -> bool:
        return self.chat_model_class is ChatOpenAI

    @property
    def supports_model_override(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        return "smollm2-135m-instruct"

    @property
    def supported_usage_metadata_details(self) -> dict[str, Any]:
        return {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        """The reply to a prompt whose prefix the server has cached."""
        model = self.chat_model_class(**self.chat_model_params)
        question = "Which of these words is the longest? " + "ember line " * 200
        model.invoke(question)
        if not stream:
            return model.invoke(question)
        first, *rest = model.stream(question)
        return sum(rest, first)


class TestChatCompletions(TextModelTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": MODEL, "base_url": f"{URL}/v1", "api_key": "none", "stream_usage": True}


class TestResponses(TestChatCompletions):
    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": MODEL, "base_url": f"{URL}/v1", "api_key": "none", "use_responses_api": True}


class TestMessages(TextModelTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatAnthropic

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": MODEL, "base_url": URL, "api_key": "none", "max_tokens": 256}

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True
