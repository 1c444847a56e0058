"""bitsandbytes' layouts, as transformers saves them; read only.

    int8   X.weight          int8 [N, K]
           X.SCB             fp32 [N]      largest magnitude of a row: w = q SCB / 127
           X.weight_format   uint8 []      0: rows one after the other

    4 bit  X.weight          uint8 [N K / 2, 1], or its bytes as another type (quant_storage); a
                             byte holds two neighbours of a row, the first in its high half
           X.weight.absmax   fp32 [blocks] largest magnitude of `blocksize` neighbours
           X.weight.quant_map fp32 [16]    what the codes stand for: w = quant_map[code] absmax
           X.weight.quant_state.bitsandbytes__nf4 (or __fp4)   uint8: the JSON of `QuantState`

    with double quantization absmax is uint8 [blocks], and with nested blocks of it
           X.weight.nested_absmax fp32, X.weight.nested_quant_map fp32 [256]
           absmax = nested_quant_map[absmax] nested_absmax + nested_offset

The 16 values of nf4 and fp4 lie at unequal distances, on no integer grid.

Source: Dettmers et al. 2022, "LLM.int8()", section 3.1; Dettmers et al. 2023, "QLoRA", section 3
(NormalFloat, double quantization); bitsandbytes 0.50 `nn/modules.py`, `functional.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import torch
from pydantic import Field, PositiveInt, ValidationError
from torch import Tensor

from formats.documents import Strict
from formats.errors import CheckpointError
from formats.foreign.layout import Layout, packed_shape, require_key, require_tensor
from formats.scheme import PRESETS, Scheme
from formats.stored.weights import StoredWeight

INT8_LEAVES = ("weight", "SCB", "weight_format")
NESTED_LEAVES = ("weight.nested_absmax", "weight.nested_quant_map")
STORAGE = ("uint8", "bfloat16", "float16", "float32")
AGAIN = "Save the model again with transformers and bitsandbytes"


class QuantState(Strict):
    """What bitsandbytes keeps of a 4-bit weight beside its tensors.

    JSON: ``{"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [128, 64]}``
    """

    quant_type: Literal["nf4", "fp4"]
    blocksize: PositiveInt
    dtype: Literal["float16", "bfloat16", "float32"]
    shape: tuple[PositiveInt, PositiveInt]
    nested_blocksize: PositiveInt | None = None
    nested_dtype: Literal["float32"] | None = None
    nested_offset: float | None = Field(default=None, allow_inf_nan=False)


def read_bitsandbytes_config(config: Mapping[str, Any]) -> tuple[Scheme, Layout]:
    """The scheme and layout of a `quantization_config`; the scheme of 4 bits is empty.

    Raises:
        CheckpointError: another method, or settings that are not read here.
    """
    require_key(config, "quant_method", ("bitsandbytes",), AGAIN)
    four = require_key(config, "load_in_4bit", (True, False, None), AGAIN)
    require_key(config, "load_in_8bit", (False, None) if four else (True,), AGAIN)
    if not four:
        return PRESETS["w8"], int8_layout()
    kind = require_key(config, "bnb_4bit_quant_type", ("nf4", "fp4"), AGAIN)
    nested = require_key(config, "bnb_4bit_use_double_quant", (True, False), AGAIN)
    require_key(config, "bnb_4bit_quant_storage", (*STORAGE, None), AGAIN)
    return Scheme(), four_bit_layout(kind, nested)


def int8_layout() -> Layout:
    """The layout of LLM.int8's weights."""
    return Layout(
        name="bitsandbytes int8",
        leaves=INT8_LEAVES,
        marker="SCB",
        shape=lambda shape: shape,
        unpack=unpack_int8,
        instead="compressed_tensors",
    )


def four_bit_layout(quant_type: str, nested: bool) -> Layout:
    """The layout of nf4 or fp4 weights, with double quantization where `nested`."""
    state = f"weight.quant_state.bitsandbytes__{quant_type}"
    leaves = ("weight", "weight.absmax", "weight.quant_map", state)
    return Layout(
        f"bitsandbytes {quant_type}",
        (*leaves, *NESTED_LEAVES) if nested else leaves,
        marker=state,
        values=partial(dequantize_four_bit, quant_type=quant_type),
        refusal=f"values of {quant_type} weights lie on no integer grid, so that no scheme here "
        "holds them exactly",
    )


def unpack_int8(tensors: Mapping[str, Tensor]) -> StoredWeight:
    """A weight of LLM.int8: its integers as they are, scale fp32 [N, 1] = SCB / 127.

    A row of zeros has SCB 0; its scale is arbitrary and becomes 1.

    Raises:
        CheckpointError: a tensor has another type or shape, or SCB is negative or not finite.
    """
    rows, columns = packed_shape(tensors, "weight")
    q = require_tensor(tensors, "weight", torch.int8, (rows, columns))
    if int(require_tensor(tensors, "weight_format", torch.uint8, ())) != 0:
        raise CheckpointError(f"weight_format is not 0 (rows), the only one that is read. {AGAIN}")
    largest = require_tensor(tensors, "SCB", torch.float32, (rows,))
    _check_magnitudes("SCB", largest)
    if bool(((largest == 0) & (q != 0).any(dim=1)).any()):
        raise CheckpointError(f"SCB is 0 for a row that is not zero; it is damaged. {AGAIN}")
    scale = torch.where(largest == 0, 1.0, largest / 127)
    return StoredWeight(q, scale.unsqueeze(1))


def dequantize_four_bit(tensors: Mapping[str, Tensor], quant_type: str) -> Tensor:
    """The weight that nf4 or fp4 tensors stand for, fp32 [N, K]; bitsandbytes then rounds it.

    Raises:
        CheckpointError: a tensor has another type or shape than the state says, or holds what is
            no magnitude; the state is damaged or of another type.
    """
    state = _state(tensors, quant_type)
    (rows, columns), size = state.shape, state.blocksize
    absmax = _absmax(tensors, state, -(-rows * columns // size))  # [blocks]
    codes = require_tensor(tensors, "weight.quant_map", torch.float32, (16,))
    _check_finite("weight.quant_map", codes)
    packed = tensors["weight"].contiguous().reshape(-1).view(torch.uint8)
    if len(packed) != -(-rows * columns // 2):
        raise CheckpointError(
            f"weight has {len(packed)} bytes; needed for {rows} x {columns} codes of 4 bits are "
            f"{-(-rows * columns // 2)}. {AGAIN}"
        )
    pairs = torch.cartesian_prod(codes, codes)  # [256, 2]: both codes of a byte
    values = pairs[packed.int()].flatten()[: rows * columns]
    values *= absmax.repeat_interleave(size)[: rows * columns]
    return values.reshape(rows, columns)


def _state(tensors: Mapping[str, Tensor], quant_type: str) -> QuantState:
    name = f"weight.quant_state.bitsandbytes__{quant_type}"
    if name not in tensors or tensors[name].dtype != torch.uint8:
        raise CheckpointError(f"{name} is missing or not of type uint8. {AGAIN}")
    try:
        state = QuantState.model_validate_json(bytes(tensors[name].flatten().tolist()))
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(map(str, fault["loc"])) or "its JSON"
        raise CheckpointError(f"{name}: {where}: {fault['msg']}. {AGAIN}") from error
    if state.quant_type != quant_type:
        raise CheckpointError(f"{name} says quant_type {state.quant_type}. {AGAIN}")
    return state


def _absmax(tensors: Mapping[str, Tensor], state: QuantState, blocks: int) -> Tensor:
    """Largest magnitude of each block, fp32 [blocks]."""
    if NESTED_LEAVES[0] not in tensors:
        absmax = require_tensor(tensors, "weight.absmax", torch.float32, (blocks,))
        _check_magnitudes("weight.absmax", absmax)
        return absmax
    size, offset = state.nested_blocksize, state.nested_offset
    if size is None or offset is None:
        raise CheckpointError(f"quant_state has no nested_blocksize or nested_offset. {AGAIN}")
    codes = require_tensor(tensors, "weight.absmax", torch.uint8, (blocks,))
    nested = require_tensor(tensors, NESTED_LEAVES[0], torch.float32, (-(-blocks // size),))
    values = require_tensor(tensors, NESTED_LEAVES[1], torch.float32, (256,))
    _check_magnitudes(NESTED_LEAVES[0], nested)
    _check_finite(NESTED_LEAVES[1], values)
    return values[codes.int()] * nested.repeat_interleave(size)[:blocks] + offset


def _check_magnitudes(name: str, tensor: Tensor) -> None:
    _check_finite(name, tensor)
    if bool((tensor < 0).any()):
        raise CheckpointError(
            f"{name} holds {tensor.min().item()}; a magnitude is not negative. {AGAIN}"
        )


def _check_finite(name: str, tensor: Tensor) -> None:
    if not bool(torch.isfinite(tensor).all()):
        raise CheckpointError(f"{name} holds NaN or infinity; it is damaged. {AGAIN}")
