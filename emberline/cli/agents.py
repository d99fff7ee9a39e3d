"""The coding agents that `emberline launch` starts, and the settings with which each uses an Emberline server.

The settings are environment variables and arguments only: no file of the user's is written or changed, and an agent
that is started without them is as it was.
"""

import json
from collections.abc import Callable
from typing import NamedTuple

import msgspec

_MAX_OUTPUT_TOKENS = 8192  # the longest reply that an agent asks for, where the context has room for it


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The server and model that an agent uses."""

    url: str  # of the server, without a path
    model: str
    context_window: int  # tokens
    key: str = "none"  # on loopback any key is accepted
    sees: bool = False  # True if the model takes images

    @property
    def max_output_tokens(self) -> int:
        return min(_MAX_OUTPUT_TOKENS, self.context_window // 4)


class Settings(NamedTuple):
    """Variables and arguments of an agent; the user's own arguments follow."""

    environment: dict[str, str]
    arguments: tuple[str, ...] = ()


class Agent(NamedTuple):
    program: str  # the command, which is also its name here
    title: str
    api: str  # the API over which it talks to the server
    install: str  # a command that installs it
    settings: Callable[[Endpoint], Settings]


def _claude(to: Endpoint) -> Settings:
    models = ("ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_OPUS_MODEL", "ANTHROPIC_DEFAULT_SONNET_MODEL")
    small = ("ANTHROPIC_DEFAULT_HAIKU_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL")
    return Settings(
        {
            "ANTHROPIC_BASE_URL": to.url,
            "ANTHROPIC_AUTH_TOKEN": to.key,
            **dict.fromkeys((*models, *small), to.model),
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(to.max_output_tokens),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        }
    )


def _codex(to: Endpoint) -> Settings:
    provider = {
        "name": "Emberline",
        "base_url": f"{to.url}/v1",
        "env_key": "EMBERLINE_KEY",
        "wire_api": "responses",
    }
    values: dict[str, object] = {
        "model": to.model,
        "model_provider": "emberline",
        **{f"model_providers.emberline.{key}": value for key, value in provider.items()},
        "model_context_window": to.context_window,
    }
    options = [word for key, value in values.items() for word in ("-c", f"{key}={json.dumps(value)}")]  # TOML's too
    return Settings({"EMBERLINE_KEY": to.key}, tuple(options))


def _opencode(to: Endpoint) -> Settings:
    limit = {"context": to.context_window, "output": to.max_output_tokens}
    model: dict[str, object] = {"name": to.model, "tool_call": True, "limit": limit}
    if to.sees:  # opencode strips images from requests to a model that does not say so
        model["modalities"] = {"input": ["text", "image"], "output": ["text"]}
    config = {
        "model": f"emberline/{to.model}",
        "small_model": f"emberline/{to.model}",
        "provider": {
            "emberline": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "Emberline",
                "options": {"baseURL": f"{to.url}/v1", "apiKey": to.key},
                "models": {to.model: model},
            }
        },
    }
    return Settings({"OPENCODE_CONFIG_CONTENT": json.dumps(config)})


def _aider(to: Endpoint) -> Settings:
    environment = {"OPENAI_API_BASE": f"{to.url}/v1", "OPENAI_API_KEY": to.key}
    return Settings(environment, ("--model", f"openai/{to.model}", "--no-show-model-warnings"))


def _goose(to: Endpoint) -> Settings:
    return Settings(
        {
            "GOOSE_PROVIDER": "openai",
            "GOOSE_MODEL": to.model,
            "GOOSE_CONTEXT_LIMIT": str(to.context_window),
            "OPENAI_HOST": to.url,
            "OPENAI_BASE_PATH": "v1/chat/completions",
            "OPENAI_API_KEY": to.key,
        }
    )


AGENTS = {
    agent.program: agent
    for agent in (
        Agent("opencode", "opencode", "chat completions", "npm install -g opencode-ai", _opencode),
        Agent("codex", "Codex", "Responses", "npm install -g @openai/codex", _codex),
        Agent("claude", "Claude Code", "Messages", "npm install -g @anthropic-ai/claude-code", _claude),
        Agent("aider", "Aider", "chat completions", "uv tool install aider-chat", _aider),
        Agent("goose", "Goose", "chat completions", "see https://block.github.io/goose", _goose),
    )
}
