"""Runs inside the peer's own environment: a prompt on the command line, answered as llama.cpp's CLI does.

Usage: python xllamacpp_cli.py MODEL THREADS CONTEXT MAX_TOKENS PROMPT
"""

import sys
from typing import Any

import xllamacpp  # type: ignore[import-not-found]


def main() -> None:
    model, prompt = sys.argv[1], sys.argv[5]
    threads, context, max_tokens = map(int, sys.argv[2:5])
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.n_parallel = 1
    params.n_ctx = context
    server = xllamacpp.Server(params)

    def show(chunk: dict[str, Any]) -> bool:
        choices = chunk.get("choices") or [{}]
        print(choices[0].get("delta", {}).get("content") or "", end="", flush=True)
        return False  # go on

    messages = [{"role": "user", "content": prompt}]
    server.handle_chat_completions({"messages": messages, "max_tokens": max_tokens, "stream": True}, show)


if __name__ == "__main__":
    main()
