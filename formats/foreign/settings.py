"""Which layouts the settings of a foreign folder name, and the schemes of its weights."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from formats.errors import CheckpointError
from formats.foreign.auto_round import auto_round_rules, read_auto_round_config
from formats.foreign.awq import read_awq
from formats.foreign.bitsandbytes import read_bitsandbytes_config
from formats.foreign.fp8 import read_fp8_config
from formats.foreign.gptq import float_layout, gptq_layout, gptq_rules, read_gptq_config
from formats.foreign.layout import Layout, named
from formats.foreign.modelopt import read_modelopt_config
from formats.foreign.neural_compressor import is_neural_compressor, neural_compressor_layout
from formats.scheme import Scheme, WeightSpec

ELSEWHERE = ("auto-round", "mxfp4", "compressed-tensors")  # are read by others, or as one of these


@dataclass(frozen=True, eq=False)
class Kind:
    """What some layers are quantized to, and how they lie; each is equal to itself alone."""

    scheme: Scheme
    layout: Layout


@dataclass(frozen=True)
class Settings:
    """What the settings of a folder say of its layers.

    Attributes:
        usual: Of all layers that nothing else is said of.
        rules: Whether a layer, by its full name, is meant, and what is said then; the first counts.
    """

    usual: Kind
    rules: tuple[tuple[Callable[[str], bool], Kind], ...] = ()

    def of(self, module: str) -> Kind:
        """What is said of a layer, by its full name."""
        return next((kind for means, kind in self.rules if means(module)), self.usual)


def read_settings(settings: Mapping[str, Any], names: Collection[str]) -> Settings:
    """Schemes and layouts of a folder's settings.

    Args:
        settings: Its `quantization_config`, or what stands for it.
        names: Of all tensors of the folder.

    Raises:
        CheckpointError: another method, or settings that are not read here.
    """
    method, own = settings.get("quant_method"), dict[str, Mapping[str, Any] | None]()
    key, matches = "dynamic", re.match
    if method == "auto-round":
        key, matches, own = "extra_config", re.search, auto_round_rules(settings)
        settings = read_auto_round_config(settings)
    elif method == "gptq":
        own = gptq_rules(settings)
    kinds = {_text(settings): _read_kind(settings, names)}
    usual, rules = kinds[_text(settings)], []
    for pattern, change in own.items():
        changed = {**settings, **(change or {})}
        if _text(changed) not in kinds:
            with named(f"{key} {pattern!r}"):
                kinds[_text(changed)] = _read_kind(changed, names)
        means = re.compile(pattern)
        rules.append((lambda name, means=means: bool(matches(means, name)), kinds[_text(changed)]))
    return Settings(usual, tuple(rules))


def _text(settings: Mapping[str, Any]) -> str:
    return json.dumps(dict(settings), sort_keys=True, default=str)


def _read_kind(settings: Mapping[str, Any], names: Collection[str]) -> Kind:
    method = settings.get("quant_method")
    reader = READERS.get(str(method))
    if reader is not None:
        return Kind(*reader(settings, names))
    allowed = ", ".join(map(repr, (*READERS, *ELSEWHERE)))
    raise CheckpointError(
        f"found quant_method {method!r}; allowed: {allowed}. Quantize the original model with one "
        "of the shipped recipes"
    )


def _read_gptq(settings: Mapping[str, Any], names: Collection[str]) -> tuple[Scheme, Layout]:
    g_idx = any(name.endswith(".g_idx") for name in names)
    values = float_layout(settings, g_idx=g_idx)
    if values is not None:
        return Scheme(), values
    scheme, version = read_gptq_config(settings)
    spec = integer_weights(scheme)
    if is_neural_compressor(names):
        return scheme, neural_compressor_layout(spec, settings, names, version)
    return scheme, gptq_layout(spec, version, group_size=settings["group_size"])


READERS: dict[str, Callable[[Mapping[str, Any], Collection[str]], tuple[Scheme, Layout]]] = {
    "gptq": _read_gptq,
    "awq": lambda settings, _: read_awq(settings),
    "fp8": read_fp8_config,
    "modelopt": lambda settings, _: read_modelopt_config(settings),
    "bitsandbytes": lambda settings, _: read_bitsandbytes_config(settings),
}
"""What reads settings and names of tensors, by `quant_method`."""


def integer_weights(scheme: Scheme) -> WeightSpec:
    """What a scheme says of weights, which are quantized."""
    assert scheme.weights is not None
    return scheme.weights
