"""Parts of transformers' code that kernels compute as well: norms, rotations, gated MLPs, and what
modules that keep a state call.

Nothing is known of a family here. A part is taken for one of these if it gives the same numbers on
random ones, and is left as it is otherwise.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from functools import partial
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from inference.transformers_code.attention import current_step
from inference.transformers_code.linear import BackendLinear, PartOfLinear
from kernels.op_inputs import Gate, Named
from kernels.reference import gated_norm

if TYPE_CHECKING:
    from inference.transformers_code.state import Stateful

log, transformers_log = logging.getLogger("ptq.inference"), logging.getLogger("transformers")

ROTATE = "apply_rotary_pos_emb"  # what transformers' modelling files call their rotation
NEAR = 1e-5
_ACTIVATIONS: dict[Named, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


class KnownNorm(nn.Module):
    """RMSNorm over the last dimension (Zhang and Sennrich 2019, Eq. 4).

    Args:
        weight: Its factors [H].
        eps: Added to the mean square.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self._eps = nn.Parameter(weight, requires_grad=False), eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] to the same."""
        return current_step().norm(x, self.weight, self._eps)


class KnownGatedNorm(nn.Module):
    """RMSNorm with a gate, as layers that keep a state have it before their last one.

    Args:
        weight: Its factors [H].
        eps: Added to the mean square.
        form: Where the gate stands, and what it is.
    """

    def __init__(self, weight: Tensor, eps: float, form: Gate) -> None:
        super().__init__()
        self.weight, self._eps, self._form = nn.Parameter(weight, requires_grad=False), eps, form

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """[..., H] twice to the same."""
        return current_step().gated_norm(x, gate, self.weight, self._eps, self._form)


class KnownGatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)) (Shazeer 2020, arXiv 2002.05202, Eq. 6).

    Args:
        gate_up: Gate and up as one layer, the gate's outputs first.
        down: The layer that reads the product.
        activation: Of the gate.
    """

    def __init__(self, gate_up: BackendLinear, down: BackendLinear, activation: Named) -> None:
        super().__init__()
        self.gate_up, self.down = gate_up, down
        self._activation: Named = activation

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] to the same."""
        rows = self.gate_up(x.reshape(-1, x.shape[-1]))
        product = current_step().gated_product(rows, self._activation)
        return self.down(product).view(*x.shape[:-1], -1)


def use_kernels(model: nn.Module) -> None:
    """Let kernels compute the parts of a loaded model that are known, in place."""
    for parent in list(model.modules()):
        for name, part in list(parent.named_children()):
            known = known_norm(part) or known_gated_mlp(part) or known_gated_norm(part)
            if known is not None:
                setattr(parent, name, known)
        _rotate_by_kernel(parent)


def known_norm(module: Any) -> KnownNorm | None:
    """A module as an RMSNorm; None where it computes something else.

    Norms that multiply by 1 + w become such with 1 + w as their weight, in fp32.
    """
    tried = _tried_norm(module, 1)
    if tried is None:
        return None
    (x,), weight, eps, found = tried
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    for offset in (0.0, 1.0):
        if torch.allclose(found, normed * (weight + offset), rtol=NEAR, atol=NEAR):
            own = module.weight.data
            return KnownNorm(own.float() + offset if offset else own, eps)
    return None


def known_gated_norm(module: Any) -> KnownGatedNorm | None:
    """A module of rows and their gates as an RMSNorm; None where it computes something else."""
    tried = _tried_norm(module, 2)
    if tried is None:
        return None
    (x, gate), weight, eps, found = tried
    groups, either = _groups(module, x.shape[1]), (True, False)
    for form in (Gate(silu, first, n) for silu in either for first in either for n in groups):
        wanted = gated_norm(x, gate, weight, eps, form)
        if found.shape == x.shape and torch.allclose(found, wanted, rtol=NEAR, atol=NEAR):
            return KnownGatedNorm(module.weight.data, eps, form)
    return None


def _groups(module: Any, size: int) -> set[int]:
    """How many parts of a row of so many elements a module may norm each by itself."""
    count, part = getattr(module, "n_groups", 1), getattr(module, "group_size", size)
    found = {1, count, size // part if isinstance(part, int) and part else 1}
    return {n for n in found if isinstance(n, int) and n > 0 and size % n == 0}


def _tried_norm(module: Any, inputs: int) -> tuple[list[Tensor], Tensor, float, Tensor] | None:
    """Of a module that may be a norm of so many inputs: random ones [2, H], a weight, eps, and what
    it gives of them with that weight; None where it cannot be one."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    names = {name for name, _ in module.named_parameters()}
    if not isinstance(eps, float) or len(inspect.signature(module.forward).parameters) != inputs:
        return None
    if names != {"weight"} or module.weight.dim() != 1:
        return None
    twin, size = copy.copy(module), len(module.weight)
    weight, given = _random(size), list(_random(inputs, 2, size))
    twin._parameters = module._parameters | {"weight": nn.Parameter(weight, requires_grad=False)}
    given[0][1] *= eps**0.5  # where eps counts
    try:
        with torch.no_grad():
            return given, weight, eps, twin(*given)
    except (TypeError, ValueError, RuntimeError, IndexError):  # it wants something else
        return None


