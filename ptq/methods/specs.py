"""What a recipe may say of each method: its name and its options.

Specifications are data without torch, so that a recipe is read and checked before anything heavy is
imported. In YAML a method is its name, or a mapping of its name to its options:

    methods:
      - smoothquant: {alpha: search, search_samples: 4}
      - rtn
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from formats.scheme import Strict

Alpha = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)]
SmoothingKind = Literal["attention_input", "attention_output", "mlp_input", "mlp_output"]
SMOOTHING_KINDS: tuple[SmoothingKind, ...] = (
    "attention_input",
    "attention_output",
    "mlp_input",
    "mlp_output",
)


class SmoothQuantSpec(Strict):
    """SmoothQuant: outliers move from the inputs of linear layers into their weights.

    YAML::

        smoothquant:
          alpha: search           # or one number from 0 to 1 for all groups
          alphas: [0.5, 0.7, 0.85, 0.95, 1.0] # what a search tries, beside leaving the group alone
          search_samples: 4       # calibration sequences that a search measures its error on
          targets: [attention_input, attention_output, mlp_input, mlp_output]

    The targets are the layers whose input is smoothed: `attention_input` q, k and v (through the
    norm before them), `attention_output` o (through v), `mlp_input` gate and up (through the norm
    before them), `mlp_output` down (through up).
    """

    name: Literal["smoothquant"] = "smoothquant"
    alpha: Literal["search"] | Alpha = "search"
    alphas: Annotated[tuple[Alpha, ...], Field(min_length=1)] = (0.5, 0.7, 0.85, 0.95, 1.0)
    search_samples: Annotated[int, Field(ge=1)] = 4
    targets: Annotated[tuple[SmoothingKind, ...], Field(min_length=1)] = SMOOTHING_KINDS


class RTNSpec(Strict):
    """Round to nearest: needs no options.

    YAML: ``rtn``
    """

    name: Literal["rtn"] = "rtn"


MethodSpec = Annotated[SmoothQuantSpec | RTNSpec, Field(discriminator="name")]
METHODS: dict[str, type[SmoothQuantSpec] | type[RTNSpec]] = {
    "smoothquant": SmoothQuantSpec,
    "rtn": RTNSpec,
}
