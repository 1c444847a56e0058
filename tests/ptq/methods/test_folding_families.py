"""What methods fold into a model of any declared family leaves its function as it was."""

import pytest
import torch

from formats.families.registry import BY_TYPE
from ptq.methods.awq import AWQSpec
from ptq.methods.common.folding import SmoothedGroup
from ptq.methods.rotation import RotationSpec
from ptq.methods.rtn import RTNSpec
from ptq.methods.smooth_k import SmoothK, SmoothKSpec
from ptq.methods.smoothquant import SmoothQuantSpec
from ptq.pipeline.passes import observe
from tests.families import distance, transformers_logits
from tests.ptq.methods.test_rotation import write_view
from tests.ptq.methods.test_shift import shifted_work
from tests.ptq.quantizing import IDS, fold_alpha, make_plan, observed_work
from tests.tiny_families import TINY

MODELS = TINY | {"olmo2": {}, "phi3": {}}
LIKE_LLAMA = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"num_key_value_heads": 1},
}
BOTH = {"attention_input", "attention_output", "mlp_input", "mlp_output"}
UNSMOOTHED = {"olmo2": BOTH - {"attention_output", "mlp_output"}}
UNSMOOTHED["olmo3"] = UNSMOOTHED["olmo2"]  # no norm before, which could be divided


def outputs(work) -> list[torch.Tensor]:
    return [work.block.run(sample) for sample in range(3)]


@torch.no_grad()
def plant(work) -> None:
    """Two channels of K that are far larger than the others, and the same of Q smaller."""
    names, rows = work.block.family.attention, [5, 9]
    attention = work.module(work.block.attention)
    for k, q in ((names.k, names.q), (names.k_norm, names.q_norm)):
        if hasattr(attention, k):
            attention.get_submodule(k).weight[rows] *= 30
            attention.get_submodule(q).weight[rows] /= 16
    observe(work)


def assert_same(work, before: list[torch.Tensor], most: float = 1e-5) -> None:
    for found, wanted in zip(outputs(work), before, strict=True):
        assert distance(found, wanted) < most


@pytest.mark.parametrize("kind", MODELS | LIKE_LLAMA)
def test_every_group_is_smoothed_through_its_own_source(make_model, tmp_path, kind):
    plan = make_plan(make_model(kind, **(MODELS | LIKE_LLAMA)[kind]), tmp_path)
    for index in range(2):
        work = observed_work(plan, index)
        norm = work.block.module.input_layernorm.weight.clone() if kind in LIKE_LLAMA else None
        before, sources = outputs(work), {group.source for group in work.groups}
        assert {group.kind for group in work.groups} == BOTH - UNSMOOTHED.get(kind, set())
        after = BY_TYPE[kind].norms.after
        assert not {source.rpartition(".")[2] for source in sources} & set(after)
        for group in [SmoothedGroup(work, group) for group in work.groups]:
            folding = fold_alpha(group, 0.7)
            assert folding.scale.max() / folding.scale.min() > 1.5
            group.commit(folding)
        assert_same(work, before, 3e-6 if kind in LIKE_LLAMA else 1e-5)
        for name, tensor in work.folded.items():  # what is stored is what was computed with
            module, _, leaf = name.rpartition(".")
            assert tensor.dtype == torch.bfloat16
            assert torch.equal(work.module(module).get_parameter(leaf), tensor.float())
        if kind in LIKE_LLAMA:
            divided = {"input_layernorm.weight", "post_attention_layernorm.weight"}
            assert not torch.equal(work.module(f"{work.block.name}.input_layernorm").weight, norm)
            divided |= {"self_attn.v_proj.bias"} if kind in ("llama", "qwen2") else set()
            divided |= {"mlp.up_proj.bias"} if kind == "llama" else set()
            assert set(work.folded) == {f"{work.block.name}.{name}" for name in divided}


