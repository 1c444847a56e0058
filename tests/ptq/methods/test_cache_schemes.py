"""Every way to quantize the cache, from calibration to the engine."""

import pytest
import torch

from formats.checkpoint.read import Checkpoint
from formats.errors import EngineError
from formats.scheme import PRESETS, KVCacheSpec, Scheme, WeightSpec
from inference.engine import Engine
from inference.models.kv_cache import _quantized
from inference.models.model import KVHeads
from inference.requests.request import SamplingParams
from ptq.methods.rtn import RTNSpec
from ptq.plan.plan import build_plan
from ptq.recipe.problems import Where
from ptq.recipe.reading import read_recipe
from ptq.recipe.schema import CachesSpec
from ptq.recipe.strict_yaml import Origin
from tests.fake_quantized import fake_quantized_logits
from tests.ptq.quantizing import (
    IDS,
    divergence,
    edit_model,
    executed,
    make_plan,
    opened,
    quantized,
    scored,
)
from tests.refusals import refused, refused_recipe
from tests.tiny_families import DEEPSEEK, TINY

GRANULARITIES = ("per_head", "per_tensor", "per_channel", "per_token_head")


def assert_alone_as_together(engine: Engine) -> None:
    """What is said to a prompt does not depend on the others of its batch."""
    prompts = [IDS[:5].tolist(), IDS[:70].tolist()]
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    together = [out.token_ids for out in engine.generate(prompts, params)]
    assert together == [engine.generate([one], params)[0].token_ids for one in prompts]


@pytest.mark.parametrize("dtype", ["int8", "fp8_e4m3"])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_cache_from_calibration_to_tokens(tiny_llama, tmp_path, dtype, granularity):
    spec = KVCacheSpec(dtype=dtype, granularity=granularity)
    result = quantized(tiny_llama, tmp_path / "out", Scheme(kv_cache=spec), methods=())
    checkpoint = Checkpoint.open(result.checkpoint, verify=True)
    assert checkpoint.scheme.kv_cache == spec
    entries = [row for row in result.scale_table.entries if row.role in ("k_cache", "v_cache")]
    assert len(entries) == (0 if spec.dynamic else 4)
    assert all(row.dtype == dtype for row in entries)
    if not spec.dynamic:
        k, v = checkpoint.kv_scales["model.layers.1.self_attn"]
        assert k.shape == ((2, 32) if granularity == "per_channel" else (2,))
        assert v.shape == (2,)
    engine = Engine.from_pretrained(result.checkpoint)
    assert engine.quantized_kv
    lost = divergence(scored(tiny_llama), engine.score(IDS).log_softmax(-1))
    assert 0 < lost < (0.01 if dtype == "int8" else 0.1)
    assert_alone_as_together(engine)
    token = {"int8": 1, "fp8_e4m3": 1}[dtype] * 2 * 2 * 2 * 32
    assert engine.kv_bytes_per_token == token + (2 * 2 * 2 * 4 if spec.dynamic else 0)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_fp8_keys_less_their_means_lose_less(make_model, tmp_path, granularity):
    """Keys that are much the same in every token, as those of slow pairs of channels are."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if name.endswith("k_proj.bias"):
                tensor.view(-1, 32)[:, [14, 15, 30, 31]] = 8  # turned by little

    model = edit_model(make_model("qwen2"), tmp_path / "model", change)
    lost, exact = [], scored(model)
    for centred in (False, True):
        spec = KVCacheSpec(dtype="fp8_e4m3", granularity=granularity, center_keys=centred)
        checkpoint = opened(model, tmp_path / str(centred), Scheme(kv_cache=spec), methods=())
        assert checkpoint.scheme.kv_cache == spec
        assert len(checkpoint.kv_offsets) == 2 * centred
        found = scored(checkpoint.path)
        wanted = fake_quantized_logits(checkpoint, IDS).log_softmax(-1)
        assert divergence(wanted, found) < 1e-4
        lost.append(divergence(exact, found))
    assert lost[1] < 0.5 * lost[0]


def test_finer_scales_of_k_lose_less(make_model, tmp_path):
    """With outlier channels in K, a scale for each channel beats one for each head."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if name.endswith("k_proj.weight"):
                tensor[[5, 21, 37, 53]] *= 30
            if name.endswith("q_proj.weight"):
                tensor[[i for i in range(128) if i % 16 == 5]] /= 32

    source, ratios = edit_model(make_model("llama", seed=3), tmp_path / "model", change), {}
    for granularity in ("per_head", "per_channel"):
        spec = KVCacheSpec(granularity=granularity)
        checkpoint = opened(source, tmp_path / granularity, Scheme(kv_cache=spec), methods=())
        ratios[granularity] = divergence(scored(source), scored(checkpoint.path))
    assert ratios["per_channel"] < 0.7 * ratios["per_head"]


