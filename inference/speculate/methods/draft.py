"""Drafts of a smaller model of the same vocabulary, which runs beside the one it drafts for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from formats.errors import EngineError
from formats.namespace import later
from inference.proposers import DraftMethod

if TYPE_CHECKING:
    from torch import Tensor

    from inference.models.model import Computed
    from inference.speculate.chain import ChainProposer, KeptStates, Target
    from kernels.op_inputs import KVPool
with later():
    from formats import tokenizer as tokenizers
    from formats.checkpoint import read
    from inference.models import kv_cache
    from inference.models import model as models
    from inference.speculate import chain
    from inference.transformers_code import model as shapes


class ModelNetwork:
    """A whole model as what drafts; see `inference.models.model.Network`.

    Args:
        forward: Runs it on its cache.
        vocabulary: Ids below are known to it and to the model that it drafts for.
        longest: Most tokens of a sequence in its cache.
        captured: Whether a GPU may capture its steps.
        states: Its recurrent states; None where it keeps none.
    """

    shift = size = 0

    def __init__(
        self,
        forward: Callable[[Any], Tensor],
        vocabulary: int,
        longest: int,
        *,
        captured: bool,
        states: KeptStates | None,
    ) -> None:
        self._forward, self._vocabulary = forward, vocabulary
        self.longest, self.captured = longest, captured
        self.pieces: Callable[..., Sequence[Any]] | None = states and states.pieces

    def step(self, batch: Any, pools: Sequence[KVPool], hidden: Tensor | None) -> Computed:
        """`Network.step`, on the cache that `forward` runs on."""
        own = replace(batch, ids=batch.ids.clamp(max=self._vocabulary - 1))  # others pad the target
        return models.Computed(self._forward(own)[:, : self._vocabulary], None)


def draft_proposer(name: str | None, target: Target) -> ChainProposer:
    """A proposer that runs a model.

    Args:
        name: Its folder, or `organization/model` on the Hugging Face hub.
        target: The model that it drafts for.

    Raises:
        CheckpointError: it is damaged, or of a kind that is not run here.
        EngineError: it has another vocabulary, or memory is too small for it.
    """
    assert name is not None
    checkpoint, sizes = read.Checkpoint.open(name), target.sizes
    backend = chain.network_backend(target)
    shapes.check_config(checkpoint)
    shape = shapes.read_shape(checkpoint, backend, transformers_code=sizes.transformers_code)
    vocabulary = require_same_vocabulary(
        name,
        tokenizers.load_tokenizer(checkpoint.path),
        shape.vocab_size,
        target.tokenizer,
        target.vocabulary,
    )
    assert sizes.max_model_len is not None
    longest = min(sizes.max_model_len, shape.max_positions)
    cache = kv_cache.CacheShape.of_model(checkpoint, shape, sizes, backend, quantized=True)
    what = f"the draft model {name}"
    chain.require_memory(what, checkpoint.nbytes, cache, backend, backend.dtype)
    model = backend.load(checkpoint, shape, longest)
    states = None
    if isinstance(model, shapes.CodeModel) and (each := model.state_bytes()):
        rows = chain.state_rows(sizes)
        chain.require_memory(
            f"{what}, beside its weights,", rows.rows * each, cache, backend, backend.dtype
        )
        states = chain.KeptStates(model, rows, sizes, longest)
    pools = backend.cache(cache)
    forward, captured = backend.forward(model, pools), backend.captures(model)
    own = ModelNetwork(forward, vocabulary, longest, captured=captured, states=states)
    return chain.ChainProposer(own, target, pools, held=states)


def require_same_vocabulary(
    name: str, draft: Any, draft_size: int, target: Any, target_size: int
) -> int:
    """Refuse a draft model of another vocabulary.

    Ids above those of the tokenizer's tokens pad the embeddings of models; they may be as many or
    as few as they like.

    Args:
        name: The draft model.
        draft_size: Its logits.
        target: The tokenizer of the model that it is to draft for.
        target_size: The model's logits.

    Returns:
        Ids below are known to both.

    Raises:
        EngineError: a token of one is not one of the other, or the smaller model lacks it.
    """
    own, other = draft.get_vocab(), target.get_vocab()
    shared, both = min(draft_size, target_size), f"{draft_size} and {target_size} logits"
    remedy = "Take a draft model of the same family, or one that was distilled from the model"
    differing = own.items() ^ other.items()
    if differing:
        token = min(number for _, number in differing)
        texts = (_text(vocabulary, token) for vocabulary in (own, other))
        raise EngineError(
            f"speculate: the draft model {name} has another vocabulary than the model ({both}): "
            "token {} is {} to it and {} to the model. {}".format(token, *texts, remedy)
        )
    if draft_size != target_size and max(own.values()) >= shared:
        raise EngineError(
            f"speculate: the draft model {name} has another vocabulary than the model: {both}, and "
            f"their tokenizer has tokens up to {max(own.values())}. {remedy}"
        )
    return shared


def _text(vocabulary: dict[str, int], token: int) -> str:
    """The token of an id, quoted; "none"."""
    return next((repr(text) for text, number in vocabulary.items() if number == token), "none")


METHOD = DraftMethod("draft", draft_proposer, needs="the folder of a model", network=True)
