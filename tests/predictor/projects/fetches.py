"""A predictor that fetches its weights in `setup`, as many do, and makes a cache that takes its time."""

import os
import time
import urllib.request
from pathlib import Path

from cog import BaseRunner


class Runner(BaseRunner):
    def setup(self) -> None:
        weights = Path("weights/model.bin")
        if not weights.exists():
            weights.parent.mkdir(parents=True, exist_ok=True)
            urllib.request.urlretrieve(os.environ["WEIGHTS_URL"], weights)
        cache = Path(os.environ["HF_HOME"], "compiled")
        if not cache.exists():
            cache.parent.mkdir(parents=True, exist_ok=True)
            time.sleep(float(os.environ.get("COMPILE_S", "0")))
            cache.write_text("compiled")
        self.parts = (weights.read_text(), cache.read_text())

    def run(self, text: str = "") -> list[str]:
        return [text, *self.parts]
