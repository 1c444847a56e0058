"""Attention as transformers' code calls it, over the cache of the step that runs.

transformers' models call one function for attention, which is chosen by a name
(`transformers.AttentionInterface`). Under `NAME`, which `load` registers, they call the one here,
with q, k and v of all tokens of a step in one row [1, heads, T, D]: it hands them to the step
(`Step`), which puts k and v into the cache of the layer and attends over what each token's sequence
has there. Masks are not built: what a token sees is known by `formats.modeling`. A bound of the
logits (`softcap`), sinks (`s_aux`) and biases by distance (`alibi`) come as arguments; one that is
not known here, and says something, is refused by its name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from formats.errors import CheckpointError
from inference.transformers_code.state_rows import Piece
from kernels.op_inputs import AttentionInputs, Gate, KVPool, Named

if TYPE_CHECKING:
    from inference.transformers_code.model import CodeShaped

NAME = "ptq_paged"
NEUTRAL = frozenset(  # said otherwise, or of no effect on a step
    "cache_position cu_seq_lens_k cu_seq_lens_q dropout is_causal max_length_k max_length_q "
    "num_items_in_batch output_attentions output_hidden_states output_router_logits "
    "position_embeddings position_ids return_dict sliding_window use_cache".split()
)
TAKEN = frozenset({"alibi", "s_aux", "softcap"})


@dataclass(frozen=True)
class Query:
    """Queries, keys and values of a step in one layer, and how attention combines them.

    Attributes:
        q: [T, Hq, D], turned where the model turns them.
        k: [T, Hkv, D].
        v: [T, Hkv, Dv].
        scale: Factor of q k^T.
        softcap: Bound of the logits, or None.
        sinks: A logit of each query head without a value [Hq], or None.
        alibi: Slopes of biases by distance fp32 [Hq] (`AttentionInputs`), or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    softcap: float | None
    sinks: Tensor | None
    alibi: Tensor | None

    def inputs(
        self,
        pool: KVPool,
        tables: Tensor,
        lengths: Tensor,
        starts: Tensor | None,
        window: int | None,
    ) -> AttentionInputs:
        """What a backend's attention is given beside the queries."""
        return AttentionInputs(
            pool,
            tables,
            lengths,
            starts,
            softmax_scale=self.scale,
            sliding_window=window,
            softcap=self.softcap,
            sinks=None if self.sinks is None else self.sinks.float(),
            alibi=None if self.alibi is None else self.alibi.float(),
        )


class Step(ABC):
    """The tokens of one step on a device, and the cache.

    Args:
        model: What runs.
        batch: The tokens, as the device's steps have them.

    Attributes:
        ids: int64 [T].
        positions: int64 [T], of each token in its sequence.
        rows: int64 [R], the tokens whose logits are wanted; None for all.
        pieces: All tokens, as modules that keep a state take them.
    """

    def __init__(self, model: CodeShaped, pools: Sequence[KVPool], batch: Any) -> None:
        self._windows, self._pools = model.config.windows, [pools[i] for i in model.config.places]
        self._batch, self.ids = batch, batch.ids
        self.positions: Tensor = batch.positions
        self.rows: Tensor | None = batch.rows
        self.pieces: Sequence[Piece] = getattr(batch, "pieces", ())

    @abstractmethod
    def sinks(self, count: int) -> Tensor | None:
        """Which tokens are at the first `count` positions: bool or int32 [T], or None."""

    @abstractmethod
    def keep_output(self, x: Tensor) -> None:
        """Give what the head reads [T, H] to a proposer that reads it, if there is one."""

    @abstractmethod
    def attend(self, layer: int, own: Query) -> Tensor:
        """Put keys and values into a layer's cache and attend: [T, Hq, Dv]."""

    @abstractmethod
    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm over the last dimension: [..., H] to the same."""

    @abstractmethod
    def gated_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, form: Gate) -> Tensor:
        """RMSNorm of x with a gate of its shape: [..., H] to the same."""

    @abstractmethod
    def gated_product(self, gate_up: Tensor, activation: Named) -> Tensor:
        """activation(gate) * up of rows [T, 2 I], the gate's half first: [T, I]."""

    @abstractmethod
    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Turn channels i and i + R / 2 of heads [T, heads, D] by angles [T, R], halves equal;
        those from R on stay."""


@dataclass
class _Running:
    step: Step | None
    sinks: Tensor | None = None  # which rows of layers' inputs are of sink tokens: bool [T]
    layer: int = 0  # of the next call: blocks come in their order


_running: ContextVar[_Running] = ContextVar("running")


@contextmanager
def _set(own: _Running) -> Iterator[None]:
    token = _running.set(own)
    try:
        yield
    finally:
        _running.reset(token)


@contextmanager
def running(step: Step, layers: int, sink_tokens: int = 0) -> Iterator[None]:
    """Calls of attention in the block are this step's, one for each layer.

    Args:
        step: Runs.
        layers: How many there are.
        sink_tokens: Positions from the first on whose rows have input scales of their own.

    Raises:
        CheckpointError: there were more or fewer.
    """
    own = _Running(step, step.sinks(sink_tokens) if sink_tokens else None)
    with _set(own):
        yield
    if own.layer != layers:
        raise CheckpointError(
            f"transformers' code called attention {own.layer} times for {layers} layers; such a "
            "model is not run here"
        )


def current_step() -> Step:
    """The step that runs."""
    step = _running.get().step
    assert step is not None
    return step


def quiet() -> AbstractContextManager[None]:
    """For a while, layers run without a step: those that ask for one are not called."""
    return _set(_Running(None))


def current_sinks() -> Tensor | None:
    """Which of the rows that layers read now are of sink tokens: bool [T]; None where none is."""
    return _running.get().sinks


def only_rows(tokens: Tensor) -> AbstractContextManager[None]:
    """For a while, layers read the rows of some tokens alone, int64 [n]."""
    every = current_sinks()
    return with_sinks(None if every is None else every[tokens])


@contextmanager
def with_sinks(sinks: Tensor | None) -> Iterator[None]:
    """For a while, layers read rows of which these are of sink tokens: bool [T]; None for none."""
    now = _running.get()
    before, now.sinks = now.sinks, sinks
    try:
        yield
    finally:
        now.sinks = before


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    alibi: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What transformers' code calls for attention; [1, heads, T, D] each, gives [1, T, Hq, Dv].

    Raises:
        CheckpointError: an argument changes attention in a way that is not known here.
    """
    unknown = [name for name, value in others.items() if value is not None and name not in NEUTRAL]
    if attention_mask is not None:
        unknown.append("attention_mask")
    if others.get("is_causal") is False:
        unknown.append("is_causal")
    if unknown:
        raise CheckpointError(
            f"{type(module).__name__}: transformers' code gives attention {', '.join(unknown)}, "
            "which is not run here"
        )
    now = _running.get()
    layer, now.layer = now.layer, now.layer + 1
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    return current_step().attend(layer, Query(q, k, v, scale, softcap, s_aux, alibi))[None], None


def widened(x: Tensor, size: int) -> Tensor:
    """Heads [T, heads, D] with zeros after their numbers, up to a size."""
    missing = size - x.shape[-1]
    return torch.nn.functional.pad(x, (0, missing)) if missing else x
