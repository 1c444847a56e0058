"""The layers after a model's blocks that predict further tokens (multi-token prediction, MTP)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Predicting:
    """Where the first of these layers is, and what surrounds its decoder block.

    It computes of a token's hidden state h and of the embedding e of the token after it

        y = block(joined [embedded_norm(e), hidden_norm(h)])        logits = head(norm(y))

    (DeepSeek-V3, arXiv 2412.19437, section 2.2). Names are those of modules below the layer.

    Attributes:
        module: Full name of the layer; None where it is numbered on after the last block.
        block: Name of its decoder block; None where the layer has the parts of one itself.
        embedded_norm: Name of the embedding's norm.
        hidden_norm: Name of the hidden state's norm.
        joined: Name of the layer that reads both.
        norm: Name of the norm before the head.
        head: Name of its own head, which files may lack; the model's stands for it then.
        embedding: Name of its own embedding, likewise.
        hidden_first: Whether the hidden state is before the embedding in what `joined` reads.
        reads_normed: Whether the hidden state is the model's output after its last norm, and not
            that of its last block.
    """

    module: str | None = None
    block: str | None = None
    embedded_norm: str = "enorm"
    hidden_norm: str = "hnorm"
    joined: str = "eh_proj"
    norm: str = "shared_head.norm"
    head: str = "shared_head.head"
    embedding: str = "embed_tokens"
    hidden_first: bool = False
    reads_normed: bool = True

    def layer(self, blocks: int) -> str:
        """Full name of the first layer, of a model of so many blocks."""
        return self.module or f"model.layers.{blocks}"


UNDECLARED = Predicting(
    module="mtp",
    block="layers.0",
    embedded_norm="pre_fc_norm_embedding",
    hidden_norm="pre_fc_norm_hidden",
    joined="fc",
    norm="norm",
)
"""That of Qwen3-Next and Qwen3.5, which no declaration says; what stands for a hidden state there
is norm(y). Facts: the index of Qwen/Qwen3-Next-80B-A3B-Instruct's files, and what vLLM computes."""