def known_gated_mlp(module: Any) -> KnownGatedMLP | None:
    """A module as a gated MLP whose gate and up run as one; None where it computes otherwise."""
    parts = {n: m for n, m in module.named_children() if isinstance(m, PartOfLinear)}
    others = {n: m for n, m in module.named_children() if isinstance(m, BackendLinear)}
    if len(parts) != 2 or len(others) != 1:
        return None
    (shared, second), (last,) = (part.shared for part in parts.values()), others.values()
    if second is not shared or shared.outputs != [shared.outputs[0]] * 2:
        return None
    small = [nn.Linear(*sizes, bias=False) for sizes in ((8, 6), (8, 6), (6, 8))]
    for linear, weight in zip(small, _random(3, 48), strict=True):
        linear.weight.data = weight.view(linear.weight.shape)
    twin, x = copy.copy(module), _random(3, 8)
    names = (*parts, *others)  # in their order: gate, up, down, if it is one
    twin._modules = module._modules | dict(zip(names, small, strict=True))
    gate, up, down = small
    try:
        with torch.no_grad():
            found = twin(x)
            for name, activation in _ACTIVATIONS.items():
                if torch.allclose(found, down(activation(gate(x)) * up(x)), rtol=NEAR, atol=NEAR):
                    return KnownGatedMLP(BackendLinear(shared.layer), last, name)
    except (TypeError, ValueError, RuntimeError, IndexError, AttributeError):
        return None  # it wants something else
    return None


def _rotate_by_kernel(module: nn.Module) -> None:
    """Let the forward of a module call our rotation in the place of that of its file."""
    forward = type(module).forward
    if not isinstance(forward, FunctionType) or ROTATE not in forward.__code__.co_names:
        return
    theirs = forward.__globals__.get(ROTATE)
    if theirs is None or not _turns_halves(theirs, 8):
        return
    partly = _turns_halves(theirs, 4)  # heads of more channels than those that turn

    def ours(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: Any, **options: Any) -> Any:
        fits = not more and not options and q.dim() == 4 and cos.shape[1] == q.shape[2]
        fits = fits and (cos.shape[2] == q.shape[3] or (partly and cos.shape[2] < q.shape[3]))
        return _rotated(q, k, cos, sin) if fits else theirs(q, k, cos, sin, *more, **options)

    names = {**forward.__globals__, ROTATE: ours}
    twin = FunctionType(
        forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__
    )
    twin.__kwdefaults__ = forward.__kwdefaults__
    module.__dict__["forward"] = MethodType(twin, module)


def _rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """q and k [1, heads, T, D] turned by the angles of the tokens [1, T, D or fewer]."""
    own_q, own_k = q[0].transpose(0, 1), k[0].transpose(0, 1)
    own_q, own_k = current_step().rotate(own_q, own_k, cos[0], sin[0])
    return own_q.transpose(0, 1)[None], own_k.transpose(0, 1)[None]


def _turns_halves(rotate: Any, turned: int) -> bool:
    """Whether a function turns channel i of heads with channel i + R / 2, and leaves others than
    the first R = `turned` as they are."""
    q, k = _random(1, 4, 3, 8), _random(1, 2, 3, 8)
    cos, sin = (_random(1, 3, turned // 2).repeat(1, 1, 2) for _ in range(2))
    try:
        found = rotate(q, k, cos, sin)
    except (TypeError, ValueError, RuntimeError, IndexError):
        return False
    for x, y in zip((q, k), found, strict=True):
        own, rest = x.split((turned, 8 - turned), dim=-1)
        a, b = own.chunk(2, dim=-1)
        wanted = own * cos[:, None] + torch.cat((-b, a), dim=-1) * sin[:, None]
        wanted = torch.cat((wanted, rest), dim=-1)
        if y.shape != wanted.shape or not torch.allclose(y, wanted, rtol=NEAR, atol=NEAR):
            return False
    return True


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


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
