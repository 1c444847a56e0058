"""Mixture-of-experts layers: experts as linear layers that see all tokens.

transformers holds a block's experts in two 3-D parameters that no hook on a layer sees into. Here
they are taken apart into linear layers with the names that they have on disk; router and shared
expert stay transformers' own, so that routing is the family's. Where nothing is declared, names
are those of transformers' own conversion of files, and a small stack of the same code must compute
what its experts taken apart do: otherwise it stays whole.

While layers are observed, every token goes through every expert, and only what the router chose
counts in the output. No expert lacks data then, however rarely it is chosen, and as all experts of
a block read one input, they share its statistics, its Hessian and the Hessian's factor. Tokens that
the router sends to an expert weigh no more than others in them: with weights, each expert would
need a Hessian of its own, and that of a rarely chosen one would be singular. While nothing is
observed, only the chosen tokens are computed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from formats.families.family import Mixture

OnRoute = Callable[[str, Tensor], None]
OnExpert = Callable[[int, Tensor, int], None]


Combine = Callable[..., Tensor]  # of the outputs of gate and up, or of up alone


class Expert(nn.Module):
    """One expert, its layers named as on disk: down(combine(gate(x), up(x))).

    Args:
        first: Names of the layers that read the expert's input: gate and up, or up alone.
        down: Name of the layer that reads what they give.
        hidden: Size of the expert's input and output.
        inner: Size between its layers.
        combine: What their outputs become on the way to `down`.
        bias: Whether each layer has one.
    """

    def __init__(
        self,
        first: tuple[str, ...],
        down: str,
        hidden: int,
        inner: int,
        combine: Combine,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self._first, self._down, self._combine = first, down, combine
        for name in first:
            self.add_module(name, nn.Linear(hidden, inner, bias=bias, device="meta"))
        self.add_module(down, nn.Linear(inner, hidden, bias=bias, device="meta"))

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, hidden] to the same."""
        parts = (self.get_submodule(name)(x) for name in self._first)
        return self.get_submodule(self._down)(self._combine(*parts))


