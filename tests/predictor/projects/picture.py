"""An image in and an image out, by a function that runs concurrently."""

import asyncio

import cog
from cog import Path


class Runner(cog.BaseRunner):
    @cog.concurrent(max=3)
    async def run(self, image: Path, wait_s: float = 0.0) -> Path:
        await asyncio.sleep(wait_s)
        result = Path(f"/tmp/{id(image)}.png")
        result.write_bytes(b"\x89PNG" + Path(image).read_bytes()[::-1])
        return result