def test_weights_alone_take_a_cache_with_them(tiny_llama, tmp_path):
    spec = WeightSpec(dtype="int4", granularity="group", group_size=64, symmetric=False)
    scheme = Scheme(weights=spec, kv_cache=KVCacheSpec(dtype="fp8_e4m3", center_keys=True))
    assert scheme.wac == "w4cf8_g64_asymmetric"
    checkpoint = opened(tiny_llama, tmp_path / "out", scheme, methods=(RTNSpec(scale="mse"),))
    assert checkpoint.scheme == scheme
    text = Engine.from_pretrained(checkpoint.path).generate(
        ["def f"], SamplingParams(max_tokens=4, ignore_eos=True)
    )[0]
    assert len(text.token_ids) == 4


TURNED = KVCacheSpec(dtype="int4", granularity="per_token_head", rotate_keys=True, center_keys=True)
INT4 = {
    "c4": TURNED.model_copy(update={"compensate_keys": True}),
    "uncompensated": TURNED,
    "static": KVCacheSpec(dtype="int4"),
    "by channel": KVCacheSpec(dtype="int4", granularity="per_channel"),
    "k8v4": KVCacheSpec(value_dtype="int4", granularity="per_token_head"),
    "k8v4 static": KVCacheSpec(value_dtype="int4"),
}


@pytest.mark.parametrize("name", INT4)
def test_int4_cache_from_calibration_to_tokens(tiny_llama, tmp_path, name):
    spec = INT4[name]
    result = quantized(tiny_llama, tmp_path / "out", Scheme(kv_cache=spec), methods=())
    checkpoint = Checkpoint.open(result.checkpoint, verify=True)
    assert checkpoint.scheme.kv_cache == spec
    types = {row.role: row.dtype for row in result.scale_table.entries}
    assert types == ({} if spec.dynamic else {"k_cache": spec.dtype, "v_cache": "int4"})
    engine = Engine.from_pretrained(result.checkpoint)
    found = engine.score(IDS).log_softmax(-1)
    wanted = fake_quantized_logits(checkpoint, IDS).log_softmax(-1)
    assert divergence(wanted, found) < 1e-4
    assert 0 < divergence(scored(tiny_llama), found) < 0.02
    size = 16 + (32 if spec.value_dtype else 16) + (4 if spec.dynamic else 0)
    assert engine.kv_bytes_per_token == 2 * 2 * size  # blocks, heads
    assert_alone_as_together(engine)
    engine.check_integrity()


