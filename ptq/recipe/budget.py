"""A budget: how much accuracy a model may lose, or how many bytes it may take.

Whether the methods of a recipe fit each other and its scheme.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from formats.scheme import LayerScheme, Scheme
from formats.strict import Strict
from ptq.methods.common.spec import MethodSpec, Stage
from ptq.methods.registry import METHODS

Target = Literal["cpu", "gpu", "vllm"]
LIMITS = ("kl", "perplexity_ratio", "bytes", "bits")
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_SIZE = re.compile(r"([\d.]+(?:e\d+)?)\s*([a-z]*)", re.IGNORECASE)


def read_bytes(value: Any) -> Any:
    """Bytes of a text such as `2.5GB` (10^9) or `2 GiB` (2^30); what is none is left as it is."""
    found = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if found is None or found[2].upper() not in UNITS:
        return value
    try:
        return round(float(found[1]) * UNITS[found[2].upper()])
    except ValueError:
        return value


class BudgetSpec(Strict):
    """What the quantized model may lose or take; the bits of each group of layers follow from it.

    YAML: ``budget: {kl: 0.01, target: cpu}``

    One of the limits is given. For a limit of accuracy the fewest bytes are looked for that keep
    it, measured on the evaluation split; for one of size the least loss. Layers that are multiplied
    as one share a scheme. The recipe's `scheme` then says what inputs and the cache are, and
    `layers` is what the budget chooses.

    Raises:
        ValueError: no limit is given, or several are.
    """

    kl: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] | None = None
    """Most mean KL divergence of the next token's distribution, in nats."""
    perplexity_ratio: Annotated[float, Field(gt=1.0, allow_inf_nan=False)] | None = None
    """Most that the quantized model's perplexity may be of the original's: 1.01 allows 1% more."""
    bytes: Annotated[int, Field(gt=0), BeforeValidator(read_bytes)] | None = None
    """Most bytes of the checkpoint's weight files, such as `2.5GB`."""
    bits: Annotated[float, Field(gt=0.0, le=16.0)] | None = None
    """Most bits of a weight of the blocks' quantized layers on average, scales included; the head
    then stays in float.
    """
    target: Target = "cpu"
    """Where the model is to run: of its schemes those are taken that run fast there. `cpu` and
    `gpu` are this engine's, `vllm` reads the same files.
    """

    head: bool = True
    """Whether the layer that gives logits may be quantized, too, and with it an embedding that is
    the same tensor; not for the target `vllm`.
    """

    @property
    def counts_head(self) -> bool:
        """Whether the head is one of the groups."""
        return self.head and self.target != "vllm"

    @model_validator(mode="after")
    def _one_limit(self) -> BudgetSpec:
        given = [key for key in LIMITS if getattr(self, key) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise ValueError(f"found {found} of {', '.join(LIMITS)}; give one of them")
        return self

    @property
    def limit(self) -> tuple[str, float]:
        """Name of the limit, and its value."""
        name = next(key for key in LIMITS if getattr(self, key) is not None)
        return name, getattr(self, name)

    @property
    def of_accuracy(self) -> bool:
        """Whether accuracy is limited, and bytes are to be few; else the other way round."""
        return self.limit[0] in ("kl", "perplexity_ratio")

    @property
    def text(self) -> str:
        """The limit as it is typed: `kl=0.01`."""
        name, value = self.limit
        return f"{name}={value:g}" if name != "bytes" else f"bytes={value:.0f}"


def method_fault(
    methods: Sequence[MethodSpec], scheme: Scheme, layers: Sequence[LayerScheme]
) -> str | None:
    """What is wrong with a recipe's list of methods, with the way out; None where it is right.

    Args:
        methods: In the order given.
        scheme: Of the recipe.
        layers: Of linear layers that have a scheme of their own.
    """
    names = ", ".join(method.name for method in methods) or "none"
    if len({method.name for method in methods}) < len(methods):
        return f"found {names}; give each method once"
    if scheme.weights is not None:
        found = _rounding_fault(methods, names, scheme)
    elif not all(method.fits_cache_alone for method in methods):
        fitting = " or ".join(name for name, spec in METHODS.items() if spec.fits_cache_alone)
        found = (
            f"found {names}, but the scheme {scheme.wac} leaves weights and activations in "
            f"floating point; remove the methods but {fitting}, or quantize weights"
        )
    else:
        found = None
    misfits = (method.misfit(scheme, (scheme, *layers)) for method in methods)
    return found or next(filter(None, misfits), None) or _order_fault(methods, names)


def _rounding_fault(methods: Sequence[MethodSpec], names: str, scheme: Scheme) -> str | None:
    """One method must hand over quantized weights; only what refines them may follow it."""
    solving = list(methods)
    while solving and solving[-1].stage == Stage.REFINE:
        solving.pop()
    if [method.stage for method in methods].count(Stage.ROUND) == 1:
        return None  # if it does not stand at the end, their order is wrong
    if not solving or solving[-1].stage != Stage.ROUND:
        rounding, refining = (
            " or ".join(name for name, spec in METHODS.items() if spec.stage == stage)
            for stage in (Stage.ROUND, Stage.REFINE)
        )
        return (
            f"found {names}; the scheme {scheme.wac} quantizes weights, and the last method must "
            f"do so: end the list with {rounding}, which {refining} may follow"
        )
    early = [method.name for method in solving[:-1] if method.stage >= Stage.ROUND]
    if not early:
        return None
    return (
        f"found {names}; {early[0]} hands over quantized weights, which {solving[-1].name} cannot "
        "solve again: keep one of them"
    )


def _order_fault(methods: Sequence[MethodSpec], names: str) -> str | None:
    right = sorted(methods, key=lambda method: method.stage)
    if right == list(methods):
        return None
    return (
        f"found {names}; each method must leave alone what those before it have made: the order "
        f"is {', '.join(method.name for method in right)}"
    )
