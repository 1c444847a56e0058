"""Triton's interpreter without what it does again and again.

With each call of a device function it looks through all of Triton's language for what to replace by
its own, and has replaced it when the kernel was launched. With each operation it makes the type of
the result anew, and computes whether integers overflow, only to drop what it found where no one
debugs. What is kept here is what Triton's own code gave for the same types and shapes.
"""

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any


@functools.cache
def hasten() -> None:
    """Have this process do once what does not change, with the same numbers; once is enough."""
    from triton.language import core
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    interpreter.InterpretedFunction.__call__ = _call
    interpreter._get_np_dtype = _by_scalar(interpreter._get_np_dtype)
    core._unwrap_if_constexpr = _unwrap(core._unwrap_if_constexpr)
    core.block_type.__init__ = _block_type(core.block_type.__init__)
    core.tensor.__init__ = _tensor(core.tensor.__init__)
    core.dtype.__eq__ = _equal(core.dtype.__eq__)
    core.pointer_type.__eq__ = _equal(core.pointer_type.__eq__)
    core.block_type.__eq__ = _equal(core.block_type.__eq__)
    for name in ("binary_op_type_checking_impl", "broadcast_impl_value"):
        setattr(TritonSemantic, name, _of_a_kind(getattr(TritonSemantic, name)))
    TritonSemantic.computation_type_impl = _computation_type(TritonSemantic.computation_type_impl)
    TritonSemantic.binary_op_sanitize_overflow_impl = _if_debugging(
        TritonSemantic.binary_op_sanitize_overflow_impl
    )


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    """A call of a device function."""
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    if any(is_builtin(language.load) for language in _languages(self.fn)):
        interpreter._patch_lang(self.fn)
    try:
        return self.rewrite()(*args, **kwargs)
    except Exception as error:
        raise interpreter.InterpreterError(repr(error)) from error


@functools.cache
def _languages(function: Callable) -> list[ModuleType]:
    """The modules of Triton's language that a function's module knows."""
    import triton.language as tl

    known = [value for value in function.__globals__.values() if inspect.ismodule(value)]
    return [value for value in known if value in (tl, tl.core)]


def _by_scalar(plain: Callable) -> Callable:
    """numpy's type of a block, a pointer or a number, which its scalars alone decide."""
    made: dict[str, Any] = {}

    def np_dtype(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in made:
            made[name] = plain(dtype)
        return made[name]

    return np_dtype


def _unwrap(plain: Callable) -> Callable:
    """The value of a constexpr; what holds none is given back without a look inside."""
    from triton.language import core

    nested = (list, tuple, core.tuple)

    def unwrap(given: Any) -> Any:
        if type(given) is core.constexpr:
            return given.value
        return plain(given) if isinstance(given, nested) else given

    return unwrap


def _block_type(plain: Callable) -> Callable:
    """Blocks of equal numbers and shape share what describes them; nothing changes it."""
    from triton.language import core

    made: dict[tuple, dict[str, Any]] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        values = shape.values if isinstance(shape, core.tuple) else shape
        sizes = [size.value if isinstance(size, core.constexpr) else size for size in values]
        key = (element_ty.name, *sizes)
        if key not in made:
            plain(self, element_ty, shape)
            made[key] = self.__dict__
        self.__dict__ = made[key]

    return init


def _tensor(plain: Callable) -> Callable:
    """A tensor's shape and size are kept beside its type."""

    def init(self: Any, handle: Any, type: Any) -> None:
        known = type.__dict__.get("_shape_and_numel")
        if known is None:
            plain(self, handle, type)
            type._shape_and_numel = self.shape, self.numel
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known

    return init


def _equal(plain: Callable) -> Callable:
    """Whether types are equal: one is equal to itself."""
    return lambda self, other: self is other or plain(self, other)


def _of_a_kind(plain: Callable) -> Callable:
    """Two operands as they are combined: blocks of one type and shape as they are.

    Quotients are left to Triton: those of halves are of another type.
    """
    from triton.language import core

    def combined(self: Any, lhs: Any, rhs: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if isinstance(lhs, core.tensor) and isinstance(rhs, core.tensor):
            same = lhs.type.__dict__ is rhs.type.__dict__ and isinstance(lhs.type, core.block_type)
            if same and not lhs.dtype.is_ptr() and len(args) < 4 and not kwargs:
                return lhs, rhs
        return plain(self, lhs, rhs, *args, **kwargs)

    return combined


def _computation_type(plain: Callable) -> Callable:
    """In which type two numbers are combined."""
    made: dict[tuple, Any] = {}

    def computation_type(self: Any, a: Any, a_scalar: bool, b: Any, b_scalar: bool, divides: bool):
        key = a.name, a_scalar, b.name, b_scalar, divides
        if key not in made:
            made[key] = plain(self, a, a_scalar, b, b_scalar, divides)
        return made[key]

    return computation_type


def _if_debugging(plain: Callable) -> Callable:
    """Looks for overflows where what it finds is asserted."""

    def sanitize(self: Any, *args: Any) -> None:
        if self.builder.options.debug:
            plain(self, *args)

    return sanitize
