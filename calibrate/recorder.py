"""What stands in the places of a model's blocks while its code runs for what it hands to them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from calibrate.handed import Given


class Recorder(nn.Module):
    """Stands in a decoder block's place: records what it is given and passes on hidden states.

    Whatever else the model's code asks of the block, it finds there.

    Args:
        block: In whose place it stands.
        outputs: How many values the block gives as a tuple; None for hidden states alone.

    Attributes:
        hidden: Hidden states that it was handed last.
        given: All else.
    """

    hidden: Tensor | None = None

    def __init__(self, block: nn.Module, outputs: int | None) -> None:
        super().__init__()
        self.__dict__["_block"] = block
        self._outputs = outputs
        self.given = Given()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Record what comes; gives hidden states as the block would."""
        named = next(iter(kwargs)) if not args else None
        self.hidden = args[0] if named is None else kwargs.pop(named)
        self.given = Given(args[1:], kwargs, named)
        rest = (None,) * ((self._outputs or 1) - 1)
        return self.hidden if self._outputs is None else (self.hidden, *rest)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_block"], name)


class AllRecordedError(Exception):
    """The last block was reached: what comes after it needs not be run."""


class LastRecorder(Recorder):
    """The recorder in the last block's place.

    Attributes:
        after: Hidden states [1, tokens, hidden] to go on with; None to stop here.
    """

    after: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """End the run, or go on with other hidden states."""
        passed = super().forward(*args, **kwargs)
        if self.after is None:
            raise AllRecordedError
        return self.after if self._outputs is None else (self.after, *passed[1:])