class Experts(nn.ModuleList):
    """The experts of a block, in the place of transformers'.

    Attributes:
        observed: Whether every token goes through every expert, for the hooks on their layers.
        on_expert: Called before the chosen tokens of an expert go through it: its index, which they
            are, int64 [chosen], and how many tokens there are in all.
    """

    observed = False
    on_expert: OnExpert | None = None

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Sum of the chosen experts' outputs, as weighted.

        Args:
            x: [tokens, hidden].
            chosen: Experts of each token: int64 [tokens, k].
            weights: Theirs [tokens, k].
        """
        out = torch.zeros_like(x)
        for i, expert in enumerate(self):
            tokens, place = torch.where(chosen == i)
            if not (self.observed or len(tokens)):
                continue
            if self.on_expert is not None:
                self.on_expert(i, tokens, len(x))
            y = expert(x)[tokens] if self.observed else expert(x[tokens])
            out = out.index_add(0, tokens, y * weights[tokens, place, None].to(y.dtype))
        return out

    @contextmanager
    def watched(self, name: str, observed: bool, on_route: OnRoute | None) -> Iterator[None]:
        """Look on for a while.

        Args:
            name: Full name of the experts.
            observed: Whether every token goes through every expert.
            on_route: Called with `name` and how many tokens each expert was chosen for: int64
                [experts].
        """

        def hook(_: nn.Module, args: tuple[Tensor, Tensor, Tensor]) -> None:
            if on_route is not None:
                on_route(name, torch.bincount(args[1].flatten(), minlength=len(self)))

        handle = self.register_forward_pre_hook(hook)
        self.observed = observed
        try:
            yield
        finally:
            handle.remove()
            self.observed = False

    @contextmanager
    def routed(self, on_expert: OnExpert) -> Iterator[None]:
        """Tell of the tokens of each expert for a while; see `on_expert`."""
        self.on_expert = on_expert
        try:
            yield
        finally:
            self.on_expert = None


def split_experts(block: nn.Module, names: Mixture) -> None:
    """Take the experts of a block on the meta device apart into linear layers, in place.

    Args:
        block: From transformers; a dense one is left as it is.
        names: The family's.
    """
    moe = block.get_submodule("mlp")
    if not hasattr(moe, "experts"):
        return
    stacked = moe.get_submodule("experts")
    count, hidden, inner = stacked.get_parameter("down_proj").shape
    first, down = names.expert.gate_up, names.expert.down
    if names.alternating:
        combine, (hidden, inner) = _alternating(stacked), (inner, hidden)
    else:
        combine = _gated(stacked.get_submodule("act_fn"))
    moe.experts = Experts(
        Expert(first, down, hidden, inner, combine, bias=names.alternating) for _ in range(count)
    )
    if names.module != "mlp":  # named as on disk; the block's code finds it under its own name
        del block.mlp
        block.add_module(names.module, moe)
        block.__dict__["mlp"] = moe


def _gated(act: Callable[[Tensor], Tensor]) -> Combine:
    return lambda gate, up: act(gate) * up


def _alternating(stack: Any) -> Combine:
    """The code of a stack that has gates and ups in turn."""
    return lambda gate, up: stack._apply_gate(torch.stack((gate, up), dim=-1).flatten(-2))


def stack_sizes(stack: nn.Module) -> tuple[int, int, int] | None:
    """Experts, their input's size and their inner size; None where a module is no such stack.

    A stack has `down_proj` [E, H, I] and `gate_up_proj` [E, 2 I, H], or `up_proj` [E, I, H] where
    its experts have no gate; no biases, and no norm after an expert.
    """
    shapes = {name: tuple(p.shape) for name, p in stack.named_parameters(recurse=False)}
    first = "gate_up_proj" if getattr(stack, "has_gate", True) else "up_proj"
    if shapes.keys() != {first, "down_proj"} or len(shapes["down_proj"]) != 3:
        return None
    count, hidden, inner = shapes["down_proj"]
    wide = 2 * inner if first == "gate_up_proj" else inner
    return (count, hidden, inner) if shapes[first] == (count, wide, hidden) else None


def apart(stack: nn.Module, first: tuple[str, ...], down: str) -> Experts | None:
    """The experts of a stack on the meta device, as layers; None where its code is another.

    Args:
        stack: As `stack_sizes` describes it.
        first: Names that gate and up get, or up alone.
        down: Name that the down projection gets.
    """
    sizes = stack_sizes(stack)
    if sizes is None or not _same_code(stack, sizes, first, down):
        return None
    return _layers(stack, first, down, *sizes)


def _layers(
    stack: nn.Module, first: tuple[str, ...], down: str, count: int, hidden: int, inner: int
) -> Experts:
    combine = _combine(stack, gated=len(first) == 2)
    return Experts(Expert(first, down, hidden, inner, combine) for _ in range(count))


def _combine(stack: nn.Module, gated: bool) -> Combine:
    """What a stack does between its layers, by its own code."""
    if not gated:
        return stack.get_submodule("act_fn")
    of_both: Any = getattr(stack, "_apply_gate", None)
    if of_both is None:
        return _gated(stack.get_submodule("act_fn"))
    return lambda gate, up: of_both(torch.cat((gate, up), dim=-1))


def _same_code(
    stack: nn.Module, own: tuple[int, int, int], first: tuple[str, ...], down: str
) -> bool:
    """Whether a small stack of the same code gives what its experts, taken apart, give."""
    shrunk: dict[int, int] = {}  # what is alike, as 512 experts of 512 channels, stays alike
    for size, small_size in zip(reversed(own), (4, 8, 3), strict=True):
        shrunk.setdefault(size, small_size)
    count, hidden, inner = (shrunk[size] for size in own)
    small = _shrunk(stack, own, shrunk)
    layers = _layers(small, first, down, count, hidden, inner)
    both: Tensor = next(p for name, p in small.named_parameters() if name != "down_proj")
    for i, expert in enumerate(layers):
        rows = both[i].chunk(len(first))
        parts = dict(zip(first, rows, strict=True)) | {down: small.get_parameter("down_proj")[i]}
        expert.load_state_dict({f"{name}.weight": w for name, w in parts.items()}, assign=True)
    seeded = torch.Generator().manual_seed(0)
    x = torch.randn(5, hidden, generator=seeded)
    chosen = torch.tensor([[0, 1], [2, 0], [1, 2], [0, 2], [1, 0]])
    weights = torch.rand(5, 2, generator=seeded)
    with torch.no_grad():
        try:
            wanted = small(x, chosen, weights)
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
            return False
        return bool(torch.allclose(layers(x, chosen, weights), wanted, rtol=1e-4, atol=1e-6))


def _shrunk(stack: nn.Module, own: tuple[int, int, int], sizes: Mapping[int, int]) -> nn.Module:
    """A stack of the same code with random weights and, in the place of its own, other sizes."""
    count, hidden, inner = (sizes[size] for size in own)
    small = copy.copy(stack)
    small._parameters = {}
    for name, value in vars(stack).items():
        if type(value) is int and value in sizes:
            setattr(small, name, sizes[value])
    seeded = torch.Generator().manual_seed(1)
    for name, parameter in stack.named_parameters(recurse=False):
        wide = parameter.shape[1] == 2 * own[2] and name != "down_proj"
        rows = 2 * inner if wide else inner
        shape = (count, hidden, inner) if name == "down_proj" else (count, rows, hidden)
        values = torch.randn(shape, generator=seeded)
        small.register_parameter(name, nn.Parameter(values, requires_grad=False))
    return small
