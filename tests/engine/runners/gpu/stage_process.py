"""One of two stages that share a GPU, as a process: `python -m tests.engine.runners.gpu.stage_process RANK STORE`.

The first stage replays CUDA graphs that send, and has to be two messages ahead before the second receives any.
"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from emberline.engine.ranks.peer_memory import PeerStages

LIMIT_S = 60.0
N_MESSAGES = 6
SMALL, LARGE = (5, 4096), (3000, 4096)  # of bfloat16: one message, and three


def captured(body) -> torch.cuda.CUDAGraph:
    """Of what has run once: its kernels are loaded."""
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    body()
    graph.capture_end()
    return graph


def first(stages: PeerStages, store) -> None:
    x = torch.zeros(SMALL, dtype=torch.bfloat16, device="cuda")

    def body() -> None:
        stages.send(x.add_(1), 1)

    body()
    graph = captured(body)
    graph.replay()
    torch.cuda.synchronize()
    store.set("ahead", "two messages")
    for _ in range(N_MESSAGES - 2):
        graph.replay()  # overwrites what was sent, while the other stage is behind
    stages.send(torch.arange(LARGE[0], device="cuda").bfloat16()[:, None].expand(LARGE).contiguous(), 1)
    torch.cuda.synchronize()


def second(stages: PeerStages, store) -> None:
    store.get("ahead")
    x = torch.empty(SMALL, dtype=torch.bfloat16, device="cuda")
    stages.recv(x, 0)
    received = [x.clone()]
    graph = captured(lambda: stages.recv(x, 0))
    for _ in range(N_MESSAGES - 1):
        graph.replay()
        received.append(x.clone())
    large = torch.empty(LARGE, dtype=torch.bfloat16, device="cuda")
    stages.recv(large, 0)
    assert [each.unique().tolist() for each in received] == [[n + 1.0] for n in range(N_MESSAGES)]
    assert torch.equal(large, torch.arange(LARGE[0], device="cuda").bfloat16()[:, None].expand(LARGE))


def main(rank: int, path: str) -> None:
    store = dist.FileStore(path, 2)
    store.set_timeout(timedelta(seconds=LIMIT_S))
    torch.cuda.set_device(0)
    stages = PeerStages(store, "pp", rank, 2, "cuda:0")
    torch.cuda.synchronize()  # its memory was set on another stream
    torch.cuda.set_stream(torch.cuda.Stream())  # the default one cannot be captured
    (second if rank else first)(stages, store)
    store.set(f"done/{rank}", "1")
    store.get(f"done/{1 - rank}")  # no rank takes down memory that the other maps


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
    os._exit(0)
