"""Tensors that quantizing software adds to a model, and that stand for nothing.

AutoGPTQ and neural-compressor give every layer a bias, of zeros where the model has none;
neural-compressor saves a tied head beside the embeddings that it is. Loaders refuse the former or
warn of them, and the latter takes memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from formats.errors import CheckpointError
from formats.families import names
from formats.modeling.model import meta_model
from ptq.convert.conversion import Source

HEAD, EMBEDDINGS = f"{names.HEAD}.weight", f"{names.EMBEDDING}.weight"


def surplus_tensors(source: Source, modules: Sequence[str]) -> frozenset[str]:
    """Names of the tensors to leave out when a folder is converted.

    Args:
        source: The folder.
        modules: Full names of its quantized layers.

    Raises:
        CheckpointError: there may be some, but transformers does not know the architecture.
    """
    return _made_up_biases(source, modules) | _tied_head(source)


def _made_up_biases(source: Source, modules: Sequence[str]) -> frozenset[str]:
    """Biases of nothing but zeros, of layers that have none in the model's architecture."""
    biases = sorted({f"{module}.bias" for module in modules} & set(source.names()))
    zero = [name for name in biases if not bool(source.tensor(name).any())]
    if not zero:
        return frozenset()
    try:
        own = meta_model(AutoConfig.for_model(**source.config)).state_dict()
    except (ValueError, TypeError, KeyError, StrictDataclassError) as error:
        raise CheckpointError(
            f"config.json: transformers makes no model of it ({' '.join(str(error).split())}), "
            f"which must tell whether {zero[0]} belongs there. Correct config.json"
        ) from error
    return frozenset(zero) - own.keys()


def _tied_head(source: Source) -> frozenset[str]:
    """The head, where the configuration says that it is the embeddings, and it is."""
    if not source.config.get("tie_word_embeddings") or not {HEAD, EMBEDDINGS} <= set(
        source.names()
    ):
        return frozenset()
    same = torch.equal(source.tensor(HEAD), source.tensor(EMBEDDINGS))
    return frozenset({HEAD} if same else ())
