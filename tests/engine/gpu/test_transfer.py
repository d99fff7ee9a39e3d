"""KV from process to process on a CUDA device."""

import pytest
import torch

from emberline.engine.gpu import transfer
from emberline.engine.gpu.transfer import CudaIpcSendTransport, peer_words
from emberline.kv.transfer.transport import BlockCopy, TransportUnavailable


@pytest.mark.gpu
def test_blocks_are_intact_in_the_other_process():
    from benchmarks.gpu.transfer import bandwidth

    assert bandwidth()["identical"]


def test_memory_of_another_device_is_refused(monkeypatch):
    """torch copies it to our device, where writes would be lost; here host memory stands for both devices."""
    theirs, own = torch.zeros(64, dtype=torch.uint8), torch.zeros(2, 4, dtype=torch.int64)
    monkeypatch.setattr(torch, "as_tensor", lambda span, device: theirs)
    assert peer_words(theirs.data_ptr(), 64, own).data_ptr() == theirs.data_ptr()
    monkeypatch.setattr(torch, "as_tensor", lambda span, device: theirs.clone())
    with pytest.raises(TransportUnavailable, match="another device"):
        peer_words(theirs.data_ptr(), 64, own)


@pytest.mark.parametrize("target", [-1, 3])
def test_blocks_outside_the_pool_of_the_receiver_are_not_written(target, monkeypatch):
    monkeypatch.setattr(transfer, "copy_blocks", pytest.fail)
    send = CudaIpcSendTransport.__new__(CudaIpcSendTransport)
    send._sources = send._targets = [torch.zeros(3, 4, dtype=torch.int64)]
    with pytest.raises(TransportUnavailable, match="outside its pool"):
        send.write(1, [BlockCopy((0, 0), 1, target)])
