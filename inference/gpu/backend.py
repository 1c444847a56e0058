"""NVIDIA GPUs, by the kernels of `kernels.triton`; a CPU stands for one where Triton interprets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError, EngineError
from formats.families.values import named_dtype
from inference.config import EngineConfig
from inference.gpu.chain import DeviceChain
from inference.gpu.code_step import FUNCTIONS, CodeStep, forward_code
from inference.gpu.decoder import GpuBatch, GpuDecoder, forward, run_block
from inference.gpu.feed_forward import GpuExperts, as_one, side_by_side
from inference.gpu.invariant import invariant_decoder
from inference.gpu.layers import GpuLinear, pack_linear, warnings_together
from inference.gpu.loop import DeviceLoop
from inference.gpu.memory import OF_CACHE, OF_WEIGHTS, free_bytes, memory_for, ran_out
from inference.gpu.ranks import StepRanks
from inference.gpu.runner import GpuRunner
from inference.models.adapters import CachedTokens
from inference.models.config import ModelConfig
from inference.models.kv_cache import CacheShape, OneProcess
from inference.models.model import KVHeads, Model, Network
from inference.models.parts import Layer
from inference.models.read import StoredLinear
from inference.scheduling.active import ActiveRequests
from inference.scheduling.batch import RunningBatch
from inference.scheduling.blocks import blocks_for
from inference.transformers_code.model import CodeModel, Shape, load_model
from kernels.op_inputs import KV_BLOCK, KVPool
from kernels.triton.attention.latent import check_latents
from kernels.triton.attention.paged_cache import LARGEST_HEAD, check_pages, is_head_size
from kernels.triton.attention.rope_cache import rope_write
from kernels.triton.fused import add_rms_norm


class TritonBackend(OneProcess):
    """Runs decoders on a GPU; see `inference.backend.Backend`.

    Args:
        dtype: Of activations and of float weights: fp16 or bf16.
    """

    runs_drafters, same_bits, functions = True, False, FUNCTIONS
    code_step = CodeStep  # of `inference.speculate.chain.NetworkBackend`

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype

    def check(self, config: ModelConfig) -> None:
        """Refuse what the kernels do not take: some sizes of heads.

        Raises:
            CheckpointError: this decoder has such heads.
        """
        if config.latent is None and not is_head_size(config.head_dim):
            raise CheckpointError(
                f"head_dim: found {config.head_dim}; GPUs run multiples of 16 up to "
                f"{LARGEST_HEAD}, the CPU any"
            )

    @contextmanager
    def loading(self, nbytes: int) -> Iterator[None]:
        """Say where memory runs out for weights of so many bytes, and once what holds for many
        layers."""
        with (
            memory_for("loading the weights", self.device, nbytes, OF_WEIGHTS),
            warnings_together(),
        ):
            yield

    def linear(self, stored: StoredLinear) -> GpuLinear:
        """Pack a linear layer for the kernel that takes it."""
        return pack_linear(stored, self.dtype)

    def experts(self, stacks: Iterator[StoredLinear], count: int) -> GpuExperts:
        """Pack the same layer of each expert, side by side in memory."""
        packed = ((self.linear(stack), stack.names[0][0]) for stack in stacks)
        return side_by_side(packed, count)

    def load(self, checkpoint: Checkpoint, shape: Shape, longest: int) -> Model:
        """Load a model for requests of up to so many tokens."""
        return load_model(checkpoint, shape, self, longest)

    def float_sinks(self, heads: KVHeads) -> bool:
        """Those of K and V are; latents are read as they are stored."""
        return not heads.latent

    def head_sizes(self, k: int, v: int) -> tuple[int, int]:
        """The next size that the kernels take, the same for K and V.

        Raises:
            CheckpointError: there is none.
        """
        own = (max(k, v) + 15) // 16 * 16
        if not is_head_size(own):
            raise CheckpointError(
                f"found heads of {k} (K) and {v} (V) numbers; GPUs run up to {LARGEST_HEAD}, the "
                "CPU any"
            )
        return own, own

    def cache(self, shape: CacheShape) -> list[KVPool]:
        """Allocate a cache in the kernels' layout: V is stored token by token."""
        if not shape.quantized and shape.dtype not in (None, self.dtype):
            raise EngineError(
                f"kv_dtype: found {_name(shape.dtype)}; on a GPU a cache that is not quantized has "
                f"the model's type, {_name(self.dtype)}. Leave it out"
            )
        what = f"a cache of {shape.blocks} blocks of {KV_BLOCK} tokens"
        with memory_for(what, self.device, shape.nbytes(self.dtype), OF_CACHE):
            pools = shape.allocate(
                self.device,
                self.dtype,
                tokens_last=True,
                dynamic_scales=torch.float16,
            )
        _check(pools, shape)
        return pools

    def forward(
        self, model: GpuDecoder | CodeModel, pools: Sequence[KVPool]
    ) -> Callable[[GpuBatch], Tensor]:
        """What runs the steps of a model on a cache: logits [R, vocabulary] of a batch."""
        return partial(forward_code if isinstance(model, CodeModel) else forward, model, pools)

    def captures(self, model: GpuDecoder | CodeModel) -> bool:
        """Whether steps of one token a sequence of a model may be captured."""
        if isinstance(model, CodeModel):
            return False
        return all(as_one(layer.feed_forward, None) for layer in model.layers)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm of [T, H]."""
        return add_rms_norm(x, None, weight, eps, dtype=x.dtype)[0]

    def run_block(
        self,
        config: ModelConfig,
        layer: Layer[GpuLinear, GpuExperts],
        read: Tensor,
        x: Tensor,
        batch: GpuBatch,
        pool: KVPool,
        window: int | None,
    ) -> Tensor:
        """A decoder block: [T, H] of the residual stream x, where attention reads `read`."""
        return run_block(config, self.dtype, layer, read, x, batch, pool, window)

    def chain(
        self,
        network: Network,
        pools: Sequence[KVPool],
        sizes: EngineConfig,
        features: Tensor | None,
    ) -> DeviceChain:
        """What drafts by a network."""
        assert sizes.max_model_len is not None
        return DeviceChain(
            network,
            pools,
            self.device,
            self.dtype,
            width=blocks_for(sizes.max_model_len),
            most=sizes.max_batched_tokens,
            features=features,
            graphs=not sizes.eager,
        )

    def loop(
        self,
        model: GpuDecoder | CodeModel,
        pools: Sequence[KVPool],
        sizes: EngineConfig,
        requests: ActiveRequests,
    ) -> DeviceLoop:
        """The steps of an engine; with `eager` kernel by kernel, each waited for.

        Raises:
            EngineError: the model cannot be run `invariant`, as the sizes ask.
        """
        runner = self.runner(model, pools, sizes, requests.scheduler.batch)
        return DeviceLoop(runner, requests, ahead=not sizes.eager)

    def runner(
        self,
        model: GpuDecoder | CodeModel,
        pools: Sequence[KVPool],
        sizes: EngineConfig,
        batch: RunningBatch,
        ranks: StepRanks | None = None,
    ) -> GpuRunner:
        """What runs steps; `ranks` are those that have parts of the model, if it is cut."""
        assert sizes.max_model_len is not None
        return GpuRunner(
            invariant_decoder(model) if sizes.invariant else model,
            pools,
            self.device,
            batch,
            width=blocks_for(sizes.max_model_len),
            graphs=not sizes.eager,
            invariant=sizes.invariant,
            ranks=ranks,
        )

    def write_kv(self, pools: Sequence[KVPool], tokens: CachedTokens) -> None:
        """Put K and V that no step computes into the cache, after the steps on their way."""
        device, count = self.device, len(tokens.slots)
        slots = torch.tensor(tokens.slots, dtype=torch.int32, device=device)
        places = torch.arange(tokens.start, tokens.start + count, dtype=torch.int32, device=device)
        cos = torch.ones(count, tokens.keys.shape[3], device=device)  # keys are rotated already
        sin = torch.zeros_like(cos)
        keys, values = tokens.keys.to(device), tokens.values.to(device)
        for k, v, pool in zip(keys, values, pools, strict=True):
            rope_write(k, k, v, cos, sin, pool, slots, places=places)

    def ran_out(self, error: Exception) -> bool:
        """Whether that is said of memory that is too small: the GPU's."""
        return ran_out(error) or (
            isinstance(error.__cause__, Exception) and ran_out(error.__cause__)
        )

    def free_bytes(self) -> int:
        """Memory of the GPU that nobody holds."""
        return free_bytes(self.device)

    def peak_bytes(self) -> int:
        """Most memory of the GPU that tensors have held so far."""
        return torch.cuda.max_memory_allocated(self.device)


def half_type(checkpoint: Checkpoint) -> torch.dtype:
    """fp16 for a checkpoint in it, else bf16."""
    return torch.float16 if named_dtype(checkpoint.config) == "float16" else torch.bfloat16


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def _check(pools: Sequence[KVPool], shape: CacheShape) -> None:
    """Raise EngineError now where the kernels would refuse a cache at the first step."""
    try:
        for pool, layer in zip(pools, shape.layers, strict=True):
            (check_latents if layer.heads.latent else check_pages)(pool)
    except ValueError as error:
        raise EngineError(
            f"the GPU's kernels do not take this model's cache: {error}; quantized_kv=False gives "
            "it the model's type, device cpu runs any"
        ) from error
