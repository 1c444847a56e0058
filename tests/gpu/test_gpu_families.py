"""Declared families on a GPU: the CPU's logits and tokens, kernels of what each of them has."""

from __future__ import annotations

import pytest
import torch

from inference.config import EngineConfig
from inference.engine import Engine
from inference.requests.request import SamplingParams
from tests.formats.families.test_glm4_moe import SIZES as GLM
from tests.formats.families.test_gpt_oss import SIZES as GPT_OSS
from tests.mixtures import publish_mxfp4
from tests.tiny_families import TINY

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
if torch.cuda.is_available():
    import kernels.triton.reference as twins
    from kernels.bench import case, gpu_attention
    from kernels.op_inputs import KVPool
    from kernels.triton import fused
    from kernels.triton.attention.decode import decode_attention
    from kernels.triton.attention.prefill import prefill_attention
    from kernels.triton.attention.rope_cache import rope_write
    from kernels.triton.norms import norm_projections
    from kernels.triton.sampling.logits import softcap_logits
    from kernels.triton.tuning import KVSplit, PrefillTile
    from tests.gpu.test_triton_kernels import random_inputs

FAMILIES = TINY | {
    "olmo2": {},
    "phi3": {"head_dim": 96, "partial_rotary_factor": 0.75},
    "qwen3": {"head_dim": 80},
}
PROMPTS = [[(37 * i + j * j) % 380 + 1 for j in range(length)] for i, length in enumerate((5, 90))]
SIZES = EngineConfig(max_model_len=256, max_batch_size=4, prefix_cache=False)


def is_near(path, dtype: torch.dtype, bound: float) -> None:
    """Logits of a prompt are the CPU's, and so are the likeliest tokens of what a graph decodes."""
    cpu = Engine.from_pretrained(path, config=SIZES)
    gpu = Engine.from_pretrained(path, config=SIZES, device="cuda", dtype=dtype)
    wanted, found = (engine.score(PROMPTS[1]).cpu() for engine in (cpu, gpu))
    assert (found - wanted).norm() / wanted.norm() < bound
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    for prompt, out in zip(PROMPTS, gpu.generate(PROMPTS, params), strict=True):
        logits = cpu.score([*prompt, *out.token_ids])[len(prompt) - 1 : -1]
        own = logits.gather(1, torch.tensor(out.token_ids)[:, None])[:, 0]
        assert ((logits.max(1).values - own) / logits.std(1)).max() < 4 * bound
    gpu.check_integrity()


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 0.01), (torch.bfloat16, 0.04)])
def test_families_are_as_on_the_cpu(make_model, kind, dtype, bound):
    is_near(make_model(kind, **FAMILIES[kind]), dtype, bound)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 0.02), (torch.bfloat16, 0.08)])
@pytest.mark.parametrize("kind", ["glm4_moe", "gpt_oss", "mxfp4"])
def test_mixtures_are_as_on_the_cpu(make_model, tmp_path, kind, dtype, bound):
    """Every expert is chosen, so that no rounding sends a token to another."""
    sizes = GLM | {"num_experts_per_tok": 8, "topk_group": 2} if kind == "glm4_moe" else GPT_OSS
    family = "glm4_moe" if kind == "glm4_moe" else "gpt_oss"
    folder = make_model(
        family, **sizes | ({} if family == "glm4_moe" else {"num_experts_per_tok": 4})
    )
    is_near(publish_mxfp4(folder, tmp_path)[0] if kind == "mxfp4" else folder, dtype, bound)


@pytest.mark.parametrize("scheme", ["float", "c8"])
def test_graphs_of_a_gpt_oss_give_the_tokens_of_steps_one_by_one(scheme, monkeypatch):
    """Experts in MXFP4 of 2880 inputs, which are no multiple of 128."""
    from inference.backend import choose_backend
    from inference.bench.random_model import RandomCheckpoint, random_tokenizer
    from inference.bench.shapes import SHAPES

    small = {"num_hidden_layers": 2, "vocab_size": 4096}
    kinds = ["sliding_attention", "full_attention"]
    shape = SHAPES["gpt-oss-20b"] | small | {"layer_types": kinds}
    monkeypatch.setitem(SHAPES, "gpt-oss-20b", shape)
    prompts = [[(7 + i * j) % 4000 for j in range(40 * i + 1)] for i in range(8)]
    params, tokens = SamplingParams(max_tokens=12, ignore_eos=True), []
    for eager in (True, False):
        checkpoint = RandomCheckpoint("gpt-oss-20b", scheme, "cuda")
        sizes = {"max_model_len": 1024, "max_batch_size": 8, "max_batched_tokens": 512}
        engine = Engine(
            checkpoint,
            random_tokenizer(4096),
            EngineConfig(**sizes, eager=eager),
            choose_backend("cuda", checkpoint),
        )
        for layer in engine.model.layers:
            assert layer.feed_forward.gate_up.merged is not None
        tokens.append([out.token_ids for out in engine.generate(prompts, params)])
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("preset", ["a8w8c8", "a8w8c8_dynamic", "fp8_c8", "w4c8"])
@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text", "olmo2", "glm4", "phi3"])
def test_quantized_families_are_as_on_the_cpu(make_model, make_quantized, kind, preset):
    is_near(make_quantized(make_model(kind, **FAMILIES[kind]), preset), torch.float16, 0.1)


