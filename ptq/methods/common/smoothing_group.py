"""A place of a decoder block where difficulty can be moved from an input into weights."""

from __future__ import annotations

from typing import Literal

from formats.scheme import Strict

SmoothingKind = Literal["attention_input", "attention_output", "mlp_input", "mlp_output"]
SMOOTHING_KINDS: tuple[SmoothingKind, ...] = (
    "attention_input",
    "attention_output",
    "mlp_input",
    "mlp_output",
)


class SmoothingGroup(Strict):
    """A source whose output channels can be divided while its consumers are multiplied.

    Attributes:
        kind: Which of a block's groups it is; see `ptq.methods.smoothquant.SmoothQuantSpec`.
        block: Full name of the decoder block.
        source: Full name of the norm, or of the linear layer v_proj or up_proj, that is divided
            (with its bias, where it has one).
        consumers: Full names of the linear layers that read it.
        routers: Full names of routers that read it. They are multiplied too, and not quantized.
        tied: Name for the groups that get one strength together: the experts of a block. None for
            a group that is searched alone.
    """

    kind: SmoothingKind
    block: str
    source: str
    consumers: tuple[str, ...]
    routers: tuple[str, ...] = ()
    tied: str | None = None
