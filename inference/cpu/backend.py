"""The CPU: the compiled kernels where there is a compiler, plain torch where there is none.

Of a chain of drafts each is chosen on the host before the next is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

import kernels.ops as ops
from formats.checkpoint.read import Checkpoint
from formats.memory import available_bytes, peak_rss_bytes
from inference.config import EngineConfig
from inference.cpu.batch import Batch, StateBatch, plan_tokens
from inference.cpu.decoder import CpuDecoder, forward_by_ops, run_block
from inference.cpu.layers import CpuExperts, Linear, pack_linear
from inference.cpu.loop import CodeStep, CpuAdapters, HostLoop, fuse
from inference.models.adapters import CachedTokens, check_adaptable
from inference.models.config import ModelConfig
from inference.models.kv_cache import CacheShape, OneProcess
from inference.models.model import Computed, KVHeads, Model, Network
from inference.models.read import StoredLinear
from inference.scheduling.active import ActiveRequests
from inference.scheduling.batch import Bools, Ints, RunningBatch
from inference.scheduling.sampler import draw_token
from inference.scheduling.work import Work, fitting
from inference.transformers_code.model import CodeModel, Shape, load_model
from kernels.cpu import native
from kernels.op_inputs import KVPool


class HostChain:
    """Runs a network; see `inference.models.model.Chain`.

    Args:
        network: On a CPU.
        most: Most tokens of a step.
        features: [slots of the cache, size], what it reads of each token; None where it reads
            tokens alone.
    """

    def __init__(
        self, network: Network, pools: Sequence[KVPool], most: int, features: Tensor | None
    ) -> None:
        self._network, self._pools, self._most = network, pools, most
        self._features, self._shift = features, network.shift

    def draft(
        self, batch: RunningBatch, places: Ints, starts: Ints, most: Ints
    ) -> tuple[Ints, Bools]:
        """`Chain.draft`, the first drafts by what is computed of known tokens."""
        logits, hidden = self._catch_up(batch, places, starts)
        counts, going = np.zeros_like(places), np.arange(len(places))
        broken = np.zeros(len(places), np.bool_)
        while len(going):
            top, tokens = logits.max(dim=1)
            finite = np.flatnonzero(torch.isfinite(top).numpy())  # NaN is larger than any number
            broken[np.delete(going, finite)] = True
            going, logits, tokens = going[finite], logits[finite], tokens[finite].numpy()
            ends = batch.known[places[going]] + counts[going]
            for i in np.flatnonzero(batch.terms.draws["temperature"][places[going]]).tolist():
                tokens[i] = _draw(batch, int(places[going[i]]), int(ends[i]), logits[i])
            batch.ids[places[going], ends] = tokens
            counts[going] += 1
            more = np.flatnonzero(counts[going] < most[going])
            hidden = None if hidden is None else hidden[finite[more]]
            going, ends = going[more], ends[more] - self._shift
            if len(going):
                work = _work(batch, places[going], ends, np.ones_like(going))
                logits, hidden = self._run(work, hidden)
        return counts, broken

    def _catch_up(self, batch: RunningBatch, places: Ints, starts: Ints) -> Computed:
        """Compute what the cache lacks from `starts` on, as far as the last known tokens."""
        left = batch.known[places] - self._shift - starts
        found = []
        while left.any():
            now = fitting(left, self._most)
            some = np.flatnonzero(now)
            work = _work(batch, places[some], starts[some], now[some])
            last = torch.from_numpy(now[some] == left[some])  # in order of places
            found.append([None if part is None else part[last] for part in self._run(work, None)])
            starts, left = starts + now, left - now
        logits, hidden = zip(*found, strict=True)
        return Computed(torch.cat(logits), None if hidden[0] is None else torch.cat(hidden))

    def _run(self, work: Work, hidden: Tensor | None) -> Computed:
        """Compute tokens, of each of the sequences the last of them wanted.

        Args:
            hidden: What was computed of the token before each, where the model has not computed
                what is read of it; None where it has.
        """
        own = work.laid_out()
        ids = work.batch.ids[own.owners, own.positions + self._shift].astype(np.int64)
        step = replace(plan_tokens(work), ids=torch.from_numpy(ids))
        if (pieces := self._network.pieces) is not None:
            own = pieces(work.batch, work.places, work.starts, work.counts)
            step = StateBatch(**vars(step), pieces=own)
        if hidden is None and self._features is not None:
            hidden = self._features[step.slots]
        return self._network.step(step, self._pools, hidden)


def _work(batch: RunningBatch, places: Ints, starts: Ints, counts: Ints) -> Work:
    """Tokens [starts, starts + counts) of sequences, of which each one's last logits are wanted."""
    every = np.ones(len(places), np.bool_)
    work = Work.of(batch, places, counts)
    return replace(work, starts=starts, samples=every, host=every, whole=~every)


