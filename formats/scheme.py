"""Scheme: what is quantized and how, for weights, activations and cache KV ("WAC").

The vocabulary that every room shares. A scheme is frozen data: it is written in the recipe,
resolved by the plan, stored in the checkpoint and dispatched on by the runtime. Names follow the
field: a scale is a multiplier, ``w = q * scale``; `per_channel` means one scale for each output
channel of a weight `[out, in]`; `per_token` one for each row of an activation `[tokens, in]`;
`per_head` one for each key/value head.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, Self

from pydantic import SerializerFunctionWrapHandler, model_serializer, model_validator

from formats.cache_scheme import KVCacheSpec, StateSpec
from formats.documents import Strict

WeightType = Literal["int8", "int4", "fp8_e4m3", "fp4_e2m1"]
ActivationType = Literal["int8", "fp8_e4m3"]
BITS = {"int8": 8, "int4": 4, "fp8_e4m3": 8, "fp4_e2m1": 4}
ScaleType = Literal["float", "e8m0", "e4m3"]
BLOCK = 128  # rows and columns of a block, and elements of a group of activations
MX_GROUP = 32  # weights that share a power of two in MXFP4 and MXFP8
NV_GROUP = 16  # weights that share an e4m3 scale in NVFP4
SUPER_BLOCK = 256  # inputs that share units of scales and minima where weights are those of Q4_K
FINE = 16  # int8 weights of .gguf files that share a scale (Q6_K); `auto` chooses no such groups
AUTO = "auto"  # the group size that each layer's inputs settle


_GRANULARITIES = {
    "int8": ("per_channel", "group"),
    "int4": ("per_channel", "group"),
    "fp8_e4m3": ("per_tensor", "per_channel", "block", "group"),
    "fp4_e2m1": ("group",),
}
GROUP_SIZES: dict[WeightType, tuple[int, ...]] = {
    "int8": (32, 64, BLOCK),
    "int4": (32, 64, BLOCK),
    "fp8_e4m3": (MX_GROUP,),
    "fp4_e2m1": (NV_GROUP, MX_GROUP),
}


def has_groups(dtype: WeightType, size: object) -> bool:
    """Whether weights of a type have groups of so many inputs."""
    return size in GROUP_SIZES[dtype] or (dtype == "int8" and size == FINE)


def either(names: Sequence[object]) -> str:
    """`a, b or c`, for a message."""
    return " or ".join(filter(None, (", ".join(map(str, names[:-1])), str(names[-1]))))


def _sizes(dtype: WeightType) -> str:
    return either(GROUP_SIZES[dtype])


FORMATS: dict[tuple[str, int | None], str] = {  # by element type and group
    ("fp4_e2m1", 16): "nvfp4",
    ("fp4_e2m1", 32): "mxfp4",
    ("fp8_e4m3", 32): "mxfp8",
}


class WeightSpec(Strict):
    """How a linear layer's weight `[out, in]` is stored.

    YAML: ``weights: {dtype: int4, granularity: group, group_size: 128, symmetric: true,
    two_level: false}``
    """

    dtype: WeightType = "int8"
    """Type of a stored weight: `int8`; `int4`, half the bytes and the first to lose accuracy;
    `fp8_e4m3`, whose steps grow with the magnitude; GPUs multiply it from Ada on; `fp4_e2m1`, half
    its bytes: in groups of 16 (NVFP4) or 32 (MXFP4).
    """
    granularity: Literal["per_tensor", "per_channel", "group", "block"] = "per_channel"
    """Which weights share a scale: those of an output channel (`per_channel`), of `group_size`
    neighbouring inputs of it (`group`; int4's usual), of 128 x 128 weights (`block`, fp8), or all
    (`per_tensor`, fp8). Finer is more accurate and stores more scales.
    """
    group_size: Literal[16, 32, 64, 128, "auto"] | None = None
    """Inputs that share a scale where granularity is `group`, null elsewhere. A number must divide
    the inputs of every layer. `auto`, the default, is the largest size of the type that divides a
    layer's own inputs; if none does, integers and `fp8_e4m3` have one scale for each output
    channel. Integers have groups of 32, 64 or 128: 32 costs half a bit a weight, 128 an eighth. Of
    floats it tells the type of the scales, of 8 bits each: 16 is NVFP4, whose scales are e4m3 times
    one number a tensor; 32 is MXFP4 and (`fp8_e4m3`) MXFP8, whose scales are powers of two.
    """
    symmetric: bool = True
    """Whether zero is stored as zero. `false` gives each scale a zero point, for integer weights
    with float activations, and better where weights lie off centre.
    """
    zero_points: Literal["integer", "float"] = "integer"
    """What the zero points of asymmetric weights are. `float`, fp32 ones of integers in groups, is
    what .gguf files hold in blocks with a minimum; recipes make those of Q4_K (`two_level`).
    """
    two_level: bool = False
    """Whether scales of int4 groups are multiples, 1 to 16, of one unit of their output channel,
    so that a kernel can sum the products of a whole channel as integers. They are stored as others
    are, and cost about 2% of the KL divergence. With float zero points, in groups of 32, weights
    are those of Q4_K in .gguf files: scales and minima are multiples of 6 bits of two fp16 units of
    256 inputs. Layers whose inputs 256 does not divide have integer zero points then.
    """

    @model_validator(mode="before")
    @classmethod
    def _left_to_layers(cls, data: Any) -> Any:
        """A size that nobody gave is `auto` where there are groups, and null elsewhere."""
        if not isinstance(data, dict) or data.get("group_size") not in (None, AUTO):
            return data
        return data | {"group_size": AUTO if data.get("granularity") == "group" else None}

    @model_validator(mode="after")
    def _is_run_somewhere(self) -> WeightSpec:
        floating = self.dtype.startswith("fp")
        if self.group_size is not None and self.granularity != "group":
            raise ValueError(
                f"found granularity {self.granularity} with group_size {self.group_size}; only "
                "granularity: group has one: set it, or group_size: null"
            )
        if self.granularity not in _GRANULARITIES[self.dtype]:
            raise ValueError(
                f"{self.dtype} weights {self.granularity} are not supported; use "
                f"{either(_GRANULARITIES[self.dtype])}"
            )
        if self.group_size not in (None, AUTO) and not has_groups(self.dtype, self.group_size):
            raise ValueError(
                f"{self.dtype} weights in groups of {self.group_size} are not supported; set "
                f"group_size: {_sizes(self.dtype)}, or auto"
            )
        if floating and not self.symmetric:
            raise ValueError(f"{self.dtype} weights have no zero point; set symmetric: true")
        if self.float_zeros and (self.symmetric or self.granularity != "group"):
            raise ValueError(
                f"found zero_points: float for {self.text}; they are those of asymmetric weights "
                "in groups: set symmetric: false and granularity: group, or zero_points: integer"
            )
        plain = self.dtype == "int4" and self.granularity == "group" and self.symmetric
        minima = self.dtype == "int4" and self.group_size == min(GROUP_SIZES["int4"])
        if self.two_level and not plain and not (minima and self.float_zeros):
            raise ValueError(
                f"found two_level for {self.text}; scales have two levels where int4 weights are "
                "symmetric and in groups of 32, 64 or 128, or have zero_points: float and are in "
                "groups of 32: set these, or two_level: false"
            )
        return self

    @property
    def float_zeros(self) -> bool:
        """Whether zero points are floats."""
        return self.zero_points == "float"

    @property
    def marks(self) -> Iterator[str]:
        """What its part of a scheme's short name leaves open."""
        if self.super_blocks:
            yield "q4_k"
            return
        usual = (1, BLOCK if self.dtype == "int4" else -1)
        if self.block != usual and self.format_name is None:
            yield f"g{self.block[1]}" if self.group_size else self.granularity
        if not self.symmetric:
            yield "float_zeros" if self.float_zeros else "asymmetric"
        if self.two_level:
            yield "two_level"

    @property
    def super_blocks(self) -> bool:
        """Whether weights are those of Q4_K; see `two_level`."""
        return self.two_level and self.float_zeros

    @property
    def bits(self) -> int:
        """Bits of one stored weight."""
        return BITS[self.dtype]

    @property
    def opened(self) -> WeightSpec:
        """The same for layers of any size: the largest groups of its type become `auto`."""
        if self.group_size != max(GROUP_SIZES[self.dtype]):
            return self
        return self.model_copy(update={"group_size": AUTO})

    @property
    def widest(self) -> WeightSpec:
        """The inverse: `auto` becomes the largest groups of its type."""
        if self.group_size != AUTO:
            return self
        return self.model_copy(update={"group_size": max(GROUP_SIZES[self.dtype])})

    def fitted(self, inputs: int) -> WeightSpec:
        """The same for a layer of so many inputs: with the largest groups that divide them.

        Where none does, each output channel has one scale: readers of checkpoints take neither a
        last group that is shorter, nor integers in groups of less than 32. fp4 knows no scales of
        channels and has its smallest groups, which do not fit. Where super-blocks do not, groups of
        the same size have integer zero points (Q4_1, half a bit a weight more).
        """
        if self.super_blocks and inputs % SUPER_BLOCK:
            size = AUTO if inputs % self.block[1] else self.group_size
            plain = {"two_level": False, "zero_points": "integer", "group_size": size}
            return self.model_copy(update=plain).fitted(inputs)
        if self.group_size != AUTO:
            return self
        fits = [size for size in GROUP_SIZES[self.dtype] if inputs % size == 0]
        if not fits and "per_channel" in _GRANULARITIES[self.dtype]:
            return WeightSpec(dtype=self.dtype, symmetric=self.symmetric)
        size = max(fits, default=min(GROUP_SIZES[self.dtype]))
        return self.model_copy(update={"group_size": size})

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns that share a scale; -1 for all, the most where layers settle it."""
        blocks = {"per_tensor": (-1, -1), "per_channel": (1, -1), "block": (BLOCK, BLOCK)}
        size = max(GROUP_SIZES[self.dtype]) if self.group_size == AUTO else self.group_size
        return blocks.get(self.granularity, (1, size or -1))

    @property
    def scale_type(self) -> ScaleType:
        """What a scale is: any float, a power of two (e8m0), or e4m3 times one number a tensor."""
        if self.dtype.startswith("fp") and self.granularity == "group":
            return "e4m3" if self.group_size == NV_GROUP else "e8m0"
        return "float"

    @property
    def format_name(self) -> str | None:
        """The name of a small float format with scales of groups; None for other weights."""
        return FORMATS.get((self.dtype, self.block[1]))

    @property
    def text(self) -> str:
        """A few words for a person."""
        most = f" of {self.block[1]} or the largest that fits"
        size = {None: "", AUTO: most}.get(self.group_size, f" of {self.group_size}")
        kind = "" if self.symmetric else ", asymmetric"
        kind += ", float zero points" if self.float_zeros else ""
        levels = ", two-level scales" if self.two_level else ""
        return f"{self.dtype} weights {self.granularity}{size}{kind}{levels}"


class ActivationSpec(Strict):
    """How a linear layer's input `[tokens, in]` is quantized.

    YAML: ``activations: {dtype: int8, granularity: per_tensor}``
    """

    dtype: ActivationType = "int8"
    """Type that inputs are rounded to: `int8` with integer weights, `fp8_e4m3` with fp8 weights."""
    granularity: Literal["per_tensor", "per_token", "group"] = "per_tensor"
    """`per_tensor` is static: one scale, fixed at calibration, the cheapest to run. `per_token`
    scales each token by its own largest magnitude when it arrives: more accurate, no calibration
    data needed. `group` does so for every 128 elements (with fp8 weights in blocks).
    """

    @property
    def dynamic(self) -> bool:
        """Whether the scale is computed at run time."""
        return self.granularity != "per_tensor"

    @property
    def group(self) -> int:
        """Elements of a row that share a dynamic scale; -1 for all."""
        return BLOCK if self.granularity == "group" else -1

    @property
    def bits(self) -> int:
        """Bits of one quantized activation."""
        return BITS[self.dtype]

    @property
    def text(self) -> str:
        """A few words for a person."""
        return f"{'dynamic' if self.dynamic else 'static'} {self.dtype} inputs {self.granularity}"


class LayerScheme(Strict):
    """Weight and input of one linear layer; what is not named stays unquantized.

    Raises:
        ValueError: activations are quantized but weights are not: no integer kernel runs that.
    """

    weights: WeightSpec | None = None
    """How weights are stored; null leaves them in floating point."""
    activations: ActivationSpec | None = None
    """How inputs of linear layers are rounded; null leaves them in floating point. Needs weights.
    """

    @model_validator(mode="after")
    def _activations_need_weights(self) -> Self:
        if self.activations is not None and self.weights is None:
            raise ValueError(
                "activations are quantized but weights are not; no kernel multiplies integer "
                "activations with floating-point weights. Add weights or drop activations"
            )
        if self.weights is not None and (message := _mismatch(self.weights, self.activations)):
            raise ValueError(message)
        return self

    @property
    def weights_alone(self) -> LayerScheme:
        """The same for a layer whose input is not quantized.

        fp8 weights whose kind needs quantized inputs have a scale for each output channel instead.
        """
        spec = self.weights
        if spec is not None and spec.granularity in ("block", "per_tensor"):
            spec = spec.model_copy(update={"granularity": "per_channel"})
        return LayerScheme(weights=spec)

    @property
    def by_token(self) -> LayerScheme:
        """The same with inputs that are scaled when they arrive, where their scale is calibrated.

        fp8 weights have a scale for each output channel then.
        """
        spec, inputs = self.weights, self.activations
        if spec is None or inputs is None or inputs.dynamic:
            return LayerScheme(weights=spec, activations=inputs)
        if spec.granularity == "per_tensor":
            spec = spec.model_copy(update={"granularity": "per_channel"})
        inputs = inputs.model_copy(update={"granularity": "per_token"})
        return LayerScheme(weights=spec, activations=inputs)

    @property
    def opened(self) -> Self:
        """The same for layers of any size; see `WeightSpec.opened`."""
        return self.model_copy(update={"weights": self.weights and self.weights.opened})

    @property
    def widest(self) -> Self:
        """The inverse; see `WeightSpec.widest`."""
        return self.model_copy(update={"weights": self.weights and self.weights.widest})

    def fitted(self, inputs: int) -> Self:
        """The same for a layer of so many inputs; see `WeightSpec.fitted`."""
        return self.model_copy(update={"weights": self.weights and self.weights.fitted(inputs)})

    @property
    def static_input(self) -> bool:
        """Whether the input has a calibrated scale."""
        return self.activations is not None and not self.activations.dynamic

    @property
    def text(self) -> str:
        """A few words for a person."""
        return ", ".join(part.text for part in (self.weights, self.activations) if part) or "float"


class Scheme(LayerScheme):
    """Weights, activations, KV cache and states of one checkpoint; what is not named stays float.

    Raises:
        ValueError: activations are quantized but weights are not: no integer kernel runs that.
    """

    kv_cache: KVCacheSpec | None = None
    """How keys and values are cached; null leaves the cache in the model's own type."""
    states: StateSpec | None = None
    """How recurrent states are kept for prompts that begin alike; null (the default) keeps them as
    they are, and what is found has the bits of what is computed.
    """

    @model_serializer(mode="wrap")
    def _said(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """What is as it always was is not said: files without such states stay as they were."""
        said = handler(self)
        return said if said["states"] is not None else {k: said[k] for k in said if k != "states"}

    @property
    def of_layers(self) -> LayerScheme:
        """What it says of linear layers."""
        return LayerScheme(weights=self.weights, activations=self.activations)

    @property
    def wac(self) -> str:
        """Short name: the field's notation, then what bits leave open: `a8w4c8`, `a8w8_dynamic`.

        `float` for none; parts in fp8 are marked: `af8wf8`; formats with a name of their own have
        it: `nvfp4c8`; kept states follow: `w4c8s8`. Two schemes have two names.
        """
        names = [] if self.activations is None else [_bits("a", self.activations)]
        if self.weights is not None:
            names.append(self.weights.format_name or _bits("w", self.weights))
        names += [own.name for own in (self.kv_cache, self.states) if own is not None]
        return "_".join(("".join(names) or "float", *self._marks))

    @property
    def _marks(self) -> Iterator[str]:
        """What bits leave open.

        Unsaid go int4 weights in groups of 128, others per channel, static int8 inputs of int8
        weights, and what follows from these; of the cache see `KVCacheSpec.marks`.
        """
        weights, inputs = self.weights, self.activations
        if weights is not None:
            yield from weights.marks
            if weights.dtype == "int8" and inputs is not None and inputs.dynamic:
                yield "dynamic"
        if self.kv_cache is not None:
            yield from self.kv_cache.marks

    @property
    def static(self) -> bool:
        """Whether inputs or the cache have static scales, which follow from data."""
        cache = self.kv_cache is not None and not self.kv_cache.dynamic
        return self.static_input or cache

    @property
    def quantizes_anything(self) -> bool:
        """Whether any part of the model is quantized."""
        return any(own is not None for own in (self.weights, self.kv_cache, self.states))


def _bits(letter: str, spec: WeightSpec | ActivationSpec) -> str:
    """A part of a scheme's short name: `a8`, or `af8` of a float type."""
    return f"{letter}{'f' if spec.dtype.startswith('fp') else ''}{spec.bits}"


def _mismatch(weights: WeightSpec, activations: ActivationSpec | None) -> str | None:
    """Why weights and activations do not go together, or None."""
    if activations is None:
        if weights.granularity in ("block", "per_tensor"):
            return (
                f"fp8 weights {weights.granularity} need activations: "
                f"{'group' if weights.granularity == 'block' else 'per_tensor'}"
            )
        return None
    if weights.scale_type != "float":
        return f"{weights.text} are for weight-only schemes; drop activations"
    if (weights.dtype == "fp8_e4m3") != (activations.dtype == "fp8_e4m3"):
        return (
            f"{weights.dtype} weights with {activations.dtype} activations are not supported: "
            "no kernel multiplies them. Use the same kind of type for both"
        )
    if not weights.symmetric:
        return "asymmetric weights are for weight-only schemes; set symmetric: true"
    if weights.dtype == "fp8_e4m3":
        wanted = {"per_tensor": "per_tensor", "per_channel": "per_token", "block": "group"}
        needed = wanted[weights.granularity]
        if activations.granularity != needed:
            return (
                f"fp8 weights {weights.granularity} with activations {activations.granularity} "
                f"are not supported; use activations {needed}"
            )
        return None
    if activations.granularity == "group":
        return "int8 activations in groups are not supported; use per_tensor or per_token"
    if weights.dtype == "int8" and weights.granularity != "per_channel":
        return "int8 weights in groups are for weight-only schemes; use per_channel"
    if weights.dtype == "int4" and not activations.dynamic:
        return "int4 weights with static activations are not supported; use per_token"
    return None


def has_float_zeros(schemes: Iterable[LayerScheme]) -> bool:
    """Whether weights of one have zero points that are floats."""
    return any(own.weights is not None and own.weights.float_zeros for own in schemes)


_INT8, _FP8 = ActivationSpec(), ActivationSpec(dtype="fp8_e4m3")
_PER_TOKEN = ActivationSpec(granularity="per_token")
_W4 = WeightSpec(dtype="int4", granularity="group", group_size=128)
_W4_Q4_K = WeightSpec(
    dtype="int4",
    granularity="group",
    group_size=32,
    symmetric=False,
    zero_points="float",
    two_level=True,
)
_W4_TWO_LEVEL = _W4.model_copy(update={"two_level": True})
_KV, _KV_FP8 = KVCacheSpec(), KVCacheSpec(dtype="fp8_e4m3", center_keys=True)
_KV4 = KVCacheSpec(
    dtype="int4",
    granularity="per_token_head",
    rotate_keys=True,
    center_keys=True,
    compensate_keys=True,
)
_W_FP8 = WeightSpec(dtype="fp8_e4m3")
_NVFP4 = WeightSpec(dtype="fp4_e2m1", granularity="group", group_size=NV_GROUP)
_MXFP4 = WeightSpec(dtype="fp4_e2m1", granularity="group", group_size=MX_GROUP)
_MXFP8 = WeightSpec(dtype="fp8_e4m3", granularity="group", group_size=MX_GROUP)
_A_FP8_TOKEN = ActivationSpec(dtype="fp8_e4m3", granularity="per_token")
PRESETS: dict[str, Scheme] = {
    "w8": Scheme(weights=WeightSpec()),
    "w4": Scheme(weights=_W4),
    "w4_q4_k": Scheme(weights=_W4_Q4_K),
    "a8w8": Scheme(weights=WeightSpec(), activations=_INT8),
    "a8w8c8": Scheme(weights=WeightSpec(), activations=_INT8, kv_cache=_KV),
    "a8w8_dynamic": Scheme(weights=WeightSpec(), activations=_PER_TOKEN),
    "a8w8c8_dynamic": Scheme(weights=WeightSpec(), activations=_PER_TOKEN, kv_cache=_KV),
    "a8w4": Scheme(weights=_W4, activations=_PER_TOKEN),
    "a8w4c8": Scheme(weights=_W4, activations=_PER_TOKEN, kv_cache=_KV),
    "a8w4_two_level": Scheme(weights=_W4_TWO_LEVEL, activations=_PER_TOKEN),
    "a8w4c8_two_level": Scheme(weights=_W4_TWO_LEVEL, activations=_PER_TOKEN, kv_cache=_KV),
    "a8w4c4_two_level": Scheme(weights=_W4_TWO_LEVEL, activations=_PER_TOKEN, kv_cache=_KV4),
    "fp8_tensor": Scheme(
        weights=WeightSpec(dtype="fp8_e4m3", granularity="per_tensor"), activations=_FP8
    ),
    "fp8_channel": Scheme(weights=_W_FP8, activations=_A_FP8_TOKEN),
    "fp8_block": Scheme(
        weights=WeightSpec(dtype="fp8_e4m3", granularity="block"),
        activations=ActivationSpec(dtype="fp8_e4m3", granularity="group"),
    ),
    "fp8_c8": Scheme(weights=_W_FP8, activations=_A_FP8_TOKEN, kv_cache=_KV_FP8),
    "nvfp4": Scheme(weights=_NVFP4),
    "mxfp4": Scheme(weights=_MXFP4),
    "mxfp8": Scheme(weights=_MXFP8),
    "w4c8": Scheme(weights=_W4, kv_cache=_KV),
    "c8": Scheme(kv_cache=_KV),
    "c8_fp8": Scheme(kv_cache=_KV_FP8),
    "k8v4": Scheme(kv_cache=KVCacheSpec(granularity="per_token_head", value_dtype="int4")),
    "c4": Scheme(kv_cache=_KV4),
    "s8": Scheme(states=StateSpec()),
    "w8s8": Scheme(weights=WeightSpec(), states=StateSpec()),
    "w4s8": Scheme(weights=_W4, states=StateSpec()),
    "a8w8s8_dynamic": Scheme(weights=WeightSpec(), activations=_PER_TOKEN, states=StateSpec()),
}
