"""Proposers that run a small network beside the model (`inference.models.model.Network`).

The network has a cache of its own in blocks of the engine's numbers, so that block tables
of the running sequences are its tables, too; which tokens of them it holds `CachedTokens` tells.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from formats.checkpoint.read import Checkpoint
from formats.errors import EngineError
from inference.backend import Backend
from inference.config import EngineConfig
from inference.models.config import ModelConfig
from inference.models.kv_cache import CacheShape, clear_blocks
from inference.models.model import Chain, Model, Network
from inference.models.parts import Layer
from inference.proposers import Proposer
from inference.scheduling.batch import Ints, RunningBatch
from inference.speculate.cached_tokens import CachedTokens
from inference.transformers_code.attention import Step
from kernels.op_inputs import KVPool


@dataclass(frozen=True)
class Target:
    """The model that drafts are for.

    Attributes:
        vocabulary: Its logits.
        sizes: Of its engine, all resolved; `kv_blocks` is what its cache has.
        backend: Where it runs, and where a network that drafts is to run.
        model: The model itself, loaded.
        checkpoint: Where it was loaded from.
    """

    tokenizer: Any
    vocabulary: int
    sizes: EngineConfig
    backend: Backend
    model: Model
    checkpoint: Checkpoint


class NetworkBackend(Backend, Protocol):
    """A backend that runs networks that draft, beside a model (`Backend.runs_drafters`)."""

    def forward(self, model: Any, pools: Sequence[KVPool]) -> Callable[[Any], Tensor]:
        """What runs the steps of a model on a cache: logits fp32 [R, vocabulary] of a batch."""
        ...

    def captures(self, model: Any) -> bool:
        """Whether steps of one token a sequence of a model may be captured."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm of [T, H]."""
        ...

    def run_block(
        self,
        config: ModelConfig,
        layer: Layer[Any, Any],
        read: Tensor,
        x: Tensor,
        batch: Any,
        pool: KVPool,
        window: int | None,
    ) -> Tensor:
        """A decoder block: [T, H] of the residual stream x, where attention reads `read`."""
        ...

    def code_step(self, model: Any, pools: Sequence[KVPool], batch: Any) -> Step:
        """The tokens of a step as transformers' code takes them.

        Args:
            model: What runs, by its shape and type (`inference.transformers_code.model`).
            batch: The tokens, as the device's steps have them.
        """
        ...

    def chain(
        self,
        network: Network,
        pools: Sequence[KVPool],
        sizes: EngineConfig,
        features: Tensor | None,
    ) -> Chain:
        """What drafts by a network.

        Args:
            network: Loaded on this backend.
            sizes: Of the engine, all resolved.
            features: [slots of the cache and one more, size], what it reads of each token; None
                where it reads tokens alone.
        """
        ...


def network_backend(target: Target) -> NetworkBackend:
    """The target's, which `inference.proposers.require_method` has found to be one."""
    return cast(NetworkBackend, target.backend)


class ChainProposer(Proposer):
    """A proposer that runs a network; see `inference.proposers.Proposer`.

    Args:
        network: What it runs.
        target: What it drafts for.
        pools: The network's cache.
        features: As in `NetworkBackend.chain`.
        held: Which tokens that cache holds, of a network that keeps states beside it.
    """

    def __init__(
        self,
        network: Network,
        target: Target,
        pools: Sequence[KVPool],
        features: Tensor | None = None,
        held: CachedTokens | None = None,
    ) -> None:
        sizes = target.sizes
        assert sizes.kv_blocks is not None
        self._longest, self._shift, self._pools = network.longest, network.shift, pools
        self._held = held or CachedTokens(
            sizes.kv_blocks, sizes.max_batch_size, network.longest, network.shift
        )
        self._broken = np.full(sizes.max_batch_size + 1, -1, np.int64)  # serials, by place
        self._chain = network_backend(target).chain(network, pools, sizes, features)

    def propose(self, batch: RunningBatch, places: Ints, most: Ints) -> Ints:
        """`Proposer.propose`; none after the network's last position."""
        counts, room = np.zeros_like(places), self._longest + 1 + self._shift - batch.known[places]
        most = self._held.room(np.minimum(most, room))
        going = np.flatnonzero((most > 0) & (self._broken[places] != batch.serial[places]))
        going = going[self._ready(batch, places[going])]
        if not len(going):
            return counts
        own, known = places[going], batch.known[places[going]]
        starts = self._held.count(batch, own)
        self._held.begin(batch, own, starts, known - self._shift + most[going] - 1)
        counts[going], broken = self._chain.draft(batch, own, starts, most[going])
        self._give_up(batch, own[broken])
        ends = self._kept(known, counts[going])
        self._held.finish(batch, own[~broken], starts[~broken], ends[~broken])
        return counts

    def _ready(self, batch: RunningBatch, places: Ints) -> Ints:
        """Indices of the sequences for which it can draft."""
        return np.arange(len(places))

    def _kept(self, known: Ints, drafts: Ints) -> Ints:
        """How many tokens of sequences its cache holds for good after it has drafted so many."""
        return known + np.maximum(drafts, 1) - 1  # the last draft is not computed

    def _give_up(self, batch: RunningBatch, places: Ints) -> None:
        """Draft no more for sequences whose logits are not finite, and clear their blocks.

        Whoever gets one of these reads all of it, NaN included.
        """
        self._broken[places] = batch.serial[places]
        for place in places.tolist():
            blocks = batch.tables[place, : batch.held[place]].astype(np.int64)
            clear_blocks(self._pools, blocks.tolist())
            self._held.forget(blocks)


def require_memory(
    name: str, weights: int, cache: CacheShape, backend: Backend, dtype: torch.dtype
) -> None:
    """Refuse a network for which memory is too small.

    Args:
        weights: Bytes of what is loaded and allocated beside its cache.
        dtype: Of its cache, where it is not quantized.

    Raises:
        EngineError: it is.
    """
    own, free = cache.nbytes(dtype), backend.free_bytes()
    if weights + own > free:
        raise EngineError(
            f"speculate: {name} needs {weights / 1e9:.2f} GB, and a cache of {cache.blocks} "
            f"blocks, as many as the model's, {own / 1e9:.2f} GB; {free / 1e9:.2f} GB are free. "
            "Lower kv_blocks or kv_memory, or take a smaller draft model"
        )
