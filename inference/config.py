"""Sizes of an engine."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticKnownError

from formats.documents import Strict
from formats.errors import EngineError
from inference.proposers import draft_methods
from inference.scheduling.blocks import blocks_for
from kernels.op_inputs import KV_BLOCK

MOST_POSITIONS = 4096  # default limit of a request; models that allow more need to be asked
MOST_BLOCKS = 512  # default size of the cache, unless one request needs more
MOST_TIMES = 4  # of what all places hold: a larger cache is hardly ever found useful


class SpeculateConfig(Strict):
    """Where drafts of the next tokens come from; the tokens are the same with any and without.

    Attributes:
        method: `ngram`: what followed the last tokens before, in the prompt, the output or the
            request's `reference`. `suffix`: what followed them in all that was served. `draft`:
            what a smaller model says. `eagle`: what a head says that reads the model's hidden
            states (EAGLE-3). `mtp`: what the multi-token prediction layer says that models of
            DeepSeek-V3's build have after their last block.
        path: Of `draft` and `eagle`: the model or head, a folder or `organization/model` on the
            Hugging Face hub. Of `mtp`: the checkpoint with that layer; default: the model's own.
        depth: Drafts of each request in a step; default: as many as pay, none where none do.
    """

    method: str
    path: str | None = None
    depth: int | None = Field(default=None, ge=1, le=64)

    @field_validator("method", mode="before")
    @classmethod
    def _check_method(cls, found: object) -> object:
        names = tuple(draft_methods())
        if found not in names:
            *others, last = map(repr, names)
            expected = f"{', '.join(others)} or {last}"
            raise PydanticKnownError("literal_error", {"expected": expected})
        return found

    @model_validator(mode="after")
    def _check_path(self) -> Self:
        own = draft_methods()[self.method]
        if not own.takes_path and (self.path is None) == (own.needs is not None):
            fault = "needs a path" if self.path is None else f"takes no path; found {self.path!r}"
            raise EngineError(f"speculate: method {self.method} {fault}")
        return self


class EngineConfig(Strict):
    """Sizes of an engine.

    Attributes:
        max_batch_size: Most requests that run at once.
        max_batched_tokens: Most tokens of a step; longer prompts are computed in chunks.
        max_model_len: Most tokens of a request, prompt and output; default: what the model allows,
            up to 4096.
        kv_blocks: Blocks of 64 tokens in the cache; default: enough for all places, up to 512.
        kv_memory: Without `kv_blocks`, the share of the memory that is free once the weights are
            loaded which the cache gets: as a server needs it, which keeps what may be asked again.
            It gets no more than four times what all places hold.
        kv_dtype: Type of K and V in a cache that is not quantized; default: fp32 on a CPU, the
            model's type on a GPU.
        prefix_cache: Keep K and V of what requests have computed as long as there is room, so that
            others that begin with the same tokens need not compute them.
        state_snapshots: Of a model that keeps a recurrent state: how many states are kept beside
            the cached blocks, without which a beginning is computed again; default: as many as
            `max_batch_size`, and at least 32; in int8 as many as fit in the memory of these.
        target_itl_ms: Wanted milliseconds between two tokens of a request: in a step that has
            others, prompts are computed in chunks for which there is that much time, by what past
            steps took. Default: as many tokens as fit a step. On a GPU, how a prompt is cut may
            change the last bits of its logits.
        eager: On a GPU, launch kernels one by one and wait for every step: no CUDA graphs, and no
            step before the tokens of the last are known. Slower, with equal tokens.
        invariant: On a GPU, a request's tokens and log probabilities have the same bits whatever
            runs beside it, however its prompt is cut or found in the cache, and whether or not
            drafts are made. Prompts are slower, and so are decodes with float sums, a little. On a
            CPU it is always so.
        transformers_code: Run a model of a declared family by transformers' own code, as those are
            run that no family declares. Slower.
        speculate: Draft the next tokens, verify the drafts in each step, and keep those that the
            model chooses, too.
        tensor_parallel: Ranks: processes that each hold a part of every layer and of the cache, on
            a GPU of its own each, or on one CPU.
        rank_patience_s: Seconds after which a rank that has stopped, while the others wait for it,
            ends the engine.
    """

    max_batch_size: int = Field(default=16, ge=1)
    max_batched_tokens: int = Field(default=2048, ge=1)
    max_model_len: int | None = Field(default=None, ge=2)
    kv_blocks: int | None = Field(default=None, ge=1)
    kv_memory: float | None = Field(default=None, gt=0, lt=1)
    kv_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    prefix_cache: bool = True
    state_snapshots: int | None = Field(default=None, ge=0)
    target_itl_ms: float | None = Field(default=None, gt=0)
    eager: bool = False
    invariant: bool = False
    transformers_code: bool = False
    speculate: SpeculateConfig | None = None
    tensor_parallel: int = Field(default=1, ge=1, le=64)
    rank_patience_s: float = Field(default=20.0, gt=0)

    def sizes(self, positions: int) -> tuple[int, int]:
        """Most tokens of a request, and blocks of the cache, for a model of so many positions.

        Raises:
            EngineError: the model has fewer positions, or the cache cannot hold one request.
        """
        length = self.max_model_len or min(positions, MOST_POSITIONS)
        if length > positions:
            raise EngineError(
                f"max_model_len {length} is more than the model's {positions} positions; lower it: "
                "it is what a prompt and its new tokens have together"
            )
        each = blocks_for(length)
        blocks = self.kv_blocks or max(each, min(each * self.max_batch_size, MOST_BLOCKS))
        if blocks < each:
            raise EngineError(
                f"kv_blocks {blocks} of {KV_BLOCK} tokens cannot hold one request of "
                f"max_model_len {length}; {each} are needed"
            )
        return length, blocks

    def blocks_within(self, length: int, free: int, each: int) -> int:
        """Blocks that `kv_memory` gives the cache, where requests have at most so many tokens.

        Args:
            length: Most tokens of a request.
            free: Bytes that are free.
            each: Bytes of a block.
        """
        assert self.kv_memory is not None
        one = blocks_for(length)
        most = MOST_TIMES * one * self.max_batch_size
        return max(one, min(most, int(free * self.kv_memory) // max(each, 1)))
