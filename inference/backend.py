"""What a device is: the few doors through which the engine reaches the code that runs there.

    load                     a model, by
    check, linear, experts   a decoder's layers (`inference.models`)
    head_sizes, cache        its paged cache, in the layout of the backend's kernels
    change_blocks, write_kv  what is done to that between steps
    loop                     its steps, with the backend's interpreter of the decoder inside
    loading, peak_bytes      memory

Whoever needs to know a device asks its backend; no other code compares devices. There are two:
`inference.cpu.backend` (compiled kernels, or plain torch) and `inference.gpu.backend` (Triton).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from formats.checkpoint.read import Checkpoint
from formats.errors import EngineError
from inference.config import EngineConfig
from inference.cpu.backend import CpuBackend
from inference.models.adapters import AdapterStore, CachedTokens
from inference.models.kv_cache import CacheShape
from inference.models.layers import LayerFactory
from inference.models.model import KVHeads, Model
from inference.requests.request import StepResult
from inference.scheduling.active import ActiveRequests
from inference.scheduling.blocks import BlockChanges
from inference.scheduling.work import Work
from inference.transformers_code.model import Shape
from kernels.devices import check_device
from kernels.op_inputs import KVPool


class Loop(Protocol):
    """Steps of an engine."""

    def step(self) -> StepResult:
        """Run a step, and tell what requests gained: of this one, or of the one before it."""
        ...

    def score(self, work: Work) -> Tensor:
        """Logits of the tokens of a sequence that is run apart, fp32 [tokens, vocabulary], on the
        device."""
        ...

    def warm_up(self) -> None:
        """Compile and capture the usual steps now.

        Raises:
            EngineError: memory is too small for them.
        """
        ...

    def settle(self) -> StepResult:
        """Wait for a step on its way, if there is one, and tell its tokens."""
        ...

    def drop(self) -> None:
        """Forget a step on its way."""
        ...

    def adapters(self) -> AdapterStore:
        """What holds the adapters that requests run with; always the same.

        Raises:
            EngineError: none are run with this model.
        """
        ...


class Backend(LayerFactory[Any, Any], Protocol):
    """A device, and the kernels that run decoders there.

    Attributes:
        runs_drafters: Whether networks that draft run there, beside the model.
    """

    runs_drafters: bool

    def float_sinks(self, heads: KVHeads) -> bool:
        """Whether its kernels read K and V of sink tokens in floats, for heads of a kind."""
        ...

    def loading(self, nbytes: int) -> AbstractContextManager[object]:
        """Tell where memory runs out while weights of so many bytes are loaded.

        Raises:
            EngineError: it did.
        """
        ...

    def load(self, checkpoint: Checkpoint, shape: Shape, longest: int) -> Model:
        """Load a model for requests of up to so many tokens.

        Raises:
            CheckpointError: tensors are missing or do not fit.
        """
        ...

    def head_sizes(self, k: int, v: int) -> tuple[int, int]:
        """Sizes of heads of K and V in the cache, at least as large as the model's.

        Raises:
            CheckpointError: the kernels take none so large.
        """
        ...

    def cache(self, shape: CacheShape) -> list[KVPool]:
        """Allocate a cache, a pool for each layer.

        Raises:
            EngineError: the kernels do not take such a cache, or memory is too small.
        """
        ...

    def loop(
        self, model: Any, pools: Sequence[KVPool], sizes: EngineConfig, requests: ActiveRequests
    ) -> Loop:
        """The steps of an engine.

        Args:
            model: Loaded on this backend.
            pools: Its cache.
            sizes: The engine's sizes, all resolved.
            requests: Those that live, and what schedules them.
        """
        ...

    def change_blocks(self, pools: Sequence[KVPool], changes: BlockChanges) -> None:
        """Do what the next step needs done to the cache."""
        ...

    def write_kv(self, pools: Sequence[KVPool], tokens: CachedTokens) -> None:
        """Put K and V that no step computes into the cache, after the steps on their way."""
        ...

    def ran_out(self, error: Exception) -> bool:
        """Whether that is said of memory that is too small, and nothing else is wrong."""
        ...

    def free_bytes(self) -> int:
        """Memory that a cache could have now."""
        ...

    def check_alive(self) -> None:
        """Raise EngineEndedError where a process that runs a part of a model is gone."""
        ...

    def close(self) -> None:
        """End the processes that run parts of a model."""
        ...

    def peak_bytes(self) -> int:
        """Most memory so far: resident of the process, or allocated on the GPU."""
        ...


def choose_backend(
    device: torch.device | str, checkpoint: Checkpoint, dtype: torch.dtype | None = None
) -> Backend:
    """The backend of a device.

    Args:
        device: cpu, cuda or cuda:N.
        checkpoint: What will run there.
        dtype: Of activations and of float weights; by default fp32 on a CPU, on a GPU the 16-bit
            type of the checkpoint, or bf16.

    Raises:
        EngineError: the device is not one that is run on, or the type no float.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise EngineError(f"dtype: found {dtype!r}; give a float type, such as torch.float16")
    place = require_device(device)
    if place.type == "cpu":
        return CpuBackend(dtype or torch.float32)
    from inference.gpu.backend import TritonBackend, half_type  # needs Triton

    return TritonBackend(place, dtype or half_type(checkpoint))


def require_device(device: torch.device | str) -> torch.device:
    """`kernels.devices.check_device`.

    Raises:
        EngineError: the device is not one that is run on.
    """
    try:
        return check_device(device)
    except ValueError as error:
        raise EngineError(f"device: {error}") from error
