"""The shape of a published layout: which native model its configuration and tensors stand for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from formats.errors import CheckpointError

TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class PublishedLayout:
    """How checkpoints of a `model_type` lie that transformers knows by another name.

    Attributes:
        model_type: What their config.json says.
        native_config: Their config.json as that of the native class; CheckpointError where it
            describes a model that the native class does not compute.
        modules: Native names of what each module holds, by its published name, both with `{}` for
            the number of the block: one, or those of q, k and v, whose rows lie one below the
            other.
        buffers: Last parts of the names of tensors that follow from the configuration.
        prefixes: Beginnings of names that stand for others in the native class; None for those of
            tensors that it has not.
        unit_rows: Native names of the modules whose rows are divided by their length before they
            multiply, as config.json tells.
    """

    model_type: str
    native_config: Callable[[Mapping[str, Any]], dict[str, Any]]
    modules: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    buffers: tuple[str, ...] = ()
    prefixes: Mapping[str, str | None] = field(default_factory=dict)
    unit_rows: Callable[[Mapping[str, Any]], tuple[str, ...]] = lambda _: ()


def require_settings(config: Mapping[str, Any], allowed: Mapping[str, Iterable[Any]]) -> None:
    """Refuse a model that the native class does not compute.

    Args:
        config: The published config.json.
        allowed: Values of each key that it computes; None for an absent one.

    Raises:
        CheckpointError: another value is there; the key is named.
    """
    for key, values in allowed.items():
        if config.get(key) not in values:
            shown = " or ".join("absent" if value is None else repr(value) for value in values)
            raise CheckpointError(
                f"config.json: {key} is {config.get(key)!r} in a {config['model_type']} model; "
                f"read without the model's own code is {shown}"
            )


def kept(config: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """Those keys that config.json has, with their values."""
    return {key: config[key] for key in keys if config.get(key) is not None}
