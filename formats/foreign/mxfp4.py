"""The layout in which gpt-oss is published, `quant_method: mxfp4`; read, and written back.

Experts lie in parameters of all of them, in MXFP4 (`formats.pack`), everything else in bf16:

    M.experts.gate_up_proj_blocks  uint8 [E, 2 I, H / 32, 16]    M.experts.gate_up_proj_scales
    M.experts.down_proj_blocks     uint8 [E, H, I / 32, 16]      M.experts.down_proj_scales

`formats.checkpoint.split` reads them as layers, whose bytes are those of compressed-tensors'
mxfp4-pack-quantized: a folder in this layout is seen as one of that, and nothing is unpacked before
it is run.

Source: openai/gpt-oss-20b, `config.json` and `model.safetensors.index.json`.
"""

from __future__ import annotations

from collections.abc import Collection

from formats.errors import CheckpointError
from formats.families.family import Family
from formats.scheme import MX_GROUP, LayerScheme, WeightSpec

METHOD = "mxfp4"
SCHEME = LayerScheme(weights=WeightSpec(dtype="fp4_e2m1", granularity="group", group_size=MX_GROUP))
EXPERTS = r"re:.*\.experts\.\d+\."


def mxfp4_groups(
    family: Family | None, names: Collection[str]
) -> tuple[tuple[tuple[str, ...], LayerScheme], ...]:
    """Targets and scheme of the layers of a folder in this layout.

    Args:
        family: Of the model; None without a declaration.
        names: Of all tensors, layers taken apart.

    Raises:
        CheckpointError: the family's experts lie otherwise, or none is in MXFP4.
    """
    known = family is not None and family.mixture is not None and family.mixture.alternating
    if not known or not any(name.endswith(".weight_packed") for name in names):
        raise CheckpointError(
            f"config.json: quantization_config has quant_method {METHOD!r}, but no experts lie in "
            "*_blocks and *_scales as in gpt-oss. Get the original model and quantize that"
        )
    return (((EXPERTS,), SCHEME),)
