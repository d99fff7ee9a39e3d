"""One Python client against a server, in the clients' environment: `python drive.py CLIENT URL`; a line of JSON says
what it received."""

import json
import sys
from typing import Any

MODEL = "@cf/huggingfacetb/smollm2-135m-instruct"
MESSAGES = [{"role": "user", "content": "Hi"}]
WEATHER = [{"role": "user", "content": "What is the weather in Bern?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def ollama(url: str) -> dict[str, Any]:
    import ollama

    client = ollama.Client(url)
    whole = client.chat(MODEL, messages=MESSAGES, options={"num_predict": 64})
    pieces = [part.message.content for part in client.chat("smollm2", messages=MESSAGES, stream=True)]
    called = client.chat(MODEL, messages=WEATHER, tools=[TOOL]).message
    result = {"role": "tool", "tool_name": "weather", "content": '{"sky":"clear"}'}
    answered = client.chat(MODEL, messages=[*WEATHER, called, result], tools=[TOOL])
    missing = ""
    try:
        client.chat("nothing", messages=MESSAGES)
    except ollama.ResponseError as error:
        missing = f"{error.status_code}: {error.error}"
    return {
        "text": whole.message.content,
        "counts": [whole.prompt_eval_count, whole.eval_count, whole.done_reason],
        "generated": client.generate(MODEL, prompt="Hi").response,
        "pieces": pieces,
        "calls": [[call.function.name, call.function.arguments] for call in called.tool_calls or ()],
        "answer": answered.message.content,
        "models": [model.model for model in client.list().models],
        "running": [model.model for model in client.ps().models],
        "capabilities": client.show("smollm2:latest").capabilities,
        "pulled": client.pull("smollm2").status,
        "missing": missing,
    }


def litellm(url: str) -> dict[str, Any]:
    import litellm

    base = f"{url}/client/v4/accounts/acme/ai/v1"
    found: dict[str, Any] = {}
    for name, options in {
        "cloudflare": {"model": f"cloudflare/{MODEL}", "api_base": base},
        "openai": {"model": f"openai/{MODEL}", "api_base": f"{url}/v1"},
        "ollama": {"model": "ollama_chat/smollm2", "api_base": url},
    }.items():
        given = {**options, "api_key": "none", "messages": MESSAGES}
        whole = litellm.completion(**given)
        chunks = litellm.completion(**given, stream=True)
        pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
        found[name] = {
            "text": whole.choices[0].message.content,
            "pieces": pieces,
            "tokens": whole.usage.completion_tokens,
        }
    return found


def langchain_cloudflare(url: str) -> dict[str, Any]:
    from langchain_cloudflare import ChatCloudflareWorkersAI

    chat = ChatCloudflareWorkersAI(model=MODEL, account_id="acme", api_token="none", base_url=f"{url}/client/v4")
    whole = chat.invoke("Hi")
    pieces = [chunk.content for chunk in chat.stream("Hi")]
    called = chat.bind_tools([TOOL]).invoke("What is the weather in Bern?")
    return {
        "text": whole.content,
        "tokens": whole.usage_metadata["output_tokens"],
        "pieces": pieces,
        "calls": [[call["name"], call["args"]] for call in called.tool_calls],
    }


if __name__ == "__main__":
    drive = {"ollama": ollama, "litellm": litellm, "langchain-cloudflare": langchain_cloudflare}[sys.argv[1]]
    print(json.dumps(drive(sys.argv[2])))
