"""Drafts of a smaller model of the same vocabulary, which runs beside the one it drafts for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from formats.checkpoint.read import Checkpoint
from formats.tokenizer import load_tokenizer
from inference.models.kv_cache import CacheShape
from inference.models.network import Computed
from inference.speculate.chain import ChainProposer, Target, network_backend, require_memory
from inference.speculate.vocabulary import require_same_vocabulary
from inference.transformers_code.choose import check_config, read_shape
from kernels.attention_inputs import KVPool


class ModelNetwork:
    """A whole model as what drafts; see `inference.models.network.Network`.

    Args:
        forward: Runs it on its cache.
        vocabulary: Ids below are known to it and to the model that it drafts for.
        longest: Most tokens of a sequence in its cache.
        captured: Whether a GPU may capture its steps.
    """

    shift = size = 0

    def __init__(
        self, forward: Callable[[Any], Tensor], vocabulary: int, longest: int, *, captured: bool
    ) -> None:
        self._forward, self._vocabulary = forward, vocabulary
        self.longest, self.captured = longest, captured

    def step(self, batch: Any, pools: Sequence[KVPool], hidden: Tensor | None) -> Computed:
        """`Network.step`, on the cache that `forward` runs on."""
        own = replace(batch, ids=batch.ids.clamp(max=self._vocabulary - 1))  # others pad the target
        return Computed(self._forward(own)[:, : self._vocabulary], None)


class DraftModel(ChainProposer):
    """A proposer that runs a model.

    Args:
        name: Its folder, or `organization/model` on the Hugging Face hub.
        target: The model that it drafts for.

    Raises:
        CheckpointError: it is damaged, or of a kind that is not run here.
        EngineError: it has another vocabulary, or memory is too small for it.
    """

    def __init__(self, name: str, target: Target) -> None:
        checkpoint, sizes, backend = Checkpoint.open(name), target.sizes, network_backend(target)
        check_config(checkpoint)
        shape = read_shape(checkpoint, backend, transformers_code=sizes.transformers_code)
        vocabulary = require_same_vocabulary(
            name,
            load_tokenizer(checkpoint.path),
            shape.vocab_size,
            target.tokenizer,
            target.vocabulary,
        )
        assert sizes.max_model_len is not None
        longest = min(sizes.max_model_len, shape.max_positions)
        cache = CacheShape.of_model(checkpoint, shape, sizes, quantized=True)
        cache = cache.fitted(backend.head_sizes, float_sinks=backend.float_sinks)
        require_memory(f"the draft model {name}", checkpoint.nbytes, cache, backend, backend.dtype)
        model, pools = backend.load(checkpoint, shape, longest), backend.cache(cache)
        forward = backend.forward(model, pools)
        network = ModelNetwork(forward, vocabulary, longest, captured=backend.captures(model))
        super().__init__(network, target, pools)
