"""Small integers in 32-bit words, as compressed-tensors' `pack-quantized` stores them.

Source: compressed-tensors, `pack_quantized`: element k of a row is in word k // n, at bit
b (k % n), where a word holds n = 32 / b values, each stored as value + 2^(b - 1). Weights are
packed along their inputs, zero points along the outputs.

Floats of 4 bits, and the scales that neighbours share:

    MXFP4     32 elements share a power of two (OCP Microscaling Formats 1.0, 5.3)
    NVFP4     16 elements share an e4m3 value, times one fp32 number a tensor
    element   e2m1: sign, two bits of exponent, one of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and
              their negatives, -0 among them; two in a byte, the first in its low half
    power     e8m0: a byte E for 2^(E - 127); 255 is NaN. MXFP8, e4m3 elements, has it too

Every element is an e4m3 value too, -0 included, and every power an fp32 value, so that both are
held as these and lose nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pack_words(values: Tensor, bits: int) -> Tensor:
    """Pack signed integers along the last dimension.

    Args:
        values: int8 [..., K] in [-2^(bits-1), 2^(bits-1) - 1].
        bits: 4 or 8.

    Returns:
        int32 [..., ceil(K bits / 32)]; places beyond K hold zero bits.
    """
    count = 32 // bits
    stored = (values.to(torch.int32) + (1 << (bits - 1))) & ((1 << bits) - 1)
    stored = torch.nn.functional.pad(stored, (0, -values.shape[-1] % count))
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=values.device)
    return (stored.unflatten(-1, (-1, count)) << shifts).sum(dim=-1, dtype=torch.int32)


def unpack_words(words: Tensor, bits: int, count: int) -> Tensor:
    """Inverse of `pack_words`; takes no memory but that of the values.

    Args:
        words: int32 [..., words].
        bits: 1 to 8; of 3, 5, 6 and 7 some values begin in one word and end in the next.
        count: Values of a row; what words hold beyond them is left out.

    Returns:
        int8 [..., count].
    """
    raw = words.contiguous().view(torch.uint8)  # little-endian: in the order of the values
    if bits not in (4, 8):
        places = torch.arange(8, dtype=torch.uint8, device=words.device)
        stream = (raw.unsqueeze(-1) >> places & 1).flatten(-2)[..., : count * bits]
        stored = (stream.unflatten(-1, (count, bits)) << places[:bits]).sum(-1, dtype=torch.uint8)
        return stored.sub_(1 << (bits - 1)).view(torch.int8)
    stored = torch.empty((*words.shape[:-1], count), dtype=torch.uint8, device=words.device)
    if bits == 8:
        stored.copy_(raw[..., :count])
    else:
        even, odd = stored[..., ::2], stored[..., 1::2]
        torch.bitwise_and(raw[..., : even.shape[-1]], 15, out=even)
        torch.bitwise_right_shift(raw[..., : odd.shape[-1]], 4, out=odd)
    return stored.sub_(1 << (bits - 1)).view(torch.int8)


NAN = 255  # of the bytes of scales, the one that is no power of two
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SMALLEST = 0x00400000  # bits of 2^-127 in fp32, where it has no leading one


def unpack_elements(packed: Tensor) -> Tensor:
    """Elements of bytes: uint8 [..., K / 2] -> float8_e4m3fn [..., K]."""
    values = torch.tensor([*_VALUES, *(-value for value in _VALUES)], device=packed.device)
    table = values.to(torch.float8_e4m3fn).view(torch.uint8)
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    return table[codes.int()].view(torch.float8_e4m3fn)


def pack_elements(elements: Tensor) -> Tensor:
    """Inverse of `unpack_elements`, of an even number of elements a row."""
    codes = codes_of(elements)
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def codes_of(elements: Tensor) -> Tensor:
    """The four bits of each element: float8_e4m3fn of values that e2m1 has -> uint8."""
    bits = elements.contiguous().view(torch.uint8)
    values = torch.tensor(_VALUES, device=bits.device).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.bucketize(bits & 0x7F, values, out_int32=True).to(torch.uint8) | ((bits >> 4) & 8)


def unpack_powers(scales: Tensor) -> Tensor:
    """Powers of two of bytes: uint8, none of them 255, to fp32 of the same shape."""
    bits = scales.to(torch.int32) << 23
    return bits.masked_fill_(scales == 0, _SMALLEST).view(torch.float32)


def pack_powers(scales: Tensor) -> Tensor:
    """Inverse of `unpack_powers`."""
    return (scales.contiguous().view(torch.int32) >> 23).to(torch.uint8)


def least_unit(scale: Tensor) -> Tensor:
    """The least power of two, fp32 [], of which e4m3 multiples reach the largest of some scales."""
    mantissa, exponent = torch.frexp(scale.max() / torch.finfo(torch.float8_e4m3fn).max)
    return torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).int())
