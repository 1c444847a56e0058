"""The shape of a declaration: what a family's decoder is made of, and how its tensors are named.

A decoder is an embedding, blocks, a norm and a head; a block is attention and a feed-forward layer,
each a sub-layer that adds to the residual stream x:

    x = x + after(attention(before(x)))        x = x + after(feed_forward(before(x)))

where `before` and `after` are RMSNorms that a family has or has not. Everything that differs
between families is a field here; whoever calibrates, quantizes, stores or runs a model reads these
fields and asks for no family by name. Reading a declaration imports neither torch nor transformers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from formats.families.attention import Attention, LatentAttention
from formats.families.feed_forward import GatedMLP, Mixture


@dataclass(frozen=True)
class Norms:
    """The RMSNorms of a block, by where they stand; None where there is none.

    Attributes:
        before_attention: Name of the norm of what attention reads.
        after_attention: Name of the norm of what attention adds.
        before_feed_forward: Name of the norm of what the feed-forward layer reads.
        after_feed_forward: Name of the norm of what it adds.
        offset: What is added to the stored weight: 1 where a norm multiplies by 1 + w (Gemma).
            Holds for all RMSNorms of the model, those of q and k and the last one too.
        eps_setting: Key of config.json of what is added to the mean square.
    """

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_feed_forward: str | None = "post_attention_layernorm"
    after_feed_forward: str | None = None
    offset: float = 0.0
    eps_setting: str = "rms_norm_eps"

    @property
    def before(self) -> tuple[str, ...]:
        """Names of those whose weight can move into the layers that read them."""
        return tuple(n for n in (self.before_attention, self.before_feed_forward) if n)

    @property
    def after(self) -> tuple[str, ...]:
        """Names of those that stand between a layer and the residual stream it adds to."""
        return tuple(n for n in (self.after_attention, self.after_feed_forward) if n)


@dataclass(frozen=True)
class Multipliers:
    """Factors and bounds outside of attention, each by its key in config.json; None for none.

    Attributes:
        embedding: Factor of the embedding's rows; "sqrt_hidden_size" is no key but that value.
        residual: Factor of what attention and the feed-forward layer add. Only for families whose
            RMSNorms all read the residual stream.
        logits: What the logits are divided by.
        logits_softcap: Bound c of the logits, c tanh(x / c).
    """

    embedding: str | None = None
    residual: str | None = None
    logits: str | None = None
    logits_softcap: str | None = None


@dataclass(frozen=True)
class Family:
    """One family of decoders.

    Attributes:
        model_types: Values of config.json's `model_type` that it has.
        attention: Its attention.
        feed_forward: Its dense feed-forward layer, below the module `mlp` of a block.
        mixture: Its mixture of experts; None for dense families.
        norms: Where its norms stand.
        rope_types: Kinds of scaling of the rotary embedding that are run, as transformers' configs
            name them.
        partial_rotary: Which part of each head turns, the first, where config.json leaves it out;
            None where heads turn as a whole.
        multipliers: Factors and bounds outside of attention.
        predicting: Key of config.json of how many layers stand after the blocks that predict
            further tokens; they are read where they draft. None where files have none.
        paddle: Its name in PaddleNLP's tables of scales; None where these are not known.
    """

    model_types: tuple[str, ...]
    attention: Attention | LatentAttention = field(default_factory=Attention)
    feed_forward: GatedMLP = field(default_factory=GatedMLP)
    mixture: Mixture | None = None
    norms: Norms = Norms()
    rope_types: tuple[str, ...] = ("default", "linear", "llama3", "yarn")
    partial_rotary: float | None = None
    multipliers: Multipliers = Multipliers()
    predicting: str | None = None
    paddle: str | None = None

    @property
    def feed_forwards(self) -> tuple[GatedMLP, ...]:
        """The kinds of feed-forward layers that its blocks can have."""
        return (self.feed_forward, *((self.mixture.expert,) if self.mixture else ()))

    @property
    def writers(self) -> tuple[str, ...]:
        """Names of the layers whose outputs are added to the residual stream."""
        return (self.attention.o, *(layer.down for layer in self.feed_forwards))

    @property
    def readers(self) -> dict[str, str | None]:
        """Layers that read the residual stream: the norm between the two, None where none is."""
        inner = [name for layer in self.feed_forwards for name in layer.gate_up]
        inner += self.mixture.routers if self.mixture else ()
        first, second = self.norms.before_attention, self.norms.before_feed_forward
        return dict.fromkeys(self.attention.inputs, first) | dict.fromkeys(inner, second)

    @property
    def merged(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Layers that runtimes multiply as one outside of experts: its name, those of its parts."""
        return (
            self.attention.merges[0],  # other runtimes know no other of latent attention
            (self.feed_forward.merged, self.feed_forward.gate_up),
        )

    @property
    def stored_merged(self) -> tuple[str, ...]:
        """Names of the layers that checkpoints hold in the place of their parts."""
        layers = (self.attention, self.feed_forward)
        parts = (layer for layer in layers if not isinstance(layer, LatentAttention))
        return tuple(layer.merged for layer in parts if layer.stored_merged)

    @property
    def weight_only(self) -> tuple[str, ...]:
        """Names of the layers whose weight may be quantized and whose input is not."""
        return (self.attention.kv_b,) if isinstance(self.attention, LatentAttention) else ()
