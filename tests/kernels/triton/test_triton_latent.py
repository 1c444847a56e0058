"""Attention over latents and their write, in Triton's interpreter and its compiler."""

from dataclasses import replace

import pytest
import torch

from kernels.op_inputs import AttentionInputs, KVPool
from kernels.reference import apply_rope, rms_norm, write_kv
from kernels.reference_attention import latent_attention as twin
from kernels.triton.attention.latent import LatentTile, latent_attention
from kernels.triton.attention.latent_write import latent_write
from kernels.triton.common import Workspace
from tests.kernels.triton.test_triton_attention import LENGTHS, PAGES, STORAGE, make_tables
from tests.kernels.triton_lab import building_for, compiled, distance, interpreted


def make_inputs(storage: str, rank: int, turn: int, starts=None):
    """Random pages of latents, with scales of channels where they have eight bits."""
    generator = torch.Generator().manual_seed(0)
    pools, scales = [], []
    for size in (turn, rank):
        page = torch.randint(-127, 128, (PAGES, 1, 64, size), generator=generator).float()
        scale = torch.rand(1, size, generator=generator) * 0.02 + 0.001
        scaled = storage != "fp16"
        pools.append((page if scaled else page * 0.01).to(STORAGE[storage]))
        scales.append(scale if scaled else None)
    tables, lengths = make_tables(generator), torch.tensor(LENGTHS, dtype=torch.int32)
    return AttentionInputs(KVPool(*pools, *scales), tables, lengths, starts, 0.1)


def make_queries(tokens: int, heads: int, rank: int, turn: int):
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(heads, tokens, rank, generator=generator).transpose(0, 1)
    return q, torch.randn(tokens, heads, turn, generator=generator)


@pytest.mark.parametrize(
    ("storage", "heads", "rank", "turn", "own", "splits", "queries", "starts", "decodes"),
    [
        ("int8", 4, 32, 16, 4, 1, 1, None, 0),
        ("int8", 20, 32, 8, 16, 3, 1, None, 0),
        ("fp8", 16, 48, 16, 16, 2, 1, None, 0),
        ("fp16", 3, 32, 24, 4, 2, 1, None, 0),
        ("int8", 4, 32, 16, 4, 2, 4, (0, 1, 20, 20, 100, 103), 1),
        ("fp16", 4, 32, 16, 4, 2, 8, (0, 1, 2, 2, 40, 168), 2),
        ("int8", 20, 32, 16, 4, 2, 1, (0, 0, 5, 5, 9, 9), 0),
    ],
)
@interpreted
def test_equals_its_twin(storage, heads, rank, turn, own, splits, queries, starts, decodes):
    """Of single tokens, and of prompts, which have their starts."""
    begins = None if starts is None else torch.tensor(starts, dtype=torch.int32)
    inputs, workspace = make_inputs(storage, rank, turn, begins), Workspace.on("cpu", 1 << 16, 64)
    q, rotated = make_queries(starts[-1] if starts else len(LENGTHS), heads, rank, turn)
    tiles = LatentTile(own, splits=splits), LatentTile(16 if heads > 16 else 4, queries)
    got = latent_attention(q, rotated, inputs, workspace, decodes, tiles=tiles)
    assert distance(got, twin(q, rotated, inputs)) < 1e-3
    assert starts or not got[2].any()


