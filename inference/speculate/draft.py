"""Drafts of a smaller model of the same vocabulary, which runs beside the one it drafts for."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from formats.checkpoint.read import Checkpoint
from formats.tokenizer import load_tokenizer
from inference.cpu.backend import CpuBackend
from inference.cpu.batch import plan_step
from inference.models.kv_cache import CacheShape
from inference.scheduling.work import Work
from inference.speculate.chain import ChainProposer, Computed, Target, require_memory
from inference.speculate.vocabulary import require_same_vocabulary
from inference.transformers_code.choose import check_config, load_model, read_shape


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
        checkpoint, sizes, backend = Checkpoint.open(name), target.sizes, target.backend
        assert isinstance(backend, CpuBackend), "no other runs drafters"
        check_config(checkpoint)
        shape = read_shape(checkpoint, backend, transformers_code=sizes.transformers_code)
        self._vocabulary = require_same_vocabulary(
            name,
            load_tokenizer(checkpoint.path),
            shape.vocab_size,
            target.tokenizer,
            target.vocabulary,
        )
        assert sizes.max_model_len is not None
        longest = min(sizes.max_model_len, shape.max_positions)
        cache = CacheShape.of_model(checkpoint, shape, sizes, quantized=True)
        cache = cache.fitted(backend.head_sizes)
        require_memory(f"the draft model {name}", checkpoint.nbytes, cache, backend, backend.dtype)
        model = load_model(checkpoint, shape, backend, longest)
        super().__init__(sizes, longest, backend.cache(cache))
        self._forward = backend.forward(model, self._pools)

    def _run(self, work: Work, hidden: Tensor | None) -> Computed:
        step = plan_step(work)
        step = replace(step, ids=step.ids.clamp(max=self._vocabulary - 1))  # others pad the target
        logits = self._forward(step)[:, : self._vocabulary]
        return Computed(logits, logits[:, :0])
