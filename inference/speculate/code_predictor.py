"""A layer that predicts further tokens, by transformers' code of the blocks of its model.

Qwen3-Next and Qwen3.5 have one whose block is one of theirs with full attention:

    x_t = fc [pre_fc_norm_embedding(e_{t+1}), pre_fc_norm_hidden(h_t)]    h: what the head reads
    y_t = norm(block(x_t))
    logits of token t + 2 = head(y_t)

and y_t is the h_{t+1} of what the model has not computed. So the layer is a model of one block that
is given x in the place of its embedding, and whose last norm is the layer's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError
from formats.families.predicting import Predicting
from inference.models.model import KVHeads
from inference.speculate.chain import NetworkBackend
from inference.transformers_code.attention import running
from inference.transformers_code.linear import RoutedExperts
from inference.transformers_code.load import load_predicting
from inference.transformers_code.model import CodeModel, CodeShape
from kernels.op_inputs import KVPool

FULL = "full_attention"  # what configurations call it


class CodePredictor:
    """A loaded layer; see `inference.speculate.head.Head`.

    Args:
        config: config.json of the model whose blocks it follows.
        target: That model, loaded.
        backend: Where that runs.
        longest: Most positions.

    Attributes:
        config: Of a model of one such block, as is `shape`.
        taps: The output of the model's last block.
        captured: Whether a GPU may capture its steps: experts ask the host for their tokens.

    Raises:
        CheckpointError: a tensor is missing or of another shape.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: Mapping[str, Any],
        names: Predicting,
        target: CodeModel,
        backend: NetworkBackend,
        longest: int,
    ) -> None:
        self.config = self.shape = one_block(target.config)
        self.dtype, self.taps = target.dtype, (len(target.layers),)
        self._sinks, self._backend = target.sink_tokens, backend
        values = {**config, "num_hidden_layers": 1, "layer_types": [FULL]}
        self._model: Any = load_predicting(
            checkpoint, values, self.config.structure, names, target.module, backend, longest
        )
        self.captured = not any(isinstance(part, RoutedExperts) for part in self._model.modules())
        around = self._model.get_submodule(names.module)
        self._joined = around.get_submodule(names.joined)
        self._embedded_norm = around.get_submodule(names.embedded_norm)
        self._hidden_norm = around.get_submodule(names.hidden_norm)

    def features(self, hidden: Tensor) -> Tensor:
        """[T, 1, H] to [T, H]: what the model's head reads."""
        return hidden[:, 0]

    @torch.no_grad()
    def run(self, batch: Any, features: Tensor, pool: KVPool) -> Tensor:
        """y [T, H]; K and V of the tokens go into the cache."""
        step = self._backend.code_step(self, [pool], batch)
        with running(step, len(self.config.places), self._sinks):
            embedded = self._embedded_norm(self._model.get_input_embeddings()(step.ids[None]))
            hidden = self._hidden_norm(features[None].to(self.dtype))
            x = self._joined(torch.cat([embedded, hidden], dim=-1))
            out = self._model.base_model(
                inputs_embeds=x, use_cache=False, position_ids=step.positions[None]
            )
        return out.last_hidden_state[0]

    def logits(self, y: Tensor) -> Tensor:
        """fp32 [T, vocabulary] of [T, H]."""
        return self._model.get_output_embeddings().layer(y).float()


def one_block(shape: CodeShape) -> CodeShape:
    """The shape of a model whose only block is as the last one with full attention of another.

    Raises:
        CheckpointError: the other has none.
    """
    for block in reversed(shape.structure.blocks):
        site = block.cache
        if site is not None and site.window is None and not block.mixers:
            cached = KVHeads(site.kv_heads, site.key_size, site.value_size)
            structure = replace(shape.structure, blocks=(block,))
            return replace(
                shape, structure=structure, windows=(None,), places=(0,), cached=(cached,)
            )
    raise CheckpointError(
        "config.json: no block of the model has full attention and no state beside it, as the "
        "layer that predicts further tokens does"
    )
