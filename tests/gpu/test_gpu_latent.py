"""Latent attention on a GPU: its kernels against their twin, its models against the CPU."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.test_gpu_families import is_near
from tests.tiny_families import DEEPSEEK

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
if torch.cuda.is_available():
    from kernels.bench import gpu_attention
    from kernels.op_inputs import KVPool
    from kernels.triton.attention.latent import LatentTile
    from kernels.triton.attention.latent_write import latent_write


@pytest.mark.parametrize("kind", DEEPSEEK)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 0.01), (torch.bfloat16, 0.04)])
def test_models_are_as_on_the_cpu(make_model, kind, dtype, bound):
    name, own = DEEPSEEK[kind]
    own = own | {"num_experts_per_tok": 4, "topk_group": 2}  # all: rounding chooses none
    is_near(make_model(name, **own), dtype, bound)


@pytest.mark.parametrize("preset", ["a8w8c8", "c8", "c8_fp8", "w4c8"])
def test_quantized_models_are_as_on_the_cpu(make_model, make_quantized, preset):
    name, own = DEEPSEEK["v2"]
    own = own | {"num_experts_per_tok": 4, "topk_group": 2}
    is_near(make_quantized(make_model(name, **own), preset), torch.float16, 0.1)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [16, 20, 128])
def test_attention_over_latents(dtype, heads, workspace):
    for sequences, context in ((1, 64), (3, 640), (5, 4096)):
        case = gpu_attention.latents(sequences, context, workspace, dtype, heads)
        case.check()
        own = min(32, 1 << (heads - 1).bit_length())
        for splits in (1, 3, 32):
            case.check((LatentTile(own, splits=splits), LatentTile(own, 32 // own)))
        assert torch.equal(case.call(0, None), case.call(0, None))
    gpu_attention.latents(2, 1024, workspace, dtype, heads, new=200).check()


def test_latents_are_written_as_on_the_cpu():
    from kernels.reference import apply_rope, rms_norm, write_kv

    torch.manual_seed(0)
    row = torch.randn(70, 16 * 192 + 576).cuda().bfloat16()
    q, cached = row[:, :3072].unflatten(1, (16, 192)), row[:, 3072:]
    norm, angle = torch.rand(512).cuda() + 0.5, torch.rand(100, 32).cuda() * 6
    cos, sin = (torch.cat((x, x), 1) for x in (angle.cos(), angle.sin()))
    positions, slots = torch.arange(70).cuda(), torch.arange(70).cuda() + 37
    pools = []
    for device in ("cuda", "cpu"):
        pages = [torch.zeros(2, 1, 64, n, dtype=torch.int8, device=device) for n in (64, 512)]
        pools.append(KVPool(*pages, *(torch.full((1, n), 0.03).to(device) for n in (64, 512))))
    got = latent_write(q, cached, norm, 1e-6, cos, sin, positions, pools[0], slots)
    wide, own = cached.float().cpu(), q[..., 128:].float().cpu()
    turns = [x[:70].cpu() for x in (cos, sin)]
    wanted, key = apply_rope(own, wide[:, None, 512:], *turns)
    latent = rms_norm(wide[:, :512], norm.cpu(), 1e-6)[:, None]
    write_kv(key, latent, pools[1], slots.cpu())
    assert (got.float().cpu() - wanted).norm() / wanted.norm() < 4e-3
    for ours, theirs in ((pools[0].k, pools[1].k), (pools[0].v, pools[1].v)):
        assert (ours.cpu().int() - theirs.int()).abs().max() <= 1
        assert (ours.cpu() != theirs).float().mean() < 1e-3
