"""GPTQ's `quantization_config`: written for a specification, and read.

Source: AutoGPTQ 0.7 and GPTQModel 7.6 `quantization/config.py`; formats/foreign/gptq.py has the
tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from formats.errors import CheckpointError
from formats.families.names import MERGED
from formats.foreign.gptq import AGAIN, Version, gptq_values
from formats.foreign.layout import (
    RUN_SIZES,
    Layout,
    group_spec,
    read_size,
    require_key,
    require_table,
    runs,
)
from formats.scheme import Scheme, WeightSpec

RUN_BITS = (4, 8)
READ_BITS = (2, 3, 4, 8)
HELD = (
    "Supported of quant_method 'gptq' are 4 and 8 bits, per channel or in groups of 32, 64 or "
    f"128. {AGAIN}"
)
# vLLM and SGLang merge these layers, and look the merged name up.
MERGED_INTO = {part: merged for merged, parts in MERGED.items() for part in parts}


def gptq_config(
    spec: WeightSpec,
    *,
    version: Version,
    quantizer: str,
    unquantized: Sequence[str] = (),
    head: bool = False,
) -> dict[str, Any]:
    """The `quantization_config`.

    Args:
        spec: Of the weights.
        version: 1 or 2.
        quantizer: Name and version of who made it, such as `ptq:0.1.0`.
        unquantized: Full names of the linear layers that were left alone.
        head: Whether lm_head is quantized, too.
    """
    dynamic = {f"-:^{_pattern(module)}$": {} for module in unquantized if module != "lm_head"}
    return {
        "quant_method": "gptq",
        "bits": spec.bits,
        "group_size": spec.group_size or -1,
        "sym": spec.symmetric,
        "desc_act": False,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
        "damp_percent": 0.01,  # unused when loading, but some readers want the key
        "true_sequential": True,
        "lm_head": head,
        "static_groups": False,
        "pack_dtype": "int32",
        "meta": {"quantizer": [quantizer]},
        **({"dynamic": dynamic} if dynamic else {}),
    }


def _pattern(module: str) -> str:
    """A pattern for a layer's name and for that of the layer it is merged into."""
    parent, _, leaf = module.rpartition(".")
    name = f"({leaf}|{MERGED_INTO[leaf]})" if leaf in MERGED_INTO else re.escape(leaf)
    return f"{re.escape(parent)}\\.{name}" if parent else name


def read_gptq_config(config: Mapping[str, Any]) -> tuple[Scheme, Version]:
    """The scheme and version of settings that are run.

    Keys that do not change the tensors, such as `damp_percent` and `desc_act` (`g_idx` tells), are
    not looked at, nor `dynamic` (`gptq_rules`).

    Raises:
        CheckpointError: another method, or settings that are not read here.
    """
    require_key(config, "quant_method", ("gptq",), AGAIN)
    bits = require_key(config, "bits", RUN_BITS, HELD)
    size = read_size(config, "group_size", RUN_SIZES, HELD)
    symmetric = require_key(config, "sym", (True, False), AGAIN)
    require_key(config, "pack_dtype", ("int32", None), "Pack it again with pack_dtype int32")
    require_key(config, "lm_head", (True, False, None), AGAIN)
    require_key(config, "is_marlin_format", (False, None), "Get the checkpoint in the gptq format")
    key = "format" if "checkpoint_format" not in config and "format" in config else None
    layout = require_key(
        config, key or "checkpoint_format", ("gptq", "gptq_v2", None), "Get the gptq format"
    )
    if not runs(size):
        require_key(config, "group_size", RUN_SIZES, HELD)
    return Scheme(weights=group_spec(bits, size, symmetric)), 2 if layout == "gptq_v2" else 1


def gptq_rules(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any] | None]:
    """Settings of single layers by a pattern for `re.match` on their names; the first counts.

    What a pattern says goes before what is said of all; None leaves a layer alone.

    Raises:
        CheckpointError: a pattern is none, or says no settings.
    """
    rules: dict[str, Mapping[str, Any] | None] = {}
    for name, own in require_table(config, "dynamic", AGAIN).items():
        pattern = name.removeprefix("+:").removeprefix("-:")
        if not is_pattern(pattern) or not isinstance(own, Mapping):
            raise CheckpointError(
                f"found dynamic {name!r}: {own!r}; needed is an object of settings under a regular "
                f"expression, with +: before it, or -: for layers left alone. {AGAIN}"
            )
        rules[pattern] = None if name.startswith("-:") else own
    return rules


def is_pattern(text: str) -> bool:
    """Whether a text is a regular expression."""
    try:
        re.compile(text)
    except (re.error, RecursionError, OverflowError):
        return False
    return True


def float_layout(config: Mapping[str, Any], *, g_idx: bool) -> Layout | None:
    """The layout of settings that no kernel here runs, but whose values can be read.

    Args:
        config: The settings.
        g_idx: Whether layers have it.

    Returns:
        None of settings that are run, or not read at all.
    """
    bits, size = config.get("bits"), config.get("group_size")
    if bits not in READ_BITS or (config.get("desc_act") and not g_idx):
        return None
    size = read_size(config, "group_size", RUN_SIZES, HELD)
    if bits in RUN_BITS and runs(size):
        return None
    run = {"bits": next(iter(RUN_BITS)), "group_size": next(iter(RUN_SIZES))}
    _, version = read_gptq_config(dict(config) | run)
    key, found, allowed = (
        ("group_size", size, RUN_SIZES) if bits in RUN_BITS else ("bits", bits, RUN_BITS)
    )
    return replace(
        gptq_values(bits, size, version, g_idx=g_idx),
        refusal=f"found {key} {found}; allowed: {', '.join(map(str, allowed))}, which kernels "
        "here take",
    )
