"""A stand-in engine that follows a play: `python -m tests.e2e.clients.actor PLAY MODEL FLAGS`.

What it says depends on what the prompt has in it, so that a client's second request can be answered otherwise than its
first. Unlike other stand-ins it follows grammars: a request fails when its grammar does not allow the line.
"""

import sys
from pathlib import Path
from typing import Any

from emberline.engine.grammar.compiler import MatcherCompiler
from emberline.engine.scheduler.limits import Limits
from emberline.engine.scheduler.scheduler import Scheduler
from emberline.kv.cache import KVCache
from emberline.protocol import token_ids as tokens
from emberline.protocol.request import EngineRequest
from emberline.testing import engine_script as script
from emberline.testing import standin_engine as standin
from emberline.testing.engine_script import EngineScript
from emberline.text.text_model import TextModel
from tests.e2e.clients.play import Play

PACE_MS = 3.0  # a token: at full speed a reply would be there at once, and nobody would see it streamed


def perform(play: Play, text: TextModel, flags: list[str]) -> int:
    ids = [tokens.unpack(text.encode(line.text, special=False)) for line in play.lines]

    def of_request(request: EngineRequest, base: EngineScript) -> EngineScript:
        prompt = text.decode(request.prompt_ids, special=True)
        return EngineScript(say=".".join(map(str, ids[play.place(prompt)])), itl_ms=PACE_MS)

    def scheduler(cache: KVCache, limits: Limits, fingerprint: str, **more: Any) -> Scheduler:
        return Scheduler(cache, limits, fingerprint, MatcherCompiler(limits.vocab_size), **more)

    script.of_request = of_request
    standin.Scheduler = scheduler
    return standin.main(flags)


if __name__ == "__main__":
    raise SystemExit(perform(Play.read(Path(sys.argv[1])), TextModel.load(Path(sys.argv[2])), sys.argv[3:]))
