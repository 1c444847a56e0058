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
from typing import ClassVar, Literal

from formats.families.predicting import Predicting

QKNorm = Literal["none", "head", "projection"]
Role = Literal["q", "k", "v", "o", "gate", "up", "down", "q_a", "q_b", "kv_a", "kv_b"]


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention with rotary embedding, below the module `module` of a block.

    Attributes:
        module: Name of the module in its block.
        q: Name of the query projection.
        k: Name of the key projection.
        v: Name of the value projection.
        o: Name of the output projection.
        merged: Name of q, k and v as one layer, for runtimes that multiply them at once.
        stored_merged: Whether checkpoints hold that one layer in place of the three.
        qk_norm: Whether RMSNorms stand between q and k and their rotation, each over one head
            (Qwen3) or over the whole projection (OLMo-2).
        qk_norm_setting: Key of config.json that says whether they are there; None where always.
        q_norm: Name of the queries' norm.
        k_norm: Name of the keys' norm.
        bias_setting: Key of config.json that gives q, k, v and o a bias each; None where a family
            has no such setting for all four.
        rotary_pairs: Which channels of a head turn together, as its rows are stored: i and
            i + R / 2 of the R that turn ("halves"), or 2 i and 2 i + 1 ("interleaved").
        unrotated_setting: Key of config.json with a number for each layer, 0 where q and k are not
            rotated (SmolLM3); None where all layers rotate.
        scale: How the factor of q k^T is given: by the size of a head ("head_size", D ** -0.5), or
            by a key of config.json: as the factor itself (("attention_multiplier", 1.0)), or to a
            power (("query_pre_attn_scalar", -0.5)).
        softcap_setting: Key of config.json of the bound c of attention's logits, c tanh(x / c).
        sinks: Name of the tensor with a logit for each query head that takes part in its softmax
            and has no value (gpt-oss); None without one.
        growth_setting: Key of `rope_parameters` of b where q at position p is multiplied by
            1 + b log(1 + floor(p / L)), L the positions that a model was first trained on
            (Llama 4, Ministral 3); None where q does not grow.
    """

    module: str = "self_attn"
    q: str = "q_proj"
    k: str = "k_proj"
    v: str = "v_proj"
    o: str = "o_proj"
    merged: str = "qkv_proj"
    stored_merged: bool = False
    qk_norm: QKNorm = "none"
    qk_norm_setting: str | None = None
    q_norm: str = "q_norm"
    k_norm: str = "k_norm"
    bias_setting: str | None = None
    rotary_pairs: Literal["halves", "interleaved"] = "halves"
    unrotated_setting: str | None = None
    scale: Literal["head_size"] | tuple[str, float] = "head_size"
    softcap_setting: str | None = None
    sinks: str | None = None
    growth_setting: str | None = None

    @property
    def qkv(self) -> tuple[str, str, str]:
        """Names of the projections that read the attention's input, in the order they merge."""
        return self.q, self.k, self.v

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the layers that read the attention's input."""
        return self.qkv

    @property
    def merges(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Layers that runtimes multiply as one: its name, those of its parts."""
        return ((self.merged, self.qkv),)

    @property
    def roles(self) -> dict[str, Role]:
        """What each of its linear layers is."""
        return {self.q: "q", self.k: "k", self.v: "v", self.o: "o"}


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

        c = norm(x W_a)        k_h = [c W_h^UK, rotated(x W^KR)]        v_h = c W_h^UV

    One latent c of a token and one rotated key part stand for K and V of all heads, and are all
    that is cached. q is one projection of x, or two with a norm between them where config.json
    gives `q_lora_rank`; a head of q has channels that meet c W^UK, then those that are rotated.

    Attributes:
        module: Name of the module in its block.
        q: Name of the query projection, where it is one.
        q_a: Name of the first of two query projections.
        q_norm: Name of the norm between them.
        q_b: Name of the second, with the rows of each head.
        kv_a: Name of the projection to the latent, and after it to the key part that is rotated.
        kv_norm: Name of the latent's norm.
        kv_b: Name of the projection from the latent: of each head the rows of W^UK, then of W^UV.
            Runtimes multiply queries by the one and results by the other, so that its input, which
            is in the cache, is none of a linear layer: its weight alone is quantized.
        o: Name of the output projection.
        bias_setting: Key of config.json that gives q_a, kv_a and o a bias each.
        rotary_pairs: Which channels turn together, as in `Attention`.
        interleaved_setting: Key of config.json that says whether they are interleaved; None where
            `rotary_pairs` always holds.
        watched_pairs: Which channels of rotated keys are a pair in transformers' own code, which
            calibration watches.
        norm_eps: What both norms add to the mean square, whatever config.json says of others.
    """

    module: str = "self_attn"
    q: str = "q_proj"
    q_a: str = "q_a_proj"
    q_norm: str = "q_a_layernorm"
    q_b: str = "q_b_proj"
    kv_a: str = "kv_a_proj_with_mqa"
    kv_norm: str = "kv_a_layernorm"
    kv_b: str = "kv_b_proj"
    o: str = "o_proj"
    bias_setting: str | None = "attention_bias"
    rotary_pairs: Literal["halves", "interleaved"] = "interleaved"
    interleaved_setting: str | None = None
    watched_pairs: Literal["halves", "interleaved"] = "halves"
    norm_eps: float = 1e-6
    # what other families have in `Attention`, and no family that caches a latent
    qk_norm: ClassVar[QKNorm] = "none"
    qk_norm_setting: ClassVar[None] = None
    unrotated_setting: ClassVar[None] = None
    growth_setting: ClassVar[None] = None
    scale: ClassVar[Literal["head_size"]] = "head_size"
    softcap_setting: ClassVar[None] = None
    sinks: ClassVar[None] = None

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the layers that read the attention's input; a model has q or q_a."""
        return self.q, self.q_a, self.kv_a

    @property
    def merges(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Layers that runtimes multiply as one: its name, those of its parts."""
        return (("fused_qkv_a_proj", (self.q_a, self.kv_a)), ("q_kv_a_proj", (self.q, self.kv_a)))

    @property
    def roles(self) -> dict[str, Role]:
        """What each of its linear layers is."""
        last: dict[str, Role] = {self.q_b: "q_b", self.kv_a: "kv_a", self.kv_b: "kv_b", self.o: "o"}
        return {self.q: "q", self.q_a: "q_a", **last}


@dataclass(frozen=True)
class GatedMLP:
    """down(act(gate(x)) * up(x)) (Shazeer 2020, arXiv 2002.05202, Eq. 6): SwiGLU, GEGLU.

    Attributes:
        gate: Name of the gate projection.
        up: Name of the up projection.
        down: Name of the down projection.
        merged: Name of gate and up as one layer, for runtimes that multiply them at once.
        stored_merged: Whether checkpoints hold that one layer in place of the two.
        activation_setting: Key of config.json that names the activation.
    """

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    merged: str = "gate_up_proj"
    stored_merged: bool = False
    activation_setting: str = "hidden_act"

    @property
    def gate_up(self) -> tuple[str, str]:
        """Names of the projections that read its input, in the order they merge."""
        return self.gate, self.up


@dataclass(frozen=True)
class ExpertGroups:
    """Experts in groups of neighbours: only those of a token's best groups can be chosen.

    Attributes:
        best: How many of a group's best scores are added up to its own.
        count: Key of config.json that says how many groups there are.
        chosen: Key of config.json that says of how many a token's experts are.
        only_if: Key of config.json and the value of it with which there are groups; None where
            there always are.
    """

    best: int
    count: str = "n_group"
    chosen: str = "topk_group"
    only_if: tuple[str, str] | None = None


@dataclass(frozen=True)
class Mixture:
    """A mixture of experts in the place of the feed-forward layer, in some or all blocks.

    Attributes:
        module: Name of the module that holds router and experts, as checkpoints name it.
        expert: Names of an expert's layers.
        count: Key of config.json that says how many experts a block has.
        router: Name of the layer that gives each expert a logit.
        normalized: Whether the chosen experts' scores are divided by their sum: always or never,
            or as this key of config.json says.
        shared: Name of the expert that sees every token, if there is one; named as a dense layer.
        shared_gate: Name of the layer that gives its logit; None where it counts fully.
        scores: What makes an expert's score of its logit: softmax over all, or its sigmoid.
        correction: Name of the router's tensor with a bias for each expert, which is added to its
            score where experts and groups are chosen and not where they are weighed (auxiliary-
            loss-free balancing, Wang et al. 2024, arXiv 2408.15664); None without one.
        groups: How experts are grouped; None where all can be chosen together.
        factor: Key of config.json of what the chosen experts' weights are multiplied by.
        alternating: Whether experts lie in 3-D parameters [E, inputs, outputs] with a bias each, in
            which outputs of gate and up alternate (gpt-oss), not one by one or gate above up.
        clamped: Keys of config.json, with their defaults, of the slope a and the bound c of
            min(g, c) sigmoid(a min(g, c)) (clip(u, -c, c) + 1), of an expert's gate g and up u
            (gpt-oss); None where experts multiply as dense layers do.
    """

    module: str
    expert: GatedMLP
    count: str
    normalized: bool | str
    router: str = "gate"
    shared: str | None = None
    shared_gate: str | None = None
    scores: Literal["softmax", "sigmoid"] = "softmax"
    correction: str | None = None
    groups: ExpertGroups | None = None
    factor: str | None = None
    alternating: bool = False
    clamped: tuple[tuple[str, float], tuple[str, float]] | None = None

    @property
    def routers(self) -> tuple[str, ...]:
        """Names of the layers that say how much an expert counts."""
        return (self.router, *((self.shared_gate,) if self.shared_gate else ()))


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
        feed_forward: Its dense feed-forward layer, below the module `mlp` of a block.
        mixture: Its mixture of experts; None for dense families.
        norms: Where its norms stand.
        rope_types: Kinds of scaling of the rotary embedding that are run, as transformers' configs
            name them.
        partial_rotary: Which part of each head turns, the first, where config.json leaves it out;
            None where heads turn as a whole.
        multipliers: Factors and bounds outside of attention.
        predicting: The layers after the blocks that predict further tokens; None where files have
            none. They stay in float, and run where they draft.
        alike: The model_type whose class in transformers computes it, where it has none of its own.
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
    predicting: Predicting | None = None
    alike: str | None = None
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
