"""The memory that models have on this machine, by which the catalog marks those that fit."""

from emberline.catalog.offers import ModelMemory
from emberline.engine.memory import free_host_bytes
from emberline.supervisor import machine


def machine_memory() -> ModelMemory:
    """The memory that this machine has for models: its largest usable GPU's, else four fifths of what is free."""
    if on_gpu := machine.kernel_gpu_bytes():
        return ModelMemory(on_gpu, True)
    return ModelMemory(free_host_bytes() * 4 // 5, False, machine.cores())
