"""Our scheme as compressed-tensors' `quantization_config`, and back.

Source: the `quantization_config` that compressed-tensors 0.17 to 0.20 read, in config.json. Only
keys that all of them have are written. Cache scales are not expressed here: no release serves
static int8 scales a head, so they lie beside the served files and `kv_cache_scheme` stays null.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from formats.errors import CheckpointError
from formats.scheme import ActivationSpec, Scheme, WeightSpec

SUPPORTED = (
    "int8 weights, symmetric, one scale a channel, with int8 symmetric activations, static per "
    "tensor or dynamic per token (format `int-quantized`)"
)
_WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
_STATIC = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor"}
_DYNAMIC = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token"}


def quantization_config(scheme: Scheme, ignore: Sequence[str]) -> dict[str, Any] | None:
    """The `quantization_config` of a scheme, or None where no weight is quantized.

    Args:
        scheme: What is quantized.
        ignore: Linear layers left alone: full names, or `re:` patterns for `re.match`.
    """
    if scheme.weights is None or scheme.activations is None:
        return None
    dynamic = scheme.activations.dynamic
    group = {
        "targets": ["Linear"],
        "format": "int-quantized",
        "weights": _WEIGHTS | {"dynamic": False},
        "input_activations": (_DYNAMIC if dynamic else _STATIC) | {"dynamic": dynamic},
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "version": "0.17.0",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "config_groups": {"group_0": group},
        "ignore": list(dict.fromkeys([*ignore, "lm_head"])),
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "transform_config": {},
    }


def read_scheme(config: Mapping[str, Any]) -> Scheme:
    """The weights' and activations' part of a scheme from a `quantization_config`.

    Raises:
        CheckpointError: another method, or a compressed-tensors scheme that is not run here.
    """
    method = config.get("quant_method")
    if method != "compressed-tensors":
        raise _unsupported(f"quant_method {method!r}")
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        count = len(groups) if isinstance(groups, Mapping) else "no"
        raise _unsupported(f"{count} config_groups")
    if config.get("kv_cache_scheme"):
        raise _unsupported(f"kv_cache_scheme {config['kv_cache_scheme']}")
    if config.get("transform_config"):
        raise _unsupported("transform_config (transforms applied while running)")
    group = next(iter(groups.values()))
    if not isinstance(group, Mapping) or group.get("targets") != ["Linear"]:
        raise _unsupported(
            f"targets {group.get('targets') if isinstance(group, Mapping) else group}"
        )
    weights, inputs = group.get("weights"), group.get("input_activations")
    if not _holds(weights, _WEIGHTS, dynamic=False) or group.get("output_activations"):
        raise _unsupported(f"weights {weights}")
    if _holds(inputs, _DYNAMIC, dynamic=True):
        return Scheme(weights=WeightSpec(), activations=ActivationSpec(granularity="per_token"))
    if _holds(inputs, _STATIC, dynamic=False):
        return Scheme(weights=WeightSpec(), activations=ActivationSpec(granularity="per_tensor"))
    raise _unsupported(f"input_activations {inputs}")


def is_ignored(module: str, ignore: Sequence[str]) -> bool:
    """Whether an `ignore` list names a module: its full name, or `re:` and a pattern."""
    for entry in ignore:
        if entry.startswith("re:"):
            if re.match(entry[3:], module):
                return True
        elif entry == module:
            return True
    return False


def _holds(spec: Any, wanted: Mapping[str, Any], *, dynamic: bool) -> bool:
    """Whether a spec says what is wanted; keys that change nothing on disk may say anything."""
    if not isinstance(spec, Mapping) or bool(spec.get("dynamic", False)) != dynamic:
        return False
    if spec.get("actorder") not in (None, "weight", "static"):
        return False
    defaults = {"num_bits": 8, "type": "int", "symmetric": True}
    return all(spec.get(key, defaults.get(key)) == value for key, value in wanted.items())


def _unsupported(found: str) -> CheckpointError:
    return CheckpointError(
        f"config.json: quantization_config has {found}, which is not run here. Supported: "
        f"{SUPPORTED}. Quantize the original model with one of the shipped recipes"
    )
