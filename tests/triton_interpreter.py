"""A quicker Triton interpreter, for tests that run kernels on a CPU: the same results at half the CPU time.

The interpreter spends most of its time around NumPy, not in it. The shortcuts leave out work whose result is known or
discarded:

- Triton patches its language for every launch, and again for every call of a device function inside a launch. The
  second patch changes nothing. The first inspects some thousand members of the language, always with the same result.
- Triton computes an overflow check for every operation on integers, and discards it unless it is debugging.
- Triton describes the type and the shape of every intermediate tensor anew, although kernels have few of them.
- Triton compares the shapes of two operands dimension by dimension, although most are equal.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

_patched: set[int] = set()  # ids of the modules that the launch in progress has patched


def speed_up() -> None:
    """Install the shortcuts; a second call does nothing. Leaves versions of Triton alone that work otherwise."""
    from triton.runtime import interpreter

    needed = (
        "_patch_lang",
        "_patch_builtin",
        "_LangPatchScope",
        "_get_np_dtype",
        "interpreter_builder",
        "GridExecutor",
    )
    if getattr(interpreter, "is_quick", False) or not all(hasattr(interpreter, name) for name in needed):
        return
    interpreter.is_quick = True
    _skip_repeated_patches(interpreter)
    _remember_builtins(interpreter)
    _skip_discarded_overflow_checks(interpreter)
    _remember_numpy_types(interpreter)
    _remember_shapes(interpreter.tl.core)
    _skip_equal_shapes(interpreter)


def _skip_repeated_patches(interpreter: Any) -> None:
    patch: Callable[[Any], Any] = interpreter._patch_lang
    languages = {id(interpreter.tl), id(interpreter.tl.core)}
    used_by: dict[Any, set[int]] = {}  # by function: ids of the language modules among its globals

    def patch_once(function: Any) -> Any:
        used = used_by.get(function)
        if used is None:
            used = used_by[function] = languages & {id(value) for value in function.__globals__.values()}
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

    interpreter._patch_lang = patch_once
    call, interpreter.GridExecutor.__call__ = interpreter.GridExecutor.__call__, launch


def _remember_builtins(interpreter: Any) -> None:
    tl, semantic, patch = interpreter.tl, interpreter.interpreter_semantic, interpreter._patch_builtin
    is_builtin = tl.core.is_builtin
    owners = (tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base)
    names = {each: [name for name, member in inspect.getmembers(each) if is_builtin(member)] for each in owners}

    def interpreted(builtin: Any) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return builtin(*args, **kwargs)

        return call

    def patch_builtins(owner: Any, builder: Any, scope: Any) -> None:
        if owner not in names:
            return patch(owner, builder, scope)
        for name in names[owner]:
            member = getattr(owner, name)
            if is_builtin(member):
                scope.set_attr(owner, name, interpreted(member))

    interpreter._patch_builtin = patch_builtins


def _skip_discarded_overflow_checks(interpreter: Any) -> None:
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _remember_numpy_types(interpreter: Any) -> None:
    convert, known = interpreter._get_np_dtype, {}

    def numpy_type(type_: Any) -> Any:
        name = type_.scalar.name
        if name not in known:
            known[name] = convert(type_)
        return known[name]

    interpreter._get_np_dtype = numpy_type


def _remember_shapes(core: Any) -> None:
    describe_type, describe_tensor = core.block_type.__init__, core.tensor.__init__
    types: dict[tuple[Any, ...], dict[str, Any]] = {}
    tensors: dict[tuple[int, ...], tuple[Any, Any]] = {}  # by shape: the shape and the size as constants

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = [size.value if isinstance(size, core.constexpr) else size for size in shape]
        key = (element_ty.name, *map(type, sizes), *sizes)
        found = types.get(key)
        if found is None:
            describe_type(self, element_ty, shape)
            types[key] = {name: getattr(self, name) for name in ("shape", "numel", "name")}
        else:
            self.element_ty = element_ty
            self.__dict__.update(found)

    def tensor(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape.values) if type.is_block() else ()
        found = tensors.get(key)
        if found is None:
            describe_tensor(self, handle, type)
            tensors[key] = self.shape, self.numel
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = found

    core.block_type.__init__, core.tensor.__init__ = block_type, tensor


def _skip_equal_shapes(interpreter: Any) -> None:
    semantic = type(interpreter.interpreter_semantic)
    broadcast = semantic.broadcast_impl_value

    def broadcast_values(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.shape is rhs.shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    semantic.broadcast_impl_value = broadcast_values
