"""Linear layers of modules that keep a state, computed once for all tokens of a step.

Such a module is handed its tokens in pieces, but what its first layers make of them, and its last
one of what is between, does not depend on the pieces. Whether a layer is one of these is seen: it
is called with the very tensor that the module was, or the module gives the very tensor that it
gave. All weights are then read once a step, as where drafts are verified one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from formats.errors import CheckpointError
from inference.transformers_code.attention import current_sinks, with_sinks
from inference.transformers_code.linear import BackendLinear, PartOfLinear


class _Step:
    """All tokens of a step, and the piece of them that the module's code has now.

    Args:
        x: What the module reads [T, H].
    """

    def __init__(self, x: Tensor) -> None:
        self.x, self.sinks = x, current_sinks()
        self.piece = self.tokens = x
        self.first: dict[nn.Module, Tensor] = {}  # by layer, what it gives [T, N]
        self.inner: Tensor | None = None  # what the last layer reads [T, K]
        self.later: Tensor | None = None  # stands for what it gives of the piece


class Projection(nn.Module):
    """A linear layer of such a module, in the place of `BackendLinear` or a part of one.

    Args:
        owner: All those of the module.
    """

    def __init__(self, layer: BackendLinear | PartOfLinear, owner: Projections) -> None:
        super().__init__()
        self.layer, self._owner = layer, owner

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] to [..., outputs] of the same type."""
        return self._owner.computed(self, x)


class Projections:
    """Those of one module, which are put in their places.

    Attributes:
        last: Name in the module of the layer that makes what it gives; None where none does.
    """

    def __init__(self, module: nn.Module) -> None:
        self.last: str | None = None
        self._names: dict[nn.Module, str] = {}
        self._made: list[tuple[str, Tensor]] | None = []
        self._step: _Step | None = None
        for name, part in list(module.named_modules()):
            if isinstance(part, BackendLinear | PartOfLinear):
                own = Projection(part, self)
                self._names[own] = name
                module.set_submodule(name, own)

    @contextmanager
    def step(self, x: Tensor) -> Iterator[None]:
        """For a while, the module is called with pieces of x [T, H]."""
        self._step = _Step(x)
        try:
            yield
        finally:
            self._step = None

    def begin(self, x: Tensor, tokens: Tensor) -> None:
        """The module is called with x [..., H] next, which are some of the step's tokens."""
        if self._step is not None:
            self._step.piece, self._step.tokens, self._step.later = x, tokens, None

    def computed(self, own: Projection, x: Tensor) -> Tensor:
        """What a layer gives of x [..., K], or stands for it until `outputs`."""
        step = self._step
        if step is None:
            y = own.layer(x)
            if self._made is not None:
                self._made.append((self._names[own], y))
            return y
        if x is step.piece:
            if own not in step.first:
                with with_sinks(step.sinks):
                    step.first[own] = own.layer(step.x)
            return step.first[own][step.tokens].view(*x.shape[:-1], -1)
        if self._names[own] != self.last:
            return own.layer(x)
        rows = x.reshape(-1, x.shape[-1])
        if step.inner is None:
            step.inner = rows.new_zeros(len(step.x), rows.shape[1])
        step.inner[step.tokens] = rows
        step.later = step.x.new_empty(*x.shape[:-1], step.x.shape[1])
        return step.later

    def maker(self, y: Tensor) -> str | None:
        """Before `settle`: name of the layer that made what the module gave just now, if any."""
        made, self._made = self._made, []
        return next((name for name, own in made or () if own is y), None)

    def settle(self, last: str | None) -> None:
        """Which layer makes what the module gives is known."""
        self.last, self._made = last, None

    def check(self, y: Tensor) -> bool:
        """Whether what the module gave of a piece is to come.

        Raises:
            CheckpointError: the module has changed what is to come.
        """
        step = self._step
        if step is None or step.later is None:
            return False
        if y is not step.later:
            raise CheckpointError(
                f"transformers' code changes what its layer {self.last} gives for some tokens and "
                "not for others; such a model is not run here"
            )
        return True

    def outputs(self) -> Tensor | None:
        """What the module gives of all tokens [T, H], where that was to come."""
        step = self._step
        if step is None or step.inner is None:
            return None
        last = next(own for own, name in self._names.items() if name == self.last)
        assert isinstance(last, Projection)
        return last.layer(step.inner)
