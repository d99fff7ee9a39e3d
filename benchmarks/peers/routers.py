"""Routers and gateways that people put in front of OpenAI-speaking servers, each in an environment of its own."""

from collections.abc import Callable

from benchmarks.contender import Setup
from benchmarks.peers.venv import ensure_venv

Command = Callable[[int, int], list[str]]  # of its port and the server's

VLLM_ROUTER = "vllm-router==0.1.16"
SGLANG_ROUTER = "sglang-router==0.3.2"
LITELLM = "litellm[proxy]==1.106.2"


def vllm_router(setup: Setup) -> Command:
    program = ensure_venv(setup, "vllm-router", [VLLM_ROUTER]).with_name("vllm-router")
    return lambda port, server: [
        *(str(program), "--worker-urls", f"http://127.0.0.1:{server}", "--policy", "round_robin"),
        *("--host", "127.0.0.1", "--port", str(port), "--log-level", "warning", "--prometheus-port", str(port + 1)),
    ]


def sglang_router(setup: Setup) -> Command:
    python = ensure_venv(setup, "sglang-router", [SGLANG_ROUTER])
    return lambda port, server: [
        *(str(python), "-m", "sglang_router.launch_router", "--worker-urls", f"http://127.0.0.1:{server}"),
        *("--policy", "round_robin", "--host", "127.0.0.1", "--port", str(port), "--log-level", "warn"),
        *("--prometheus-port", str(port + 1)),
    ]


def litellm(setup: Setup) -> Command:
    program = ensure_venv(setup, "litellm", [LITELLM]).with_name("litellm")

    def command(port: int, server: int) -> list[str]:
        config = setup.cache / f"litellm-{port}.yaml"
        config.write_text(_config(server))
        return [str(program), "--config", str(config), "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]

    return command


def _config(server: int) -> str:
    return (
        "model_list:\n"
        "  - model_name: standin\n"
        "    litellm_params:\n"
        "      model: openai/standin\n"
        f"      api_base: http://127.0.0.1:{server}/v1\n"
        "      api_key: none\n"
        "litellm_settings:\n"
        "  telemetry: false\n"
    )


PEERS: dict[str, Callable[[Setup], Command]] = {
    "vllm-router": vllm_router,
    "sglang-router": sglang_router,
    "litellm": litellm,
}