GRAPHED = {  # heads of 256, some layers with a window that the prompts pass; latent attention
    "gemma-3-4b": {"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"]},
    "deepseek-v2-lite": {"intermediate_size": 2048},
}


@pytest.mark.parametrize(
    ("kind", "scheme"),
    [("gemma-3-4b", s) for s in ("float", "a8w8c8", "a8w8c8_dynamic", "w4c8", "fp8_c8")]
    + [("deepseek-v2-lite", s) for s in ("float", "a8w8c8", "c8")],
)
def test_graphs_give_the_tokens_of_steps_one_by_one(kind, scheme, monkeypatch):
    from inference.backend import choose_backend
    from inference.bench.random_model import RandomCheckpoint, random_tokenizer
    from inference.bench.shapes import SHAPES

    small = {"num_hidden_layers": 2, "vocab_size": 4096} | GRAPHED[kind]
    monkeypatch.setitem(SHAPES, "small", SHAPES[kind] | small)
    params = [
        SamplingParams(max_tokens=9 + i, ignore_eos=True, temperature=0.8 * (i % 2), seed=i)
        for i in range(12)
    ]
    prompts = [[(7 + i * j) % 4000 for j in range(40 * i + 1)] for i in range(12)]
    tokens = []
    for eager in (True, False):
        checkpoint = RandomCheckpoint("small", scheme, "cuda")
        sizes = {"max_model_len": 1024, "max_batch_size": 12, "max_batched_tokens": 512}
        config = EngineConfig(**sizes, prefix_cache=False, eager=eager)
        backend = choose_backend("cuda", checkpoint)
        engine = Engine(checkpoint, random_tokenizer(4096), config, backend)
        tokens.append([out.token_ids for out in engine.generate(prompts, params)])
        engine.check_integrity()
    assert tokens[0] == tokens[1]


CHANGES = ("softcap", "sinks", "alibi", "softcap and sinks")


@pytest.mark.parametrize(
    ("storage", "kind"),
    [("int8", "head"), ("int8", "token"), ("float8_e4m3fn", "channel"), ("bfloat16", "none")],
)
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256, 512])
@pytest.mark.parametrize("change", CHANGES)
def test_attention_of_changed_logits(storage, kind, dim, change, workspace):
    torch.manual_seed(0)
    heads, group = 4, 4
    more = {"sliding_window": 100 if dim >= 256 else None}
    if "softcap" in change:
        more["softcap"] = 5.0
    if "sinks" in change:
        more["sinks"] = torch.randn(heads * group, device="cuda") * 3
    if change == "alibi":
        more["alibi"] = 2.0 ** -torch.arange(1.0, heads * group + 1, device="cuda")
    lengths, counts = (1, 63, 0, 64, 65, 700, 1024), (1, 1, 0, 64, 1, 333, 17)
    starts = torch.tensor((0, *counts), device="cuda").cumsum(0).int()
    inputs = random_inputs(
        getattr(torch, storage), kind, dim=dim, pages=128, lengths=lengths, **more
    )
    q = torch.randn(sum(counts), heads * group, dim, device="cuda", dtype=torch.bfloat16)
    wanted = twins.decode_attention(q[:7], inputs)
    for split in (None, KVSplit(2, 1), KVSplit(4, 3), KVSplit(2, 16)):
        got, again = (decode_attention(q[:7], inputs, workspace, split=split) for _ in "ab")
        assert case.relative(got, wanted) < 4e-3, split
        assert torch.equal(got, again)
    from dataclasses import replace

    inputs = replace(inputs, query_start=starts)
    wanted = twins.prefill_attention(q, inputs)
    tokens, stages = 64 if dim <= 128 else 32, 3 if dim <= 256 else 1
    for tile, decodes in ((None, 2), (PrefillTile(64, tokens, 8, stages), 0)):
        got = prefill_attention(q, inputs, workspace, decodes, tile=tile)
        assert case.relative(got, wanted) < 4e-3, tile


