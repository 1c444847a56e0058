"""The methods there are, every file of this folder with a specification, and whether some fit.

Nothing here names one; a method is added by its file.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence
from functools import reduce
from importlib import import_module
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from formats.scheme import LayerScheme, Scheme
from ptq.methods.common.float_model import FloatModel, FloatModelView, seen_as_floats
from ptq.methods.common.method import Method
from ptq.methods.common.spec import MethodSpec, Stage


def _collect() -> dict[str, type[MethodSpec]]:
    """Specifications by name, in the order in which a recipe may list them."""
    folder, package = Path(__file__).parent, __package__
    for module in pkgutil.iter_modules([str(folder)]):
        import_module(f"{package}.{module.name}")
    specs = {spec.model_fields["name"].default: spec for spec in MethodSpec.__subclasses__()}
    return dict(sorted(specs.items(), key=lambda item: (item[1].stage, item[0])))


METHODS = _collect()

if TYPE_CHECKING:
    AnyMethod = MethodSpec
else:
    AnyMethod = Annotated[reduce(or_, METHODS.values()), Field(discriminator="name")]


def view_of(model: FloatModel, specs: Sequence[MethodSpec]) -> FloatModel:
    """The float model that blocks are read from: as the methods of a recipe have it seen.

    Raises:
        RecipeError: a method does not know this model.
    """
    if not isinstance(model, FloatModelView):
        model = seen_as_floats(model)
    for spec in specs:
        model = spec.view(model)
    return model


def block_methods(specs: Sequence[MethodSpec]) -> list[tuple[MethodSpec, Method]]:
    """The methods of a recipe that work on blocks, in its order."""
    built = [(spec, spec.algorithm()) for spec in specs]
    return [(spec, method) for spec, method in built if method is not None]


def method_fault(
    methods: Sequence[MethodSpec], scheme: Scheme, layers: Sequence[LayerScheme]
) -> str | None:
    """What is wrong with a recipe's list of methods, with the way out; None where it is right.

    Args:
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
    found = found or _super_block_fault(methods, (scheme, *layers))
    misfits = (method.misfit(scheme, (scheme, *layers)) for method in methods)
    return found or next(filter(None, misfits), None) or _order_fault(methods, names)


def _super_block_fault(methods: Sequence[MethodSpec], layers: Sequence[LayerScheme]) -> str | None:
    """Methods that make other scales and minima than those of Q4_K, where these are wanted."""
    wanted = any(layer.weights is not None and layer.weights.super_blocks for layer in layers)
    wrong = [m.name for m in methods if m.stage >= Stage.ROUND and not m.makes_super_blocks]
    if not wanted or not wrong:
        return None
    able = " or ".join(name for name, spec in METHODS.items() if spec.makes_super_blocks)
    return (
        f"found {wrong[0]}; scales and minima of Q4_K, of two levels, are made by {able} alone: "
        "use one of these, or a scheme with integer zero points or none"
    )


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
