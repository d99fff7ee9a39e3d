"""A predictor with the features of Cog that the tests use; `act` chooses one."""

import os
import time

import cog
from cog import BaseRunner, ConcatenateIterator, Input, Path, Secret

ACTS = [
    "echo",
    "fail",
    "crash",
    "hang",
    "leak",
    "fork",
    "fill",
    "print",
    "flood",
    "outside",
    "file",
    "metric",
    "lie",
    "context",
    "join",
]


class Runner(BaseRunner):
    def setup(self) -> None:
        time.sleep(float(os.environ.get("SETUP_S", "0")))
        if os.environ.get("SETUP_FAILS"):
            raise RuntimeError("no weights here")

    @cog.streaming
    def run(
        self,
        text: str = Input(description="what to do it with", default=""),
        act: str = Input(default="echo", choices=ACTS),
        n: int = Input(default=1, ge=1, le=5),
        file: Path = Input(default=None),
        secret: Secret = Input(default=None),
    ) -> ConcatenateIterator[str]:
        for _ in range(n):
            yield self.act(act, text, file)

    def act(self, act: str, text: str, file: Path | None) -> str:
        if act == "fail":
            raise ValueError(f"cannot do {text}")
        if act == "crash":
            os._exit(3)
        if act == "hang":
            time.sleep(1000)
        if act == "leak":
            held = []
            while True:
                held.append(bytearray(b"x" * (16 << 20)))
        if act == "fork":
            n_forked = 0
            try:
                while os.fork():
                    n_forked += 1
                os._exit(0) if time.sleep(5) is None else None
            except OSError as error:
                return f"{type(error).__name__} after a while"
        if act == "fill":
            with open("/tmp/large", "wb") as large:
                for _ in range(10 << 10):
                    large.write(b"x" * (1 << 20))
        if act == "print":
            print(f"the secret is {os.environ['TOKEN']}")
        if act == "flood":
            for _ in range(200_000):
                print("x" * 80)
        if act == "outside":
            return open("/etc/shadow").read()
        if act == "context":
            return str(cog.current_scope().context)
        if act == "join":
            return text.replace(",", "")
        if act == "lie":
            return object()
        if act == "file":
            return file.read_bytes().decode()
        if act == "metric":
            self.record_metric("words", len(text.split()))
        return text
