"""What a recipe may say of each method: its name and its options.

Specifications are data without torch, so that a recipe is read and checked before anything heavy is
imported. In YAML a method is its name, or a mapping of its name to its options:

    methods:
      - smoothquant: {alpha: search, search_samples: 4}
      - rtn
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from formats.scheme import Strict

Alpha = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)]
SmoothingKind = Literal["attention_input", "attention_output", "mlp_input", "mlp_output"]
SMOOTHING_KINDS: tuple[SmoothingKind, ...] = (
    "attention_input",
    "attention_output",
    "mlp_input",
    "mlp_output",
)


class RotationSpec(Strict):
    """Rotation of the residual stream and of the values, folded into the weights.

    YAML::

        rotation:
          residual: true          # R1: the residual stream; a tied lm_head is untied by it
          values: true            # R2: the values of each head, and with them the cache V
          seed: 0

    It needs no data and comes first: all other methods see the rotated model.

    Raises:
        ValueError: nothing is to be rotated.
    """

    name: Literal["rotation"] = "rotation"
    residual: bool = True
    values: bool = True
    seed: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _rotates(self) -> RotationSpec:
        if not (self.residual or self.values):
            raise ValueError("rotates nothing; set residual or values to true, or remove it")
        return self


class ShiftSpec(Strict):
    """Shift: each channel of V is centred, and with it the cached V and the input of o_proj.

    YAML: ``shift: {}``

    Families that know `attention_bias` get biases in attention for it (llama, qwen3).
    """

    name: Literal["shift"] = "shift"


class SmoothQuantSpec(Strict):
    """SmoothQuant: outliers move from the inputs of linear layers into their weights.

    YAML::

        smoothquant:
          alpha: search           # or one number from 0 to 1 for all groups
          alphas: [0.5, 0.7, 0.85, 0.95, 1.0] # what a search tries, beside leaving the group alone
          pieces: 1               # of a group's channels, by magnitude, searched one by one
          search_samples: 4       # calibration sequences that a search measures its error on
          targets: [attention_input, attention_output, mlp_input, mlp_output]

    The targets are the layers whose input is smoothed: `attention_input` q, k and v (through the
    norm before them), `attention_output` o (through v), `mlp_input` gate and up (through the norm
    before them), `mlp_output` down (through up). Of a mixture of experts, `mlp_input` takes powers
    of two, which leave the routing as it is, and all experts of a block get one alpha.
    """

    name: Literal["smoothquant"] = "smoothquant"
    alpha: Literal["search"] | Alpha = "search"
    alphas: Annotated[tuple[Alpha, ...], Field(min_length=1)] = (0.5, 0.7, 0.85, 0.95, 1.0)
    pieces: Annotated[int, Field(ge=1, le=16)] = 1
    search_samples: Annotated[int, Field(ge=1)] = 4
    targets: Annotated[tuple[SmoothingKind, ...], Field(min_length=1)] = SMOOTHING_KINDS

    @model_validator(mode="after")
    def _pieces_are_searched(self) -> SmoothQuantSpec:
        if self.pieces > 1 and self.alpha != "search":
            raise ValueError(
                f"found pieces: {self.pieces} with alpha: {self.alpha:g}; only a search gives "
                "pieces strengths of their own: set alpha: search, or remove pieces"
            )
        return self


class AWQSpec(Strict):
    """AWQ: channels that large activations meet are scaled up before weights are rounded.

    YAML::

        awq:
          steps: 20               # exponents 0, 1/20, ... that the search tries
          search_samples: 8       # calibration sequences that it measures its error on
          targets: [attention_input, attention_output, mlp_input, mlp_output]

    The targets are those of SmoothQuant. AWQ's clipping is the scale search `output_mse` of the
    method that rounds.
    """

    name: Literal["awq"] = "awq"
    steps: Annotated[int, Field(ge=1, le=100)] = 20
    search_samples: Annotated[int, Field(ge=1)] = 8
    targets: Annotated[tuple[SmoothingKind, ...], Field(min_length=1)] = SMOOTHING_KINDS


class ClipSpec(Strict):
    """Clipping of static inputs, searched against the block's output.

    YAML::

        clip:
          factors: [0.95, 0.9, 0.8, 0.7, 0.6, 0.5]  # of the observer's range, tried beside 1
          search_samples: 4       # calibration sequences that it measures its error on
    """

    name: Literal["clip"] = "clip"
    factors: Annotated[
        tuple[Annotated[float, Field(gt=0.0, lt=1.0, allow_inf_nan=False)], ...],
        Field(min_length=1),
    ] = (0.95, 0.9, 0.8, 0.7, 0.6, 0.5)
    search_samples: Annotated[int, Field(ge=1)] = 4


class SmoothKSpec(Strict):
    """K smoothing: the channels of the cached K are evened out, at the cost of Q, which is not.

    YAML::

        smooth_k:
          alpha: search           # or one number from 0 to 1 for all blocks
          alphas: [0.5, 0.7, 0.85, 1.0] # what a search tries, beside leaving K alone
          search_samples: 4       # calibration sequences that a search measures its error on

    It needs a scheme that quantizes the cache, and works alone where nothing else is quantized.
    """

    name: Literal["smooth_k"] = "smooth_k"
    alpha: Literal["search"] | Alpha = "search"
    alphas: Annotated[tuple[Alpha, ...], Field(min_length=1)] = (0.5, 0.7, 0.85, 1.0)
    search_samples: Annotated[int, Field(ge=1)] = 4


ScaleSearch = Literal["absmax", "mse", "weighted_mse", "output_mse"]


class RTNSpec(Strict):
    """Round to nearest.

    YAML: ``rtn: {scale: absmax}``

    `scale` chooses the scales of the weights: `absmax` cuts nothing; `mse` minimizes the squared
    error of each block of weights, `weighted_mse` with the inputs' second moments as weights,
    `output_mse` the error of the block's contribution to the output.
    """

    name: Literal["rtn"] = "rtn"
    scale: ScaleSearch = "absmax"


class GPTQSpec(Strict):
    """GPTQ: rounds column by column, later columns make up for the error of earlier ones.

    YAML::

        gptq:
          scale: output_mse       # as of rtn
          act_order: true         # important columns first; leaves no trace on disk
          damp: 0.01              # share of the Hessian's mean diagonal that is added to it
          block_size: 128         # columns between two updates of the rest
          sweeps: 0               # of coordinate descent over the integers afterwards
    """

    name: Literal["gptq"] = "gptq"
    scale: ScaleSearch = "output_mse"
    act_order: bool = True
    damp: Annotated[float, Field(gt=0.0, le=1.0, allow_inf_nan=False)] = 0.01
    block_size: Annotated[int, Field(ge=1)] = 128
    sweeps: Annotated[int, Field(ge=0)] = 0


class RefineSpec(Strict):
    """Gradient descent on roundings and scales, after a method that rounds.

    YAML::

        refine:
          iterations: 100         # steps for each block
          batch: 4                # calibration sequences of a step
          learning_rate: 0.005    # in steps of the integers; falls linearly to 0
          seed: 0
    """

    name: Literal["refine"] = "refine"
    iterations: Annotated[int, Field(ge=1)] = 100
    batch: Annotated[int, Field(ge=1)] = 4
    learning_rate: Annotated[float, Field(gt=0.0, le=1.0, allow_inf_nan=False)] = 0.005
    seed: Annotated[int, Field(ge=0)] = 0


MethodSpec = Annotated[
    RotationSpec
    | ShiftSpec
    | SmoothQuantSpec
    | AWQSpec
    | SmoothKSpec
    | ClipSpec
    | RTNSpec
    | GPTQSpec
    | RefineSpec,
    Field(discriminator="name"),
]
METHODS: dict[str, type[Strict]] = {
    "rotation": RotationSpec,
    "shift": ShiftSpec,
    "smoothquant": SmoothQuantSpec,
    "awq": AWQSpec,
    "smooth_k": SmoothKSpec,
    "clip": ClipSpec,
    "rtn": RTNSpec,
    "gptq": GPTQSpec,
    "refine": RefineSpec,
}
ROUNDING = ("rtn", "gptq")  # methods that hand over quantized weights; refine may follow them
# Each leaves alone what those before it have made.
ORDER = (
    ("rotation",),
    ("shift",),
    ("smoothquant", "awq"),
    ("smooth_k",),
    ("clip",),
    ROUNDING,
    ("refine",),
)
