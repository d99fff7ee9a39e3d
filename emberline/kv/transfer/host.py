"""The transfers of an engine whose blocks lie in the host's memory: shared memory where it can be, else TCP."""

from collections.abc import Sequence

from emberline.kv.transfer import shared_memory, tcp
from emberline.kv.transfer.hub import Hub
from emberline.kv.transfer.link import Link
from emberline.kv.transfer.memory import HostMemory
from emberline.kv.transfer.messages import Opened
from emberline.kv.transfer.shared_memory import SharedInlet, SharedOutlet
from emberline.kv.transfer.tcp import SocketInlet, SocketOutlet
from emberline.kv.transfer.ways import Inlet, Outlet, WayClosed
from emberline.protocol.layout import KVGroup


def host_hub(name: str, fingerprint: str, layouts: Sequence[KVGroup], memory: HostMemory) -> Hub:
    """It sends by both ways; it can be written through shared memory if its pools are shared."""

    def open_outlet(way: str, opened: Opened, link: Link) -> Outlet:
        if way == shared_memory.NAME:
            return SharedOutlet(memory, link.take_descriptors(opened.n_descriptors))
        if way == tcp.NAME:
            return SocketOutlet(memory, link)
        raise WayClosed(f"no way is called {way!r} here")

    inlets: list[Inlet] = [SocketInlet()]
    if memory.descriptors:
        inlets.insert(0, SharedInlet(memory))
    return Hub(name, fingerprint, layouts, memory, inlets, (shared_memory.NAME, tcp.NAME), open_outlet)
