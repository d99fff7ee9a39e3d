"""Which pattern drives which pair of servers."""

from emberline.balancer.adapters.adapter import Adapter
from emberline.balancer.adapters.mooncake import Mooncake
from emberline.balancer.adapters.nixl import NixlPull
from emberline.balancer.adapters.sglang import SGLang
from emberline.balancer.adapters.store import SharedStore

_ADAPTERS: dict[tuple[str, str], Adapter] = {
    ("vllm", "nixl"): NixlPull(),
    ("vllm", "mooncake"): Mooncake(),
    ("vllm", "store"): SharedStore(),
    ("sglang", "bootstrap"): SGLang(),
    ("sglang", "store"): SharedStore(),
}
DEFAULT_TRANSFER = {"vllm": "nixl", "sglang": "bootstrap"}


def adapter_for(kind: str, transfer: str) -> Adapter | None:
    """None: servers of that kind cannot be told to work in pairs."""
    return _ADAPTERS.get((kind, transfer or DEFAULT_TRANSFER.get(kind, "")))


def transfers_of(kind: str) -> list[str]:
    return [transfer for known, transfer in _ADAPTERS if known == kind]
