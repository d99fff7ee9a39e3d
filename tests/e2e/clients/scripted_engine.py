"""A stand-in engine that follows a script of replies: `python -m tests.e2e.clients.scripted_engine SCRIPT MODEL FLAGS`.

The reply depends on what the prompt contains, so a client's second request can get another reply than its first. Unlike
other stand-ins it enforces grammars: a request fails when its grammar does not allow the reply.
"""

import sys
from pathlib import Path
from typing import Any

from emberline.engine.core.limits import Limits
from emberline.engine.core.scheduler import Scheduler
from emberline.engine.grammar.compiler import MatcherCompiler
from emberline.engine.worker.build import build_scheduler
from emberline.kv.cache import KVCache
from emberline.protocol import token_ids as tokens
from emberline.protocol.request import EngineRequest
from emberline.text.text_model import TextModel
from standins import engine_script as script
from standins import standin_engine as standin
from standins.engine_script import EngineScript
from tests.e2e.clients.reply_script import ReplyScript

ITL_MS = 8.0  # between tokens: without a delay, and on a busy machine with a short one, a reply arrives in one piece


def serve(replies: ReplyScript, text: TextModel, flags: list[str]) -> int:
    ids = [tokens.unpack(text.encode(reply.text, special=False)) for reply in replies.replies]

    def of_request(request: EngineRequest, base: EngineScript) -> EngineScript:
        prompt = text.decode(request.prompt_ids, special=True)
        return EngineScript(say=".".join(map(str, ids[replies.index_for(prompt)])), itl_ms=ITL_MS)

    def scheduler(cache: KVCache, limits: Limits, fingerprint: str, **more: Any) -> Scheduler:
        return build_scheduler(cache, limits, fingerprint, MatcherCompiler(limits.vocab_size), **more)

    script.of_request = of_request
    standin.build_scheduler = scheduler
    return standin.main(flags)


if __name__ == "__main__":
    raise SystemExit(serve(ReplyScript.read(Path(sys.argv[1])), TextModel.load(Path(sys.argv[2])), sys.argv[3:]))
