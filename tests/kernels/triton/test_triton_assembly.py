"""The kernels' inline assembly, run here: the few instructions it is made of, on all that matters.

The interpreter has no assembly and takes plain operations; this shows that both compute the same.
"""

import re

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from kernels.triton.linear import operands
from kernels.triton.linear import operands as w4a8
from tests.kernels.triton_lab import compiled, interpreted

MASK = 0xFFFFFFFF
HALF = {"f16x2": torch.float16, "bf16x2": torch.bfloat16}


def lanes(word: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """Words -> fp64 [2, words], low half first."""
    halves = np.stack([word & 0xFFFF, word >> 16]).astype(np.uint16)
    return torch.from_numpy(halves.view(np.int16)).view(dtype).double()


def word_of(values: torch.Tensor, dtype: torch.dtype) -> np.ndarray:
    """The other way round; nothing may be rounded."""
    rounded = values.to(dtype)
    assert torch.equal(rounded.double(), values), "a result is not exact"
    low, high = rounded.view(torch.int16).numpy().view(np.uint16).astype(np.int64)
    return low | (high << 16)


def step(name: str, values: list[np.ndarray]) -> np.ndarray:
    """One instruction."""
    a, b, c, d = (*values, *[np.int64(0)] * 4)[:4]
    kind = name.rsplit(".", 1)[1]
    if kind in HALF:
        x, y, z = (lanes(np.broadcast_to(v, a.shape), HALF[kind]) for v in (a, b, c))
        return word_of(x * y + z if name.startswith("fma") else x - y, HALF[kind])
    if name == "lop3.b32":
        bits = [np.where(int(d) >> n & 1, MASK, 0) for n in range(8)]
        terms = [
            (a if n & 4 else ~a) & (b if n & 2 else ~b) & (c if n & 1 else ~c) & bits[n]
            for n in range(8)
        ]
        return np.bitwise_or.reduce(np.broadcast_arrays(*terms)) & MASK
    if name == "prmt.b32":
        chosen = [int(c) >> 4 * n & 15 for n in range(4)]
        both = a | (b << 32)
        return sum(((both >> 8 * n & 255) << 8 * place) for place, n in enumerate(chosen))
    plain = {
        "mov.b32": lambda: a,
        "shr.u32": lambda: a >> b,
        "shl.b32": lambda: a << b,
        "and.b32": lambda: a & b,
        "xor.b32": lambda: a ^ b,
        "sub.u32": lambda: a - b,
        "mad.lo.u32": lambda: a * b + c,
    }
    return plain[name]() & MASK


def run(assembly: str, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """Values of $0, $1, ... of a text whose inputs follow its outputs; a pair is split in halves."""
    outputs = len(set(re.findall(r"\$\d+", assembly))) - len(inputs)
    registers = {f"${outputs + i}": value for i, value in enumerate(inputs)}
    for line in re.sub(r"\.reg[^;]*;", "", assembly.strip()[1:-1]).split(";"):
        if not line.strip():
            continue
        name, rest = line.strip().split(None, 1)
        pair = re.match(r"\{(\$\d+), (\$\d+)\}, (\w+)", rest)
        if pair:
            word = registers[pair[3]]
            registers[pair[1]], registers[pair[2]] = word & 0xFFFF, word >> 16
            continue
        target, *sources = (part.strip() for part in rest.split(","))
        values = [registers[s] if s in registers else np.int64(int(s, 0)) for s in sources]
        registers[target] = step(name, values)
    return [registers[f"${i}"] for i in range(outputs)]


def as_words(values: torch.Tensor, dtype: torch.dtype) -> np.ndarray:
    return word_of(values.double().expand(2, -1), dtype)


def biases(bits: int, dtype: torch.dtype, z: torch.Tensor) -> list[np.ndarray]:
    """What zero points + 2^(bits - 1) go into the assembly as."""
    if bits == 8:
        count, value = 2, {torch.float16: 1024 + z, torch.bfloat16: 128 - z}[dtype]
        return [as_words(value, dtype)] * count
    if dtype == torch.bfloat16:
        return [as_words(-(128 + z), dtype)] * 4
    return [as_words(1024 + z, dtype), as_words(-(64 + z), dtype)] * 2


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("zeros", [False, True])
@compiled
def test_weights_become_floats(bits, dtype, zeros):
    words = torch.randint(0, 1 << 32, (4096,)).numpy()
    z = torch.randint(0, 1 << bits, (4096,))
    name = f"{'FP' if dtype == torch.float16 else 'BF'}16_{bits}{'_ZERO' if zeros else ''}"
    got = run(getattr(operands, name).value, [words, *(biases(bits, dtype, z) if zeros else [])])
    taken = z.numpy() if zeros else 1 << (bits - 1)
    assert len(got) == 32 // bits
    for place, value in enumerate(got):
        half, part = place % 2, place // 2
        wanted = (words >> (bits * part + 16 * half) & ((1 << bits) - 1)) - taken
        assert np.array_equal(lanes(value, dtype)[0].numpy(), wanted), place


@pytest.mark.parametrize("signed", [False, True])
@compiled
def test_an_int4_cache_becomes_fp16(signed):
    """n + 8 in the units of a byte's halves as the bits stand, or n."""
    cache = pytest.importorskip("kernels.triton.attention.gluon_parts")
    words = torch.randint(0, 1 << 32, (4096,)).numpy()
    got = run((cache.INT4_LESS_8 if signed else cache.INT4_TO_FP16).value, [words])
    assert len(got) == 8
    for place, value in enumerate(got):
        pair, high, odd = place % 2, place // 2 % 2, place // 4
        n = words >> (8 * (2 * pair + odd) + 4 * high) & 15
        unit = (cache.HIGH_UNIT if high else cache.LOW_UNIT).value
        wanted = n - 8 if signed else n * unit
        assert np.array_equal(lanes(value, torch.float16)[0].numpy(), wanted), place


@compiled
def test_weights_become_bytes():
    words = torch.randint(0, 1 << 32, (4096,)).numpy()
    z = torch.randint(0, 16, (4096,)).numpy()
    m = torch.arange(4096).numpy() % 16 + 1
    plain, less, times = (
        run(w4a8.SIXTEENFOLD.value, [words]),
        run(w4a8.LESS_ZERO.value, [words, z * 0x01010101]),
        run(w4a8.MULTIPLIED.value, [words, m * 0x01010101]),
    )
    for half in range(2):
        for byte in range(4):
            n = words >> (8 * byte + 4 * half) & 15
            assert np.array_equal(plain[half] >> 8 * byte & 255, n << 4)
            assert np.array_equal(less[half] >> 8 * byte & 255, (n - z) & 255)
            assert np.array_equal(times[half] >> 8 * byte & 255, (n - 8) * m & 255)


@triton.jit
def store_biases(
    z, out, COUNT: tl.constexpr, BITS: tl.constexpr, ODD: tl.constexpr, TYPE: tl.constexpr
):
    i = tl.arange(0, COUNT)
    tl.store(out + i[:, None], operands.bias_of(tl.load(z + i), BITS, ODD, TYPE))


@pytest.mark.parametrize("bits", [4, 8])
@interpreted
def test_zero_points_become_biases(bits):
    z = torch.arange(1 << bits)
    for dtype, kind in ((torch.float16, tl.float16), (torch.bfloat16, tl.bfloat16)):
        for odd, wanted in enumerate(biases(bits, dtype, z)[: 2 if bits == 4 else 1]):
            out = torch.empty(len(z), dtype=torch.int32)
            store_biases[(1,)](z.to(torch.int32), out, len(z), bits, bool(odd), kind)
            assert np.array_equal(out.numpy().astype(np.int64) & MASK, wanted), (dtype, odd)
