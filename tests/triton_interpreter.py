"""A quicker start of device functions in Triton's interpreter, for tests that run kernels on a CPU.

Triton patches its language for every launch, and again for every call of a device function inside a launch. The second
patch changes nothing, and inspects some thousand members of `triton.language` each time: a third of the CPU time of the
kernel tests. Here it is left out while a launch has already patched the modules that the function uses.
"""

from collections.abc import Callable
from typing import Any

_patched: set[int] = set()  # ids of the modules that the launch in progress has patched


def skip_repeated_patches() -> None:
    """Install the shortcut; a second call does nothing. Leaves versions of Triton alone that work otherwise."""
    from triton.runtime import interpreter

    patch: Callable[[Any], Any] | None = getattr(interpreter, "_patch_lang", None)
    if patch is None or getattr(patch, "skips_repeated", False):
        return
    languages = {id(interpreter.tl), id(interpreter.tl.core)}

    def patch_once(function: Any) -> Any:
        used = languages & {id(value) for value in function.__globals__.values()}
        if used <= _patched:
            return interpreter._LangPatchScope()
        scope = patch(function)
        _patched.update(used)
        return scope

    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        _patched.clear()
        try:
            return call(self, *args, **kwargs)
        finally:
            _patched.clear()

    patch_once.skips_repeated = True  # type: ignore[attr-defined]
    interpreter._patch_lang = patch_once
    call, interpreter.GridExecutor.__call__ = interpreter.GridExecutor.__call__, launch