def test_every_block_may_have_a_cache_of_its_own(tiny_llama, tmp_path):
    own = CachesSpec(match=("model.layers.1",), kv_cache=INT4["c4"])
    plan = make_plan(tiny_llama, tmp_path / "out", Scheme(kv_cache=KVCacheSpec()), methods=())
    recipe = plan.recipe.model_copy(update={"caches": (own,)})
    plan = plan.model_copy(update={"recipe": recipe})
    result = executed(plan)
    checkpoint = Checkpoint.open(result.checkpoint, verify=True)
    first, second = (f"model.layers.{i}.self_attn" for i in range(2))
    assert checkpoint.kv_scheme_of(first) == KVCacheSpec()
    assert checkpoint.kv_scheme_of(second) == own.kv_cache
    assert list(checkpoint.kv_scales) == [first]
    assert list(checkpoint.kv_offsets) == [second]
    engine = Engine.from_pretrained(result.checkpoint)
    assert [pool.k.dtype for pool in engine.pools] == [torch.int8, torch.uint8]
    assert engine.kv_bytes_per_token == 2 * (64 + 36)
    wanted = fake_quantized_logits(checkpoint, IDS).log_softmax(-1)
    found = engine.score(IDS).log_softmax(-1)
    assert divergence(wanted, found) < 1e-4
    checkpoint.query_moments = {second: -torch.eye(32).repeat(2, 1, 1)}
    with pytest.raises(EngineError, match="not those of queries"):
        _quantized(checkpoint, second, KVHeads(2, 32, 32))
    floats = Engine.from_pretrained(result.checkpoint, quantized_kv=False)
    assert {pool.k.dtype for pool in floats.pools} == {torch.float32}
    assert not floats.quantized_kv


@pytest.mark.parametrize(
    ("spec", "message"), [(INT4["static"], "have 8 bits"), (INT4["c4"], "static scales")]
)
def test_caches_that_a_model_does_not_have_are_refused(make_model, tmp_path, spec, message):
    family, overrides = DEEPSEEK["v2"]
    model = make_model(family, **overrides)
    refused_recipe(message, make_plan, model, tmp_path / "out", Scheme(kv_cache=spec), methods=())


@pytest.mark.parametrize(
    ("kind", "preset"), [("gemma2", "c4"), ("gemma2", "c8_fp8"), ("v2", "c8_fp8")]
)
def test_keys_that_cannot_be_centred_stay_unless_a_recipe_says_so(
    make_model, tmp_path, kind, preset
):
    family, overrides = DEEPSEEK.get(kind, (kind, TINY.get(kind)))
    model = make_model(family, **overrides)
    plan = make_plan(model, tmp_path / "out", preset, methods=())
    assert plan.recipe.scheme.kv_cache == PRESETS[preset].kv_cache.uncentred
    result = executed(plan)
    engine = Engine.from_pretrained(result.checkpoint)
    assert engine.quantized_kv
    assert len(engine.generate([[5, 6, 7]], SamplingParams(max_tokens=4))[0].token_ids) <= 4
    recipe = plan.recipe.model_copy(update={"scheme": PRESETS[preset]})
    said = ("scheme", "kv_cache", "center_keys")
    where = Where({(): Origin("recipe"), said: Origin("a.yaml", 7)})
    typed = "scheme={kv_cache: {dtype: fp8_e4m3, center_keys: true}}"
    assert said in read_recipe("c8", [typed]).where.origins
    fault = "have 8 bits, and stay" if kind == "v2" else "a.yaml:7: .*center_keys: .*bounds its"
    refused_recipe(fault, build_plan, recipe, Checkpoint.open(model), where, force=True)


@pytest.mark.parametrize(
    "fields",
    [
        {"rotate_keys": True},
        {"center_keys": True},
        {"compensate_keys": True},
        {"value_dtype": "int4"},
        {"dtype": "int8", "granularity": "per_token_head", "compensate_keys": True},
    ],
)
def test_schemes_that_are_no_cache_are_refused(fields):
    with pytest.raises(ValueError, match="per_token_head|stand beside int8 keys|int4 keys alone"):
        KVCacheSpec(**{"dtype": "int4"} | fields)
    refused("centred in integers", KVCacheSpec, center_keys=True)


def test_a_pattern_that_matches_no_block_is_refused(tiny_llama, tmp_path):
    plan = make_plan(tiny_llama, tmp_path / "out", Scheme(kv_cache=KVCacheSpec()), methods=())
    own = CachesSpec(match=("model.layers.7",), kv_cache=None)
    recipe = plan.recipe.model_copy(update={"caches": (own,)})
    refused_recipe("matches no block", build_plan, recipe, Checkpoint.open(tiny_llama))
