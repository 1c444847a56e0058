"""Parts of transformers' code that one kernel computes as well: RMSNorms and rotations by halves.

Nothing is known of a family here. A part is taken for one of these if it gives the same numbers on
random ones, and is left as it is otherwise.
"""

from __future__ import annotations

import copy
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from inference.transformers_code.attention import current_step

ROTATE = "apply_rotary_pos_emb"  # what transformers' modelling files call their rotation
NEAR = 1e-5


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


def use_kernels(model: nn.Module) -> None:
    """Let kernels compute the parts of a loaded model that are known, in place."""
    for parent in list(model.modules()):
        for name, part in list(parent.named_children()):
            norm = known_norm(part)
            if norm is not None:
                setattr(parent, name, norm)
        _rotate_by_kernel(parent)


def known_norm(module: Any) -> KnownNorm | None:
    """A module as an RMSNorm; None where it computes something else.

    Norms that multiply by 1 + w become such with 1 + w as their weight, in fp32.
    """
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    names = {name for name, _ in module.named_parameters()}
    if not isinstance(eps, float) or names != {"weight"} or module.weight.dim() != 1:
        return None
    twin, size = copy.copy(module), len(module.weight)
    weight, x = _random(size), _random(2, size)
    twin._parameters = module._parameters | {"weight": nn.Parameter(weight, requires_grad=False)}
    x[1] *= eps**0.5  # where eps counts
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    try:
        with torch.no_grad():
            found = twin(x)
    except (TypeError, ValueError, RuntimeError, IndexError):  # it wants something else
        return None
    for offset in (0.0, 1.0):
        if torch.allclose(found, normed * (weight + offset), rtol=NEAR, atol=NEAR):
            own = module.weight.data
            return KnownNorm(own.float() + offset if offset else own, eps)
    return None


def _rotate_by_kernel(module: nn.Module) -> None:
    """Let the forward of a module call our rotation in the place of that of its file."""
    forward = type(module).forward
    if not isinstance(forward, FunctionType) or ROTATE not in forward.__code__.co_names:
        return
    theirs = forward.__globals__.get(ROTATE)
    if theirs is None or not _turns_halves(theirs):
        return

    def ours(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: Any, **options: Any) -> Any:
        fits = not more and not options and q.dim() == 4 and cos.shape[1:] == q.shape[2:]
        return _rotated(q, k, cos, sin) if fits else theirs(q, k, cos, sin, *more, **options)

    names = {**forward.__globals__, ROTATE: ours}
    twin = FunctionType(
        forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__
    )
    twin.__kwdefaults__ = forward.__kwdefaults__
    module.__dict__["forward"] = MethodType(twin, module)


def _rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """q and k [1, heads, T, D] turned by the angles of the tokens [1, T, D]."""
    own_q, own_k = q[0].transpose(0, 1), k[0].transpose(0, 1)
    own_q, own_k = current_step().rotate(own_q, own_k, cos[0], sin[0])
    return own_q.transpose(0, 1)[None], own_k.transpose(0, 1)[None]


def _turns_halves(rotate: Any) -> bool:
    """Whether a function turns channel i of each head with channel i + D / 2."""
    q, k = _random(1, 4, 3, 8), _random(1, 2, 3, 8)
    cos, sin = (torch.cat((half, half), dim=-1) for half in (_random(1, 3, 4), _random(1, 3, 4)))
    try:
        found = rotate(q, k, cos, sin)
    except (TypeError, ValueError, RuntimeError, IndexError):
        return False
    for x, y in zip((q, k), found, strict=True):
        a, b = x.chunk(2, dim=-1)
        wanted = x * cos[:, None] + torch.cat((-b, a), dim=-1) * sin[:, None]
        if y.shape != wanted.shape or not torch.allclose(y, wanted, rtol=NEAR, atol=NEAR):
            return False
    return True


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))
