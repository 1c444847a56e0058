"""K smoothing: factors that keep the function and spare the cache its outliers."""

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from calibrate.attention import ATTENTION
from formats.checkpoint.read import Checkpoint
from formats.scheme import PRESETS, KVCacheSpec, Scheme
from ptq.methods.common.cache import key_mean, query_moments
from ptq.methods.rtn import RTNSpec
from ptq.methods.smooth_k import SmoothK, SmoothKSpec, key_factors
from ptq.methods.smoothquant import SmoothQuantSpec
from ptq.pipeline.passes import observe
from tests.families import transformers_logits
from tests.ptq.quantizing import (
    IDS,
    divergence,
    edit_model,
    make_plan,
    observed_work,
    quantized,
    scored,
    solved,
)

FAMILIES = {
    "llama": {"num_attention_heads": 6, "head_dim": 24, "hidden_size": 96},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"num_key_value_heads": 1},
}


def plant(tensors: dict[str, torch.Tensor]) -> None:
    """Channels of K that are far larger than the others, and of Q that are smaller."""
    for name, tensor in tensors.items():
        if name.endswith("k_proj.weight"):
            tensor[[5, 9]] *= 30
        if name.endswith("k_norm.weight"):  # then it alone decides
            tensor[[5, 9]] *= 20
        if name.endswith("q_proj.weight"):
            tensor[[5, 9]] /= 16


def test_factors_are_those_of_the_paper():
    absmax = torch.tensor([[8.0, 1.0, 2.0, 0.5], [0.0, 3.0, 0.0, 3.0]])  # pairs (0, 2), (1, 3)
    factors = key_factors(absmax, 0.5, (0, 1, 0, 1))
    assert factors[0].tolist() == pytest.approx([8**0.25, 8**-0.25] * 2)
    assert factors[1].tolist() == [1.0] * 4  # a dead pair, and one that is alone
    assert key_factors(absmax, 1.0, (0, 1, 0, 1), exact=True)[0].tolist() == [4.0, 0.25, 4.0, 0.25]
    k = torch.tensor([[8.0, 2.0, 1.0, 1.0]])
    part = key_factors(k, 1.0, (0, 0, 1, 2))  # one pair, two alone
    assert part.tolist() == [[4.0, 4.0, 0.5, 0.5]]


