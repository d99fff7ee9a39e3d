"""Stand-ins for optional modules of vLLM that its bundle lacks: importing one gives an object that answers to anything.

vLLM 0.24 to 0.26 imports these modules, and the workloads here use none of them. `install` covers the process that
calls it and all Python processes that it starts: they import `child_processes/sitecustomize.py`.
"""

import importlib.abc
import importlib.machinery
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

ABSENT = {
    *("xgrammar", "soundfile", "pycountry", "tilelang", "supervisor"),
    *("humming", "tokenspeed_mla", "cv2", "nvtx", "fastsafetensors", "PyNvVideoCodec"),
}
CHILD_PROCESSES = str(Path(__file__).parent / "child_processes")


class AbsentModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of `ABSENT` and their submodules."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] not in ABSENT:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        module = MagicMock(name=spec.name)
        for key, value in dict(__spec__=spec, __path__=[], __name__=spec.name, __version__="0").items():
            setattr(module, key, value)
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def install() -> None:
    """Make this process and its children find stand-ins where a module is not installed."""
    if not any(isinstance(finder, AbsentModules) for finder in sys.meta_path):
        sys.meta_path.append(AbsentModules())
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if CHILD_PROCESSES not in folders:
        os.environ["PYTHONPATH"] = os.pathsep.join([CHILD_PROCESSES, *filter(None, folders)])
