"""Attention as families declare it: grouped-query, or over latents; names and what differs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

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