@pytest.mark.parametrize("scheme", ["c8", "a8w8c8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_function_stays(make_model, tmp_path, family, scheme):
    model = edit_model(make_model(family, **FAMILIES[family]), tmp_path / "model", plant)
    methods = (SmoothKSpec(), *((RTNSpec(),) if scheme != "c8" else ()))
    work = observed_work(make_plan(model, tmp_path / "out", PRESETS[scheme], methods=methods))
    seen = work.observed(work.block.attention, "k_cache").channel_absmax.clone()
    before = [work.block.run(sample) for sample in range(3)]
    method = solved(work, SmoothK(SmoothKSpec(alpha=1.0)), see=False)
    normed = family == "qwen3"
    rounded = scheme == "c8" or family in ("qwen2", "qwen3")
    basis = seen.amax(dim=0, keepdim=True).expand_as(seen) if normed else seen
    factors = method.factors
    assert factors is not None
    assert torch.equal(factors, key_factors(basis, 1.0, work.settings.pairs, exact=rounded))
    assert factors.max() / factors.min() > 8
    method.commit(work)
    for sample, expected in enumerate(before):
        assert (work.block.run(sample) - expected).norm() / expected.norm() < 3e-6
    observe(work)
    after = work.observed(work.block.attention, "k_cache").channel_absmax
    assert torch.allclose(after, (seen / factors).float(), rtol=1e-4)
    parts = {"k_norm", "q_norm"} if normed else {"k_proj", "q_proj"}
    leaves = {"weight"} if scheme == "c8" or normed else set()
    leaves |= {"bias"} if family == "qwen2" else set()
    names = {f"model.layers.0.self_attn.{part}.{leaf}" for part in parts for leaf in leaves}
    assert set(work.folded) == names
    for name, tensor in work.folded.items():  # powers of two: stored without loss
        module, _, leaf = name.rpartition(".")
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(work.module(module).get_parameter(leaf), tensor.float())


@pytest.mark.parametrize(
    "spec", [KVCacheSpec(), KVCacheSpec(granularity="per_token_head"), PRESETS["c4"].kv_cache]
)
def test_alone_it_spares_the_cache_and_others_open_the_checkpoint(tiny_llama, tmp_path, spec):
    model = edit_model(tiny_llama, tmp_path / "model", plant)
    scheme, found = Scheme(kv_cache=spec), {}
    for name, methods in {"plain": (), "smooth": (SmoothKSpec(),)}.items():
        result = quantized(model, tmp_path / name, scheme, methods=methods)
        found[name] = divergence(scored(model), scored(result.checkpoint))
    assert found["smooth"] < 0.7 * found["plain"]
    assert {row.alpha for row in result.smoothing} != {None}
    assert {row.source for row in result.smoothing} == {
        f"model.layers.{i}.self_attn.k_proj" for i in range(2)
    }
    before, after = (transformers_logits(f, IDS) for f in (model, result.checkpoint))
    assert torch.allclose(before, after, atol=1e-4)
    k, q = (Checkpoint.open(f).tensor("model.layers.0.self_attn.k_proj.weight") for f in
            (model, result.checkpoint))  # fmt: skip
    assert not torch.equal(k, q)


def test_static_scales_are_those_of_the_smoothed_keys(tiny_llama, tmp_path):
    model = edit_model(tiny_llama, tmp_path / "model", plant)
    methods = (SmoothQuantSpec(alphas=(0.8,), search_samples=2), SmoothKSpec(), RTNSpec())
    result = quantized(model, tmp_path / "out", methods=methods)
    name = "model.layers.0.self_attn"
    stats = next(r for r in result.scale_table.entries if r.tensor == f"{name}.k_scale")
    k, _ = Checkpoint.open(result.checkpoint).kv_scales[name]
    assert k.max().item() == pytest.approx(stats.absmax / 127, rel=1e-6)
    other = quantized(model, tmp_path / "plain", methods=(methods[0], methods[2]))
    assert k.max() < Checkpoint.open(other.checkpoint).kv_scales[name][0].max() / 3
    exact, ours, theirs = map(scored, (model, result.checkpoint, other.checkpoint))
    assert divergence(exact, ours) < divergence(exact, theirs)


def attention_reads(work, sample: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K [tokens, kv heads, D] and Q [tokens, heads, D] after rotary embedding, by transformers."""
    found: list[torch.Tensor] = []

    def attend(module, query, key, value, *args, **kwargs):
        found.extend(x[0].transpose(0, 1) for x in (key, query))
        return ours(module, query, key, value, *args, **kwargs)

    ours = ALL_ATTENTION_FUNCTIONS[ATTENTION]
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attend)
    try:
        work.block.run(sample)
    finally:
        ALL_ATTENTION_FUNCTIONS.register(ATTENTION, ours)
    return found[0], found[1]


@pytest.mark.parametrize("compensated", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_turned_keys_get_factors_by_power(make_model, tmp_path, family, compensated):
    """(rms K / rms Q)^(1/2) of each pair, K less its mean, of what attention reads.

    With feedback (rms K^3 / rms Q)^(1/4).
    """
    model = edit_model(make_model(family, **FAMILIES[family]), tmp_path / "model", plant)
    spec = PRESETS["c4"].kv_cache
    assert spec is not None
    scheme = Scheme(kv_cache=spec.model_copy(update={"compensate_keys": compensated}))
    work = observed_work(make_plan(model, tmp_path / "out", scheme, methods=(SmoothKSpec(),)))
    read = [attention_reads(work, sample) for sample in work.samples(4)]
    k, q = (torch.cat(x).double() for x in zip(*read, strict=True))
    heads, half = k.shape[1], k.shape[2] // 2
    power = (k - key_mean(work)).square().sum(dim=0)
    asked = q.unflatten(1, (heads, -1)).square().sum(dim=(0, 2))
    if family == "qwen3":  # all heads have one norm
        asked = asked.sum(dim=0, keepdim=True)
    power, asked = (x[:, :half] + x[:, half:] for x in (power, asked))
    ratio = (power**3 / asked) ** 0.5 if compensated else power / asked
    basis = torch.cat((ratio, ratio), dim=1) ** 0.25
    basis = basis.amax(dim=0, keepdim=True).expand_as(basis) if family == "qwen3" else basis
    method = solved(work, SmoothK(SmoothKSpec(alphas=(1.0,))), see=False)
    wanted = key_factors(basis, 1.0, work.settings.pairs, exact=True)
    assert method.factors is not None  # the cache loses less with them
    assert torch.equal(method.factors, wanted)
    assert wanted.max() / wanted.min() >= 4


@pytest.mark.parametrize("family", FAMILIES)
def test_moments_are_those_of_all_queries_that_read_a_head(make_model, tmp_path, family):
    model = edit_model(make_model(family, **FAMILIES[family]), tmp_path / "model", plant)
    work = observed_work(make_plan(model, tmp_path / "out", PRESETS["c4"], methods=()))
    read = [attention_reads(work, sample) for sample in range(len(work.block.inputs))]
    k, q = (torch.cat(x).double() for x in zip(*read, strict=True))
    own = q.unflatten(1, (k.shape[1], -1))  # [tokens, kv heads, group, D]
    wanted = work.settings.positions.moments(torch.einsum("thgi,thgj->hij", own, own) / len(k))
    torch.testing.assert_close(query_moments(work), wanted, rtol=1e-4, atol=1e-5)
    steps = torch.linspace(1, 2, k.shape[2]).double()
    factors = steps[list(work.settings.pairs)].expand(k.shape[1:])
    work.divide(work.block.attended, "k_cache", factors)
    scaled = wanted * factors[:, :, None] * factors[:, None]
    torch.testing.assert_close(query_moments(work), scaled, rtol=1e-4, atol=1e-5)


def test_turned_keys_are_left_alone_where_no_sample_shows_queries(tiny_llama, tmp_path):
    work = observed_work(make_plan(tiny_llama, tmp_path, PRESETS["c4"], methods=(SmoothKSpec(),)))
    work.block.inputs.clear()
    method = solved(work, SmoothK(SmoothKSpec(alpha=0.5)), see=False)
    (row,) = work.smoothing
    assert row.alpha is None
    assert method.factors is None


def test_a_mean_that_the_cache_subtracts_decides_nothing(make_model, tmp_path):
    """A large bias of k in channels that do not turn away is no reason to smooth."""

    def biased(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if name.endswith("k_proj.bias"):
                tensor[-1] += 40  # of the last pair, which turns slowest

    choices = []
    for name, change in {"plain": lambda _: None, "biased": biased}.items():
        model = edit_model(make_model("qwen2"), tmp_path / name, change)
        plan = make_plan(model, tmp_path / f"{name}-out", PRESETS["c4"], methods=(SmoothKSpec(),))
        work = observed_work(plan)
        solved(work, SmoothK(SmoothKSpec(alphas=(1.0,))), see=False)
        choices.append(work.smoothing[0])
    plain, moved = choices
    assert {c.alpha for c in moved.candidates} == {None, 1.0}
    for a, b in zip(plain.candidates, moved.candidates, strict=True):
        assert b.error < 4 * a.error


def test_what_does_not_help_is_left_alone(tiny_llama, tmp_path):
    """With a scale for each channel there is nothing to even out."""
    scheme = Scheme(kv_cache=KVCacheSpec(granularity="per_channel"))
    work = observed_work(make_plan(tiny_llama, tmp_path, scheme, methods=(SmoothKSpec(),)))
    before = {name: p.clone() for name, p in work.block.module.named_parameters()}
    method = solved(work, SmoothK(SmoothKSpec()), see=False)
    method.commit(work)
    (row,) = work.smoothing
    assert row.alpha is None
    assert [event.kind for event in work.events] == ["fallback"]
    assert all(torch.equal(p, before[n]) for n, p in work.block.module.named_parameters())


def test_layers_that_stay_as_stored_are_left_alone(tiny_llama, tmp_path):
    """Those of a checkpoint in MXFP4: it could not be opened with changed ones in their place."""
    model = edit_model(tiny_llama, tmp_path / "model", plant)
    four = quantized(model, tmp_path / "four", "mxfp4", methods=(RTNSpec(),)).checkpoint
    result = quantized(four, tmp_path / "out", "c8", methods=(SmoothKSpec(),))
    before, after = Checkpoint.open(four), Checkpoint.open(result.checkpoint, verify=True)
    assert all(torch.equal(before.tensor(n), after.tensor(n)) for n in before.names())
    layer = "model.layers.0.self_attn.k_proj"
    assert result.events[0].message == f"not smoothed: {layer} is kept as it is stored"


def test_schemes_and_orders_that_do_not_fit(tiny_llama, tmp_path):
    with pytest.raises(ValueError, match="leaves the cache in floating point"):
        make_plan(tiny_llama, tmp_path, "a8w8", methods=(SmoothKSpec(), RTNSpec()))
    with pytest.raises(ValueError, match="the order is smoothquant, smooth_k, rtn"):
        make_plan(tiny_llama, tmp_path, methods=(SmoothKSpec(), SmoothQuantSpec(), RTNSpec()))
