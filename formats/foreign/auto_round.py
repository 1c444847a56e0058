"""AutoRound's `quant_method: auto-round`: its own settings of GPTQ's or AWQ's words; read only.

    packing_format  auto_round:auto_gptq   version 1 of `formats.foreign.gptq`, without g_idx
                    auto_round:auto_awq    `formats.foreign.awq`
    extra_config    settings of single layers, by name or pattern; those of 16 bits and more were
                    left alone

Symmetric weights have scales of both signs: the largest magnitude of a group becomes -8, the one
integer without a counterpart, whatever its own sign is. Layers of unsigned scales come out of that
with zero points (`formats.foreign.layout.without_signs`).

Source: Cheng et al. 2023, "Optimize Weight Rounding via Signed Gradient Descent" (arXiv
2309.05516); auto-round 0.16 `export/export_to_autoround/export.py` and `inference/backend.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from formats.errors import CheckpointError
from formats.foreign.gptq import is_pattern
from formats.foreign.layout import require_key, require_table

PACKINGS = ("auto_round:auto_gptq", "auto_round:auto_awq")
FLOAT_BITS = 16
PLAIN = re.compile(r"[\w.]+")  # a name, no pattern
EXPORT = 'Export it again with format="auto_gptq" or "auto_awq"'


def read_auto_round_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of GPTQ or AWQ that say the same of all layers.

    Raises:
        CheckpointError: another method or packing, or quantized activations.
    """
    require_key(config, "quant_method", ("auto-round",), EXPORT)
    packing = require_key(config, "packing_format", PACKINGS, EXPORT)
    require_key(config, "data_type", ("int", None), EXPORT)
    inputs = config.get("act_bits")
    if isinstance(inputs, int) and inputs < FLOAT_BITS:
        raise CheckpointError(
            f"found act_bits {inputs}; allowed: {FLOAT_BITS}, absent. {EXPORT} and activations "
            "left alone"
        )
    shared = {"bits": config.get("bits"), "group_size": config.get("group_size")}
    if packing == PACKINGS[1]:
        return shared | {"quant_method": "awq", "zero_point": True, "version": "gemm"}
    return shared | {"quant_method": "gptq", "sym": config.get("sym")}


def auto_round_rules(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any] | None]:
    """Settings of single layers by a pattern for `re.search` on their names; the first counts.

    A key is a layer's full name, which goes first, or a pattern. None leaves a layer alone.

    Raises:
        CheckpointError: one is neither, or says no bits.
    """
    named, patterns = {}, {}
    for name, own in require_table(config, "extra_config", EXPORT).items():
        bits = own.get("bits", config.get("bits")) if isinstance(own, Mapping) else None
        if not isinstance(bits, int) or not is_pattern(name):
            raise CheckpointError(
                f"found extra_config {name!r}: {own!r}; needed are settings of a layer, such as "
                f'{{"bits": 8}}, under its name or a regular expression. {EXPORT}'
            )
        changed = {key: own[key] for key in ("bits", "group_size", "sym") if key in own}
        means = changed if bits < FLOAT_BITS else None
        plain = PLAIN.fullmatch(name)
        (named if plain else patterns)[f"^{re.escape(name)}$" if plain else name] = means
    return named | patterns
