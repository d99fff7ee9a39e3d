"""python -m emberline.testing.standin_openai --port 0 --kind vllm --model NAME --script tokens=50,itl_ms=10"""

import argparse
import asyncio
import json

from emberline.testing.standin_openai.replies import parse
from emberline.testing.standin_openai.server import Standin


async def _serve(args: argparse.Namespace) -> None:
    standin = await Standin(args.kind, args.model, parse(args.script), args.apart).start(args.port)
    print(json.dumps({"ready": True, "port": standin.port}), flush=True)
    await asyncio.Event().wait()


def main() -> None:
    import uvloop

    parser = argparse.ArgumentParser(prog="standin-openai", description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--kind", choices=["openai", "vllm", "sglang"], default="openai")
    parser.add_argument("--model", default="standin")
    parser.add_argument("--script", default="")
    parser.add_argument("--apart", action="store_true", help="SGLang's prefill or decode half")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
