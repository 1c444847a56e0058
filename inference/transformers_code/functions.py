"""What modules of transformers' code call, by functions of a backend; or once, of its weights."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from inference.transformers_code.state import Stateful

log, transformers_log = logging.getLogger("ptq.inference"), logging.getLogger("transformers")


class Constant(Tensor):
    """A weight whose exponential and the like are computed once, and not at every step.

    Attributes:
        known: By name of a function, what it gives of the weight.
    """

    known: dict[str, Tensor]

    @classmethod
    def of(cls, weight: Tensor) -> Constant:
        """A weight as one."""
        own = weight.detach().as_subclass(cls)
        own.known = {}
        return own

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        name = func.__name__
        with torch._C.DisableTorchFunctionSubclass():
            if name not in ("float", "exp", "neg") or len(args) > 1 or kwargs:
                return func(*args, **(kwargs or {}))
            (own,) = args
            if name not in own.known:
                own.known[name] = cls.of(func(own))
            return own.known[name]


def roundings(dtype: torch.dtype) -> float:
    """Relative distance of what differs by roundings alone; in 16 bits of quantized layers too."""
    return 0.02 if dtype == torch.float32 else 0.1


def methods_with(
    mixer: Any, functions: Mapping[str, Callable[..., Any]]
) -> dict[str, Callable[..., Any]]:
    """A module's methods that call functions of its file by these names, to call these instead."""
    found = {}
    for name, method in inspect.getmembers(type(mixer), inspect.isfunction):
        plain = inspect.unwrap(method)
        code = plain.__code__
        if own := {key: functions[key] for key in functions.keys() & set(code.co_names)}:
            given = plain.__globals__ | own, name, plain.__defaults__, plain.__closure__
            twin = FunctionType(code, *given)
            twin.__kwdefaults__ = plain.__kwdefaults__
            found[name] = twin.__get__(mixer)
    return found


@torch.no_grad()
def kinds_in_rows(
    own: Stateful, functions: Mapping[str, Callable[..., Any]], x: Tensor
) -> Set[str] | None:
    """What a module that calls these functions may have as `in_rows`; None where it calls none, or
    computes something else of tokens x [T, H] with them than without."""
    methods = methods_with(own.mixer, functions)
    if not methods:
        return None
    level = transformers_log.level
    transformers_log.setLevel(logging.ERROR)  # it calls its own functions slow
    try:
        wanted = own.trial(x, frozenset())
    finally:
        transformers_log.setLevel(level)
    vars(own.mixer).update(methods)
    near = roundings(x.dtype)
    for kinds in (frozenset({"conv", "recurrent"}), frozenset({"conv"}), frozenset[str]()):
        with suppress(Exception):  # its code computes with states by itself, or is too large
            found = own.trial(x, kinds)
            pairs = zip(found, wanted, strict=True)
            if all((a - b).norm() <= near * b.norm() for a, b in pairs):
                return kinds
    for name in methods:
        delattr(own.mixer, name)
    log.warning(
        "%s does not compute the same by our kernels as by transformers' code, which runs it",
        type(own.mixer).__name__,
    )
    return None
