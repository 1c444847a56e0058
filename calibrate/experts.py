"""Mixture-of-experts layers in calibration: experts as linear layers that see all tokens.

transformers holds a block's experts in two 3-D parameters that no hook on a layer sees into. Here
they are taken apart into linear layers with the names that they have on disk; router and shared
expert stay transformers' own, so that routing is the family's.

While layers are observed, every token goes through every expert, and only what the router chose
counts in the output. No expert lacks data then, however rarely it is chosen, and as all experts of
a block read one input, they share its statistics, its Hessian and the Hessian's factor. Tokens that
the router sends to an expert weigh no more than others in them: with weights, each expert would
need a Hessian of its own, and that of a rarely chosen one would be singular. While nothing is
observed, only the chosen tokens are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from formats.families.family import GatedMLP, Mixture

OnRoute = Callable[[str, Tensor], None]


class Expert(nn.Module):
    """A gated MLP, its layers named as on disk: down(act(gate(x)) * up(x))."""

    def __init__(
        self, names: GatedMLP, hidden: int, inner: int, act: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__()
        self._names, self._act = names, act
        for name in (names.gate, names.up):
            self.add_module(name, nn.Linear(hidden, inner, bias=False, device="meta"))
        self.add_module(names.down, nn.Linear(inner, hidden, bias=False, device="meta"))

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, hidden] to the same."""
        gate, up, down = (
            self.get_submodule(n) for n in (self._names.gate, self._names.up, self._names.down)
        )
        return down(self._act(gate(x)) * up(x))


class Experts(nn.ModuleList):
    """The experts of a block, in the place of transformers'.

    Attributes:
        observed: Whether every token goes through every expert, for the hooks on their layers.
    """

    observed = False

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
    act = stacked.get_submodule("act_fn")
    moe.experts = Experts(Expert(names.expert, hidden, inner, act) for _ in range(count))
    if names.module != "mlp":  # named as on disk; the block's code finds it under its own name
        del block.mlp
        block.add_module(names.module, moe)
        block.__dict__["mlp"] = moe