@pytest.mark.parametrize(
    ("storage", "kind", "dim"),
    [("int8", "head", 128), ("int8", "token", 512), ("bfloat16", "none", 256)],
)
def test_few_tokens_behind_many_share_their_pages(storage, kind, dim, workspace):
    from kernels.triton.tuning import prefill_tile

    torch.manual_seed(0)
    lengths, counts = (1, 8960, 300, 6000), (1, 20, 3, 70)
    starts = torch.tensor((0, *counts), device="cuda").cumsum(0).int()
    more = {"lengths": lengths, "query_start": starts, "sinks": torch.zeros(16, device="cuda")}
    inputs = random_inputs(getattr(torch, storage), kind, dim=dim, pages=256, **more)
    q = torch.randn(sum(counts), 16, dim, device="cuda", dtype=torch.bfloat16)
    width, kinds = inputs.block_tables.shape[1], {"none": 0, "head": 1, "token": 3}
    assert prefill_tile(q.device, len(q) * 16, dim, kinds[kind], width).splits > 1
    wanted = twins.prefill_attention(q, inputs)
    for decodes in (0, 1):
        found = [prefill_attention(q, inputs, workspace, decodes) for _ in range(5)]
        assert case.relative(found[0], wanted) < 4e-3
        assert all(torch.equal(found[0], again) for again in found)
        assert not workspace.arrivals.any()


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16])
def test_kinds_that_are_measured_are_right(dtype, workspace):
    for kind in gpu_attention.KINDS:
        gpu_attention.attention(3, 2048, workspace, dtype, kind=kind).check()
        gpu_attention.prefill((300,), 2048, workspace, dtype, kind=kind).check()


@pytest.mark.parametrize("storage", ["int8", "float8_e4m3fn", "bfloat16"])
@pytest.mark.parametrize("size", [200, 2560, 5376])
def test_norms_of_what_is_added_and_products(storage, size):
    torch.manual_seed(0)
    dtype = getattr(torch, storage)
    x, residual = (torch.randn(33, size, device="cuda").bfloat16() for _ in "ab")
    one, other = (torch.rand(size, device="cuda") + 0.5 for _ in "ab")
    for weight, after in ((one, other), (None, other), (None, None)):
        got, wanted = (
            f.add_rms_norm(x, residual, weight, 1e-6, None, dtype, after=after)
            for f in (fused, twins)
        )
        assert case.relative(got[2], wanted[2].double()) < 1e-3
        own, rows = (
            part[0].double() * (1 if part[1] is None else part[1].double())
            for part in (got, wanted)
        )
        assert case.relative(own, rows) < {"int8": 2e-3, "bfloat16": 2e-3}.get(storage, 1e-2)
    gate_up = torch.randn(33, 2 * size, device="cuda").bfloat16() * 3
    for activation in ("silu", "gelu", "gelu_tanh"):
        got, wanted = (
            f.gated_product(gate_up, None, dtype, activation=activation) for f in (fused, twins)
        )
        own, rows = (part[0].double() for part in (got, wanted))
        if dtype == torch.bfloat16:  # the last bit is that of the kernel's own tanh and erf
            assert case.relative(own, rows) < 1e-3
        else:
            assert (own != rows).double().mean() < 2e-3


def test_norms_of_whole_projections_and_bounded_logits():
    qkv = torch.randn(33, 4096 + 2 * 1024, device="cuda").bfloat16()
    norms = torch.rand(4096, device="cuda"), torch.rand(1024, device="cuda").bfloat16()
    wanted = twins.norm_projections(qkv, *norms, 1e-6)
    assert case.relative(norm_projections(qkv, *norms, 1e-6), wanted.double()) < 2e-3
    logits = torch.randn(5, 262208, device="cuda") * 40
    logits[1, 2] = float("nan")
    wanted = 30 * torch.tanh(logits.double() / 30)
    torch.testing.assert_close(
        softcap_logits(logits, 30.0).double(), wanted, rtol=1e-5, atol=1e-4, equal_nan=True
    )


@pytest.mark.parametrize("dim", [80, 96, 256, 512])
@pytest.mark.parametrize("tokens", [5, 400])
def test_cache_write_of_other_heads(dim, tokens):
    """Queries that grow with their position, too."""
    torch.manual_seed(0)
    qkv = torch.randn(tokens, 12, dim, device="cuda").bfloat16()
    angle = (torch.rand(tokens, dim // 2, device="cuda") * 6).repeat(1, 2)
    slots, growth = torch.arange(tokens, device="cuda") + 37, torch.rand(tokens, device="cuda")
    found = []
    for write, device in ((rope_write, "cuda"), (twins.rope_write, "cpu")):
        q, k, v = qkv.to(device).split([8, 2, 2], dim=1)
        pools = [
            torch.zeros(8, 2, *s, device=device).to(torch.int8) for s in ((64, dim), (dim, 64))
        ]
        scales = [torch.full((2,), 0.03, device=device) for _ in "kv"]
        turns = [t.to(device) for t in (angle.cos(), angle.sin())]
        pool = KVPool(*pools, *scales)
        out = write(q, k, v, *turns, pool, slots.to(device), growth=growth.to(device))
        found.append((out.cpu(), *(t.cpu() for t in pools)))
    got, wanted = found
    assert case.relative(got[0], wanted[0].double()) < 4e-3
    assert (got[1].int() - wanted[1].int()).abs().max() <= 1
    assert (got[1] != wanted[1]).float().mean() < 1e-3
    assert torch.equal(got[2], wanted[2])
