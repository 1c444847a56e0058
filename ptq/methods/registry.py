"""The methods there are: every file of this folder that holds a specification.

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

from ptq.methods.common.float_model import FloatModel, FloatModelView
from ptq.methods.common.method import Method
from ptq.methods.common.spec import MethodSpec
from ptq.methods.common.stored_layers import seen_as_floats


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