@pytest.mark.parametrize(("storage", "rank", "turn"), [("int8", 32, 16), ("fp16", 48, 24)])
@interpreted
def test_write(storage, rank, turn):
    pool, heads, plain = make_inputs(storage, rank, turn).pool, 3, 8
    generator = torch.Generator().manual_seed(2)
    width = heads * (plain + turn)
    row = torch.randn(5, width + rank + turn, generator=generator)
    q, cached = row[:, :width].unflatten(1, (heads, -1)), row[:, width:]
    norm, angle = torch.rand(rank, generator=generator), torch.rand(9, turn // 2)
    cos, sin = (torch.cat((x, x), 1) for x in (angle.cos(), angle.sin()))
    positions, slots = torch.tensor([3, 0, 8, 1, 2]), torch.tensor([70, 71, -1, 3, 640])
    wanted_pool = type(pool)(pool.k.clone(), pool.v.clone(), pool.k_scale, pool.v_scale)
    key = cached[:, None, rank:]
    wanted, key = apply_rope(q[..., plain:], key, cos[positions], sin[positions])
    latent, real = rms_norm(cached[:, :rank], norm, 1e-6)[:, None], slots >= 0
    write_kv(key[real], latent[real], wanted_pool, slots[real])
    got = latent_write(q, cached, norm, 1e-6, cos, sin, positions, pool, slots)
    torch.testing.assert_close(got, wanted)
    for ours, theirs in ((pool.k, wanted_pool.k), (pool.v, wanted_pool.v)):
        tolerance = 1 if storage == "int8" else 2e-3  # a rounding that falls the other way
        assert (ours.float() - theirs.float()).abs().max() <= tolerance
        assert (ours != theirs).float().mean() < 1e-3


@interpreted
def test_what_is_not_taken_is_refused():
    inputs, workspace = make_inputs("int8", 32, 16), Workspace.on("cpu", 1, 1)
    q, rotated = make_queries(len(LENGTHS), 4, 32, 16)
    with pytest.raises(ValueError, match="takes no sliding window"):
        latent_attention(q, rotated, replace(inputs, sliding_window=5), workspace)
    single = replace(inputs.pool, v_scale=inputs.pool.v_scale[:, 0].contiguous())
    with pytest.raises(ValueError, match=r"scales of keys and latents are .*needed are static"):
        latent_attention(q, rotated, replace(inputs, pool=single), workspace)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("storage", [torch.int8, torch.bfloat16])
@compiled
def test_nothing_is_spilled(capability, storage):
    """Of DeepSeek's latents, for 16 heads and for 128; Hopper's tiles of 64 rows spill little."""
    most, few = (64, 256) if capability == 90 else (32, 0)
    scales = [torch.ones(1, size) if storage == torch.int8 else None for size in (64, 512)]
    pages = [torch.zeros(4, 1, 64, size).to(storage) for size in (64, 512)]
    tables, starts = torch.zeros(2, 2, dtype=torch.int32), torch.tensor([0, 64, 128]).int()
    lengths, workspace = tables[:, 0].contiguous(), Workspace.on("cpu", 1 << 20, 64)
    inputs = AttentionInputs(KVPool(*pages, *scales), tables, lengths, None, 0.1)
    prompts = AttentionInputs(KVPool(*pages, *scales), tables, lengths, starts, 0.1)
    for heads in (16, 128):
        q = torch.zeros(128, heads, 512).bfloat16()
        rotated = torch.zeros(128, heads, 64).bfloat16()
        own = min(heads, most)
        tiles = LatentTile(own, splits=2), LatentTile(own, most // own)
        with building_for(capability) as built:
            latent_attention(q[:2], rotated[:2], inputs, workspace, tiles=tiles)
            latent_attention(q, rotated, prompts, workspace, tiles=tiles)
        assert len(built) == 3
        for binary in built:
            assert binary.stack <= few
            assert binary.shared <= {80: 101376, 90: 232448}[capability]
            assert capability == 80 or not binary.count(r"mma\.sync")
    x, turns = torch.zeros(2, 16 * 192 + 576).bfloat16(), torch.zeros(4, 64)
    places = torch.zeros(2, dtype=torch.int64)
    with building_for(capability) as built:
        latent_write(
            x[:, :3072].unflatten(1, (16, -1)), x[:, 3072:], torch.ones(512), 1e-6, turns, turns,
            places, inputs.pool, places,
        )  # fmt: skip
    assert built[0].stack == 0
