"""config.json as transformers reads it, with the classes that it has not made known to it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from formats.errors import CheckpointError
from formats.families.registry import BY_TYPE, OWN_CLASSES
from formats.namespace import later

if TYPE_CHECKING:
    from transformers import PretrainedConfig
with later():
    import transformers
    from huggingface_hub import errors

ACTIVATIONS, VALIDATORS = "transformers.activations", "transformers.utils.type_validators"


class _Activations(Mapping[str, Any]):
    """transformers' ACT2FN, which is imported when one looks into it."""

    def __getitem__(self, name: str) -> Any:
        return importlib.import_module(ACTIVATIONS).ACT2FN[name]

    def __iter__(self) -> Iterator[str]:
        return iter(importlib.import_module(ACTIVATIONS).ACT2FN)

    def __len__(self) -> int:
        return len(importlib.import_module(ACTIVATIONS).ACT2FN)


def defer_activations() -> None:
    """Let configurations of transformers be imported without functions of activations.

    They check values by a module that takes those to know their names, which hardly any of them
    asks for. With them it imports transformers' loaders and torch's compiler: almost half of the
    processor time that an engine takes to start. A version of transformers that takes more from
    there imports it as it is.
    """
    if {ACTIVATIONS, VALIDATORS} & sys.modules.keys():
        return
    stand_in = ModuleType(ACTIVATIONS)
    vars(stand_in)["ACT2FN"] = _Activations()
    sys.modules[ACTIVATIONS] = stand_in
    try:
        importlib.import_module(VALIDATORS)
    except ImportError:  # of another version
        pass
    finally:
        del sys.modules[ACTIVATIONS]


def transformers_config(values: Mapping[str, Any]) -> PretrainedConfig:
    """A config.json as transformers reads it.

    Raises:
        CheckpointError: transformers knows no such model, or refuses a value.
    """
    defer_activations()
    rest = plain_values(values)
    kind = str(rest.pop("model_type", None))
    make_known(kind)
    try:
        return transformers.AutoConfig.for_model(kind, **rest)
    except (ValueError, TypeError, KeyError, AttributeError, errors.StrictDataclassError) as error:
        reason = " ".join(str(error).split())[:300]
        found = "refuses it" if kind in transformers.CONFIG_MAPPING else "takes it for none"
        raise CheckpointError(
            f"config.json: transformers {found} ({reason}). Correct it, or copy that of the "
            "original model"
        ) from error


def plain_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a config.json without its code's names, infinities as numbers."""
    return {name: _plain(value) for name, value in values.items() if name != "auto_map"}


def _plain(value: Any) -> Any:
    """A value with the infinities that transformers writes as {"__float__": "Infinity"}."""
    if isinstance(value, list):
        return [_plain(part) for part in value]
    if not isinstance(value, Mapping):
        return value
    if value.keys() == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity"):
        return float(value["__float__"])
    return {name: _plain(part) for name, part in value.items()}


def make_known(model_type: str) -> None:
    """Let transformers' AutoConfig and AutoModelForCausalLM know a class that it has not."""
    file, family = OWN_CLASSES.get(model_type), BY_TYPE.get(model_type)
    if file is not None:
        importlib.import_module(file)
    elif family is not None and family.alike is not None:
        _register(model_type, family.alike)


def _register(kind: str, alike: str) -> None:
    """Register another type's classes, as their subclasses, for a type."""
    if kind in transformers.CONFIG_MAPPING:
        return
    config_class, name = transformers.CONFIG_MAPPING[alike], kind.capitalize()
    model_class: Any = transformers.AutoModelForCausalLM._model_mapping[config_class]
    own = type(f"{name}Config", (config_class,), {"model_type": kind})
    transformers.AutoConfig.register(kind, own)
    made = type(f"{name}ForCausalLM", (model_class,), {"config_class": own})
    transformers.AutoModelForCausalLM.register(own, made)
