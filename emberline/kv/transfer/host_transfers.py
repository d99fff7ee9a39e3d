"""The transfers of an engine whose pools are in host memory: which transports it has."""

from collections.abc import Sequence

from emberline.kv.host_memory import HostMemory
from emberline.kv.transfer.connection import PeerConnection
from emberline.kv.transfer.manager import TransferManager
from emberline.kv.transfer.messages import TransportOpened
from emberline.kv.transfer.mooncake import MOONCAKE, MooncakeEngine, MooncakeReceiveTransport, MooncakeSendTransport
from emberline.kv.transfer.transport import (
    SHARED_MEMORY,
    TCP,
    ReceiveTransport,
    SendTransport,
    SharedMemoryReceiveTransport,
    SharedMemorySendTransport,
    Target,
    TcpReceiveTransport,
    TcpSendTransport,
    TransportUnavailable,
)
from emberline.protocol.block_hash import KVGroup


def host_transfers(
    fingerprint: str, layouts: Sequence[KVGroup], memory: HostMemory, mooncake: MooncakeEngine | None = None
) -> TransferManager:
    """Transfers of pools in host memory: send by all transports; receive by shared memory if the pools are shared."""

    def open_transport(
        transport: str, opened: TransportOpened, connection: PeerConnection, target: Target | None
    ) -> SendTransport:
        if transport == SHARED_MEMORY:
            return SharedMemorySendTransport(memory, connection.take_descriptors(opened.n_descriptors), target)
        if transport == TCP:
            return TcpSendTransport(memory, connection, target)
        if transport == MOONCAKE and mooncake is not None:
            return MooncakeSendTransport(mooncake, opened, target)
        raise TransportUnavailable(f"unknown transport {transport!r}")

    receive_transports: list[ReceiveTransport] = [TcpReceiveTransport()]
    send_transports = [SHARED_MEMORY, TCP]
    if mooncake is not None:
        receive_transports.insert(0, MooncakeReceiveTransport(mooncake))
        send_transports.append(MOONCAKE)
    if memory.descriptors:
        receive_transports.insert(0, SharedMemoryReceiveTransport(memory))
    return TransferManager(fingerprint, layouts, memory, receive_transports, send_transports, open_transport)