def _draw(batch: RunningBatch, place: int, end: int, logits: Tensor) -> int:
    """The token that a sequence would have as number `end`, were these the target's logits."""
    sequence = batch.sequences[place]
    assert sequence is not None
    return draw_token(logits.numpy(), sequence.terms.draw, end - int(batch.prompt[place]))


class CpuBackend(OneProcess):
    """Runs decoders on a CPU; see `inference.backend.Backend`.

    Args:
        dtype: Of activations and of float weights; fp32 is the fast one.
        fused: Run a whole decoder as one call where that can be; without, op by op.
    """

    device = torch.device("cpu")
    runs_drafters = same_bits = True
    # Of `inference.speculate.chain.NetworkBackend`:
    rms_norm, run_block, code_step = staticmethod(ops.rms_norm), staticmethod(run_block), CodeStep

    def __init__(self, dtype: torch.dtype = torch.float32, *, fused: bool = True) -> None:
        self.dtype, self._fused = dtype, fused
        self.functions: Mapping[str, Callable[..., Any]] = {}  # transformers' own

    def check(self, config: ModelConfig) -> None:
        """Every decoder that is described runs here."""

    def float_sinks(self, heads: KVHeads) -> bool:
        """Those of all heads are."""
        return True

    def loading(self, nbytes: int) -> AbstractContextManager[object]:
        """The system tells where a process runs out of memory."""
        return nullcontext()

    def linear(self, stored: StoredLinear) -> Linear:
        """Pack a linear layer."""
        return pack_linear(stored, self.dtype)

    def experts(self, stacks: Iterator[StoredLinear], count: int) -> CpuExperts:
        """Pack the same layer of each expert."""
        return CpuExperts([self.linear(one) for stack in stacks for one in stack.unstacked()])

    def load(self, checkpoint: Checkpoint, shape: Shape, longest: int) -> Model:
        """Load a model for requests of up to so many tokens."""
        return load_model(checkpoint, shape, self, longest)

    def head_sizes(self, k: int, v: int) -> tuple[int, int]:
        """Any, the same for K and V."""
        return max(k, v), max(k, v)

    def cache(self, shape: CacheShape) -> list[KVPool]:
        """Allocate a cache, in the type asked for or the model's."""
        dtype = shape.dtype or self.dtype
        return shape.allocate(
            self.device,
            dtype,
            tokens_last=False,
            dynamic_scales=torch.float32,
            zeros=native.zeros,
        )

    def forward(
        self, model: CpuDecoder | CodeModel, pools: Sequence[KVPool]
    ) -> Callable[[Batch], Tensor]:
        """What runs the steps of a model on a cache: logits [R, vocabulary] of a batch."""
        if isinstance(model, CodeModel):
            return lambda batch: model.logits(CodeStep(model, pools, batch))
        fused = fuse(model, pools) if self._fused else None
        return fused or partial(forward_by_ops, model, pools)

    def captures(self, model: CpuDecoder | CodeModel) -> bool:
        """There is nothing to capture."""
        return False

    def chain(
        self,
        network: Network,
        pools: Sequence[KVPool],
        sizes: EngineConfig,
        features: Tensor | None,
    ) -> HostChain:
        """What drafts by a network."""
        return HostChain(network, pools, sizes.max_batched_tokens, features)

    def loop(
        self,
        model: CpuDecoder | CodeModel,
        pools: Sequence[KVPool],
        sizes: EngineConfig,
        requests: ActiveRequests,
    ) -> HostLoop:
        """The steps of an engine."""
        forward = self.forward(model, pools)
        return HostLoop(forward, requests, lambda: CpuAdapters(check_adaptable(model)))

    def write_kv(self, pools: Sequence[KVPool], tokens: CachedTokens) -> None:
        """Put K and V that no step computes into the cache."""
        slots = torch.tensor(tokens.slots)
        positions = torch.arange(tokens.start, tokens.start + len(slots))
        for k, v, pool in zip(tokens.keys, tokens.values, pools, strict=True):
            turned = ops.turn_heads(k, pool.turn) if pool.turn else k
            ops.write_kv(turned, v, pool, slots, positions)

    def ran_out(self, error: Exception) -> bool:
        """Whether that is said of memory that is too small."""
        return isinstance(error, MemoryError) or "can't allocate memory" in str(error)

    def free_bytes(self) -> int:
        """Memory that the system has left."""
        return available_bytes()

    def peak_bytes(self) -> int:
        """Most memory that the process has held so far."""
        return peak_rss_bytes()
