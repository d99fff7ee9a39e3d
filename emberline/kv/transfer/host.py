"""Transfers of an engine whose blocks lie in the host's memory: by shared memory, Mooncake or TCP."""

from collections.abc import Sequence

from emberline.kv.transfer import mooncake, shared_memory, tcp
from emberline.kv.transfer.hub import Hub
from emberline.kv.transfer.link import Link
from emberline.kv.transfer.memory import HostMemory
from emberline.kv.transfer.messages import Opened
from emberline.kv.transfer.mooncake import MooncakeInlet, MooncakeOutlet
from emberline.kv.transfer.shared_memory import SharedInlet, SharedOutlet
from emberline.kv.transfer.tcp import SocketInlet, SocketOutlet
from emberline.kv.transfer.ways import Inlet, Outlet, WayClosed
from emberline.protocol.layout import KVGroup


def host_hub(
    name: str, fingerprint: str, layouts: Sequence[KVGroup], memory: HostMemory, engine: mooncake.Engine | None = None
) -> Hub:
    """It sends by all ways; it can be written through shared memory if its pools are shared."""

    def open_outlet(way: str, opened: Opened, link: Link) -> Outlet:
        if way == shared_memory.NAME:
            return SharedOutlet(memory, link.take_descriptors(opened.n_descriptors))
        if way == tcp.NAME:
            return SocketOutlet(memory, link)
        if way == mooncake.NAME and engine is not None:
            return MooncakeOutlet(engine, opened)
        raise WayClosed(f"no way is called {way!r} here")

    inlets: list[Inlet] = [SocketInlet()]
    ways = [shared_memory.NAME, tcp.NAME]
    if engine is not None:
        inlets.insert(0, MooncakeInlet(engine))
        ways.append(mooncake.NAME)
    if memory.descriptors:
        inlets.insert(0, SharedInlet(memory))
    return Hub(name, fingerprint, layouts, memory, inlets, ways, open_outlet)
