"""Decode attention, rotation and cache write in Triton's interpreter against their twins."""

from __future__ import annotations

import pytest
import torch
from triton_lab import interpreted

PAGES = 12
STORAGE = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
LENGTHS = (1, 65, 0, 200, 128)


def make_cache(storage: str, dims: int, heads: int, dim: int):
    """Random pages, tables, lengths and scales; NaN scales where no token is."""
    generator = torch.Generator().manual_seed(0)
    shape = (PAGES, heads, 64, dim)
    pools = [torch.randint(-127, 128, shape, generator=generator).float() for _ in "kv"]
    pools[1] = pools[1].transpose(2, 3).contiguous()
    shape = {1: (heads,), 2: (heads, dim), 3: (PAGES, heads, 64)}[dims]
    scales = [torch.rand(shape, generator=generator) * 0.01 + 0.01 for _ in "kv"]
    if dims == 2:
        scales[1] = scales[1][:, 0].contiguous()
    order = torch.randperm(PAGES, generator=generator)
    tables = torch.zeros(len(LENGTHS), 4, dtype=torch.int32)
    for s, length in enumerate(LENGTHS):
        pages = -(-length // 64)
        tables[s, :pages], order = order[:pages].int(), order[pages:]
        if dims == 3 and length % 64:
            for scale in scales:
                scale[tables[s, pages - 1], :, length % 64 :] = float("nan")
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    return *(pool.to(STORAGE[storage]) for pool in pools), tables, lengths, *scales


@pytest.mark.parametrize(
    ("storage", "dims", "shape"),
    [
        ("int8", 1, (4, 2, 32, None, 1)),
        ("int8", 2, (9, 1, 16, None, 3)),
        ("int8", 3, (3, 3, 16, 70, 2)),
        ("fp8", 1, (2, 1, 16, 64, 2)),
        ("fp8", 3, (4, 1, 16, None, 3)),
    ],
)
@interpreted
def test_decode_attention(storage, dims, shape):
    import kernels.triton.reference as twins
    from kernels.triton.attention import decode_attention
    from kernels.triton.common import Workspace
    from kernels.triton.tuning import Cut

    q_heads, heads, dim, window, splits = shape
    cache, workspace = make_cache(storage, dims, heads, dim), Workspace.on("cpu", 1 << 16, 64)
    q = torch.randn(len(LENGTHS), q_heads, dim, generator=torch.Generator().manual_seed(1))
    wanted = twins.decode_attention(q, *cache, dim**-0.5, window)
    got = decode_attention(q, *cache, dim**-0.5, workspace, window, Cut(4, splits))
    assert ((got - wanted).norm() / wanted.norm()).item() < 8e-4
    assert not got[2].any()
    assert not workspace.arrivals.any()


@interpreted
def test_attention_refuses_what_does_not_fit():
    from kernels.triton.attention_gluon import decode_attention
    from kernels.triton.common import Workspace
    from kernels.triton.tuning import Cut

    k, v, *rest = make_cache("int8", 1, 2, 32)
    q, workspace = torch.randn(len(LENGTHS), 4, 32), Workspace.on("cpu", 100, 1)
    with pytest.raises(ValueError, match="tokens last"):
        decode_attention(q, k, k, *rest, 1.0, workspace)
    with pytest.raises(ValueError, match="5 block tables and 5 lengths for 4"):
        decode_attention(q[:4], k, v, *rest, 1.0, workspace)
    with pytest.raises(ValueError, match="needed is int8 or float8_e4m3fn"):
        decode_attention(q, k.half(), v.half(), *rest, 1.0, workspace)
    with pytest.raises(ValueError, match="scales are"):
        decode_attention(q, k, v, *rest[:2], rest[2][:1], rest[3], 1.0, workspace)
    with pytest.raises(ValueError, match="make a larger one"):
        decode_attention(q, k, v, *rest, 1.0, workspace, cut=Cut(4, 2))


@pytest.mark.parametrize(("dims", "tokens"), [(1, 21), (2, 21), (3, 21), (3, 258)])
@interpreted
def test_rotation_and_cache_write(dims, tokens):  # 258: two heads a program
    import kernels.triton.reference as twins
    from kernels.triton.rope_cache import rope_write

    heads, dim, generator = 2, 16, torch.Generator().manual_seed(2)
    joint = torch.randn(tokens, 8, dim, generator=generator).half()
    q, k, v = joint.split([4, heads, heads], dim=1)
    angle = (torch.rand(tokens, dim // 2, generator=generator) * 6).repeat(1, 2)
    slots = torch.randperm(6 * 64, generator=generator)[:tokens]
    slots[3] = -1
    shape = {1: (heads,), 2: (heads, dim), 3: (6, heads, 64)}[dims]
    found = []
    for write in (rope_write, twins.rope_write):
        pools = [torch.zeros(6, heads, *s, dtype=torch.int8) for s in ((64, dim), (dim, 64))]
        scales = [torch.full(shape, 0.02) for _ in "kv"]
        scales[1] = scales[1] if dims != 2 else scales[1][:, 0].contiguous()
        out = write(q, k, v, angle.cos(), angle.sin(), *pools, slots, *scales)
        found.append((out, *pools, *scales))
    got, wanted = found
    torch.testing.assert_close(got[0], wanted[0], rtol=1e-3, atol=1e-3)
    assert (got[1].int() - wanted[1].int()).abs().max() <= 1
    assert (got[1] != wanted[1]).float().mean() < 1e-3
    assert torch.equal(got[2], wanted[2])
    torch.testing.assert_close(got[3], wanted[3], rtol=1e-6, atol=0)
    assert torch.equal(got[4], wanted[4])
    assert got[2].any()