@pytest.mark.parametrize("kind", ["gemma2", "granite", "glm4"])
@pytest.mark.parametrize("spec", [SmoothQuantSpec(search_samples=2), AWQSpec(search_samples=2)])
def test_searched_strengths_keep_the_function(make_model, tmp_path, kind, spec):
    work = observed_work(make_plan(make_model(kind, **MODELS[kind]), tmp_path))
    before, method = outputs(work), spec.algorithm()
    observe(work, [method])
    method.solve(work)
    method.commit(work)
    assert not work.events
    assert len(work.smoothing) == len(spec.targets)
    assert work.folded
    assert_same(work, before)


@pytest.mark.parametrize("kind", MODELS)
def test_k_is_smoothed_whatever_turns_and_whatever_norms_it(make_model, tmp_path, kind):
    """Of both layers, whose rotations may differ; norms of 1 + w are rounded to the file's type."""
    plan = make_plan(make_model(kind, **MODELS[kind]), tmp_path, "c8", methods=(SmoothKSpec(),))
    for index in range(2):
        work = observed_work(plan, index)
        work.dtype_of = lambda _: torch.float32
        plant(work)
        before, method = outputs(work), SmoothK(SmoothKSpec(alpha=1.0))
        seen = work.observed(work.block.attention, "k_cache").channel_absmax.clone()
        method.prepare(work)
        method.solve(work)
        factors = method.factors
        assert factors is not None
        assert factors.max() / factors.min() > 8
        method.commit(work)
        assert_same(work, before)
        observe(work)
        after = work.observed(work.block.attention, "k_cache").channel_absmax
        assert torch.allclose(after, (seen / factors).float(), rtol=1e-4)


def test_channels_that_do_not_turn_have_a_factor_each(make_model, tmp_path):
    for kind, pairs in (("smollm3", (16, 32)), ("glm", (24, 24)), ("phi3", (16, 16))):
        plan = make_plan(make_model(kind, **MODELS[kind]), tmp_path, "c8", methods=(SmoothKSpec(),))
        assert tuple(len(set(observed_work(plan, i).settings.pairs)) for i in range(2)) == pairs


@pytest.mark.parametrize("kind", MODELS)
def test_the_function_stays_in_another_basis(make_model, tmp_path, kind):
    """Norms after a layer keep the residual stream as it is; values turn in every family."""
    model = make_model(kind, **MODELS[kind])
    spec = RotationSpec(residual=not BY_TYPE[kind].norms.after, seed=3)
    rotated = write_view(model, tmp_path / "rotated", spec, torch.float32)
    before, after = (transformers_logits(folder, IDS) for folder in (model, rotated))
    assert distance(after, before) < 1e-5


@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text", "granite", "smollm3"])
def test_v_is_centred_where_attention_can_have_biases(make_model, tmp_path, kind):
    work, method = shifted_work(make_model(kind, **MODELS[kind]), tmp_path)
    work.dtype_of = lambda _: torch.float32
    before = outputs(work)
    method.solve(work)
    method.commit(work)
    assert not work.events
    assert work.folded
    assert_same(work, before)


def test_sinks_and_routers_are_left_alone_by_name(make_model, tmp_path):
    from dataclasses import replace

    from tests.experts import MOE

    work, method = shifted_work(make_model("llama"), tmp_path)
    work.block.family = replace(
        work.block.family, attention=replace(work.block.family.attention, sinks="sinks")
    )
    method.prepare(work)
    assert "sinks take a part" in work.events[-1].message
    methods = (SmoothQuantSpec(), RTNSpec())
    folder = make_model("mixtral", **MOE["mixtral"])
    work = observed_work(make_plan(folder, tmp_path / "mixture", methods=methods))
    work.groups = tuple(g.model_copy(update={"offset": 1.0}) for g in work.groups)
    SmoothQuantSpec().algorithm().prepare(work)
    assert [e.message for e in work.events if "routers" in e.message]
