"""FP8, `quant_method: fp8`: in blocks, or with one scale a tensor or an output.

    blocks of 128 x 128   DeepSeek-V3's layout, below; of other sizes only the values are read
    no blocks             X.weight float8_e4m3fn [N, K]
                          X.weight_scale_inv [], a multiplier despite the name
                          X.activation_scale [], where inputs are static
                          vLLM has weight_scale ([], [N] or [N, 1]) and input_scale for these

Scales are of any float type, powers of two (e8m0) too. `scale_fmt: ue8m0` says that they are powers
of two; those of inputs, which others round up to such, are finer here.

Source: transformers 5.23 `integrations/finegrained_fp8.py`, vLLM 0.33 `quantization/fp8.py`.

The layout of DeepSeek-V3 in blocks is written, too:

    X.weight            float8_e4m3fn [N, K]
    X.weight_scale_inv  fp32 [ceil(N / 128), ceil(K / 128)]: a multiplier, despite the name

Inputs are quantized when they arrive, in groups of 128 of a token.

Source: DeepSeek-V3 `README_WEIGHTS.md` and `inference/kernel.py` (y = x * s).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from formats.errors import CheckpointError
from formats.foreign.layout import Layout, packed_shape, require_key, require_tensor
from formats.scheme import BLOCK, PRESETS, Scheme
from formats.stored.weights import StoredWeight, check_scale


def read_fp8_config(
    config: Mapping[str, Any], names: Collection[str] = ()
) -> tuple[Scheme, Layout]:
    """The scheme and layout of settings.

    Args:
        names: Of the folder's tensors, which tell whose names they are.

    Raises:
        CheckpointError: another method, or settings that are not read here.
    """
    require_key(config, "quant_method", ("fp8",), AGAIN)
    e5m2 = f"e5m2 is not run: the fp8 kernels here take e4m3. {AGAIN}"
    require_key(config, "fmt", ("e4m3", None), e5m2 if config.get("fmt") == "e5m2" else AGAIN)
    require_key(config, "scale_fmt", ("ue8m0", None), AGAIN)
    block = config.get("weight_block_size")
    if block is None:
        static = require_key(config, "activation_scheme", ("dynamic", "static"), AGAIN) == "static"
        return whole_layout(names, static=static)
    sizes = block if isinstance(block, list) else [block]
    if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        require_key(config, "weight_block_size", ([BLOCK, BLOCK], None), AGAIN)
    require_key(config, "activation_scheme", ("dynamic",), AGAIN)
    layout = fp8_block_layout()
    if block == [BLOCK, BLOCK]:
        return SCHEME, layout
    refusal = f"found weight_block_size {block}; kernels here take {[BLOCK, BLOCK]}"
    values = partial(_block_values, block=block)
    return Scheme(), dataclasses.replace(
        layout, pack=None, unpack=None, values=values, refusal=refusal
    )


def whole_layout(names: Collection[str], *, static: bool) -> tuple[Scheme, Layout]:
    """Scheme and layout of weights without blocks.

    Args:
        static: Whether inputs have a scale of their own.
    """
    leaves = {name.rpartition(".")[2] for name in names}
    scale = "weight_scale_inv" if "weight_scale_inv" in leaves else "weight_scale"
    inputs = "activation_scale" if "activation_scale" in leaves else "input_scale"
    layout = Layout(
        name="fp8",
        leaves=("weight", scale, inputs) if static else ("weight", scale),
        marker=scale,
        shape=lambda shape: shape,
        unpack=partial(_unpack, leaf=scale, static=static),
        inputs=inputs if static else None,
    )
    return PRESETS["fp8_tensor" if static else "fp8_channel"], layout


def _unpack(tensors: Mapping[str, Tensor], leaf: str, static: bool) -> StoredWeight:
    """A weight, with a scale for all where inputs are static, for each output where not.

    Raises:
        CheckpointError: a tensor has another type or shape, or a scale is not finite and positive.
    """
    rows, columns = packed_shape(tensors, "weight")
    q = require_tensor(tensors, "weight", torch.float8_e4m3fn, (rows, columns))
    scale, one = tensors[leaf], ((), (1,), (1, 1))
    check_scale(leaf, scale, one if static else (*one, (rows,), (rows, 1)))
    scale = scale.float().reshape(-1, 1)
    return StoredWeight(q, scale if static else scale.expand(rows, 1).contiguous())


def _block_values(tensors: Mapping[str, Tensor], block: list[int]) -> Tensor:
    """The weight in fp32 [N, K], of blocks of any size; those at an edge may be smaller.

    Raises:
        CheckpointError: as `_unpack`.
    """
    rows, columns = packed_shape(tensors, "weight")
    q = require_tensor(tensors, "weight", torch.float8_e4m3fn, (rows, columns))
    scale = tensors["weight_scale_inv"]
    check_scale("weight_scale_inv", scale, ((-(-rows // block[0]), -(-columns // block[1])),))
    own = torch.arange(rows) // block[0]
    return q.float() * scale.float()[own][:, torch.arange(columns) // block[1]]


LEAVES = ("weight", "weight_scale_inv")
SCHEME = PRESETS["fp8_block"]
AGAIN = "Quantize the original model with an fp8_block recipe"


def fp8_block_layout() -> Layout:
    """The layout of weights of the one scheme that it holds."""
    return Layout(
        name="fp8_block",
        leaves=LEAVES,
        marker="weight_scale_inv",
        shape=lambda shape: shape,
        pack=pack_fp8_block,
        unpack=unpack_fp8_block,
    )


def refuse_fp8_block(scheme: Scheme) -> None:
    """Refuse a scheme that the layout cannot express.

    Raises:
        CheckpointError: it is not fp8 in blocks with inputs in groups.
    """
    if (scheme.weights, scheme.activations) != (SCHEME.weights, SCHEME.activations):
        parts = [part.text for part in (scheme.weights, scheme.activations) if part]
        raise CheckpointError(
            f"found {' and '.join(parts) or 'no quantized weights'}; fp8_block holds fp8 weights "
            f"in blocks of {BLOCK} x {BLOCK} with inputs in groups of {BLOCK}. {AGAIN}"
        )


def pack_fp8_block(weight: StoredWeight) -> dict[str, Tensor]:
    """The two tensors of a weight: q float8_e4m3fn [N, K], scale fp32 by block."""
    return {"weight": weight.q, "weight_scale_inv": weight.scale.float()}


def unpack_fp8_block(tensors: Mapping[str, Tensor]) -> StoredWeight:
    """Inverse of `pack_fp8_block`.

    Raises:
        CheckpointError: a tensor has another type or shape, or a scale is not finite and positive.
    """
    rows, columns = packed_shape(tensors, "weight")
    q = require_tensor(tensors, "weight", torch.float8_e4m3fn, (rows, columns))
    blocks = packed_shape(tensors, "weight_scale_inv")
    scale = tensors["weight_scale_inv"]
    check_scale("weight_scale_inv", scale, ((-(-rows // BLOCK), -(-columns // BLOCK)),))
    return StoredWeight(q, scale.float().reshape(blocks))


def fp8_block_config(unquantized: Sequence[str] = ()) -> dict[str, Any]:
    """The `quantization_config`.

    Args:
        unquantized: Full names of the linear layers that were left alone, not merged: vLLM
            compares exactly.
    """
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": list(dict.fromkeys([*unquantized, "lm_head"])),
    }
