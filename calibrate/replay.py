"""Runs of a block that differ in a few of its layers: what comes before these is computed once.

A search runs a block on the same samples again and again, each time with other weights of one
group of layers. Modules that end before the first of these layers begins read the same inputs each
time and give the same outputs to the bit: the first run of a sample keeps them, later ones take
them. For down this leaves one product of seven, for gate and up it saves the attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

from torch import Tensor, nn

from calibrate.attention import Cache
from calibrate.block import DecoderBlock


class Replay:
    """A block whose samples run many times, only some of its modules changed in between.

    Attributes:
        block: The block. While this is used, nothing about it changes but how the `changed`
            modules compute: their weights, and what hooks make of their inputs and outputs.
        until: A module that reads the residual stream; where it begins after the changed ones, a
            run ends there. None for whole runs.
    """

    def __init__(
        self, block: DecoderBlock, changed: Sequence[nn.Module], until: nn.Module | None = None
    ) -> None:
        self.block, self.changed, self.until = block, changed, until
        self._kept: dict[int, dict[nn.Module, Any]] = {}  # outputs by module, for each sample

    def run(self, sample: int, cache: Cache | None = None) -> Tensor:
        """Run a sample as `DecoderBlock.run`, as far as `until`.

        Args:
            sample: Index into the block's inputs.
            cache: As of `DecoderBlock.run`; where it is given, it counts as a changed module.

        Returns:
            Hidden states [tokens, hidden] that the block gives, or that `until` reads, on the
            block's device.
        """
        if sample not in self._kept:
            return self._first_run(sample, cache)
        with ExitStack() as stack:
            for module, out in self._kept[sample].items():

                def forward(*_: Any, out: Any = out, **__: Any) -> Any:
                    return _copied(out)

                module.forward = forward
                stack.callback(delattr, module, "forward")
            return self._as_far_as_needed(sample, cache, lambda: True)

    def _as_far_as_needed(
        self, sample: int, cache: Cache | None, begun: Callable[[], object]
    ) -> Tensor:
        """The sample's run, ended where `until` begins and `begun()` is true."""

        def end(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            if begun():
                raise _EndedError(args[0].view(*self.block.inputs[sample].shape[:-1], -1))

        until = self.until
        with nullcontext() if until is None else until.register_forward_pre_hook(end):
            try:
                return self.block.run(sample, cache=cache)
            except _EndedError as ended:
                return ended.hidden

    def _first_run(self, sample: int, cache: Cache | None) -> Tensor:
        """Run a sample, and keep what ended before the first changed module began."""
        kept: dict[nn.Module, Any] = {}
        ended, begun = set[nn.Module](), list[bool]()
        rows = self.block.handed.rows
        lent = {*rows.after} - {*rows.before}  # made by this block, whenever its attention runs
        lending = {self.block.submodule(own.site.module) for own in lent}

        def before(*_: Any) -> None:
            begun.append(True)

        def cached(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            assert cache is not None
            before()
            return cache(k, v)

        def after(module: nn.Module, _: Any, out: Any) -> None:
            if begun:
                return
            for inside in module.modules():  # they are not called when this one is not
                kept.pop(inside, None)
            again = module in ended | lending or "forward" in vars(module)
            if not again and _is_plain(out):
                kept[module] = _copied(out)
            ended.add(module)

        with ExitStack() as stack:
            for module in self.changed:
                stack.callback(module.register_forward_pre_hook(before).remove)
            for module in self.block.module.modules():
                stack.callback(module.register_forward_hook(after).remove)
            given = None if cache is None else cached
            out = self._as_far_as_needed(sample, given, lambda: begun)
        if self.until in kept:  # it began before the changed modules: runs are whole
            self.until = None
        self._kept[sample] = kept
        return out


class _EndedError(Exception):
    """Ends a run of a block.

    Attributes:
        hidden: What was to be read [tokens, hidden].
    """

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


def _is_plain(out: Any) -> bool:
    """Whether an output is made of tensors, so that a copy is as good as the module's own."""
    parts = out if type(out) in (tuple, list) else (out,)
    return all(part is None or isinstance(part, Tensor) for part in parts)


def _copied(out: Any) -> Any:
    """An output that the block's code may change in place."""
    if type(out) in (tuple, list):
        return type(out)(_copied(part) for part in out)
    return out.clone() if isinstance(out, Tensor) else out
