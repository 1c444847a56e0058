"""Small integers in 32-bit words, as compressed-tensors' `pack-quantized` stores them.

Source: compressed-tensors, `pack_quantized`: element k of a row lies in word k // n, at bit
b (k % n), where a word holds n = 32 / b values, each stored as value + 2^(b - 1). Weights are
packed along their inputs, zero points along the outputs.
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
