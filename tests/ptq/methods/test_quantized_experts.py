"""Mixtures of experts through plan and driver: routing as it was, one strength, shared Hessians."""

import re
from functools import partial

import pytest
import torch

from calibrate.statistics import Statistics
from formats.checkpoint.read import Checkpoint
from formats.errors import RecipeError
from ptq.methods import gptq
from ptq.methods.awq import AWQSpec
from ptq.methods.common.folding import SmoothedGroup, power_of_two
from ptq.methods.gptq import GPTQ, GPTQSpec
from ptq.methods.refine import RefineSpec
from ptq.methods.rtn import RTNSpec
from ptq.methods.smoothquant import SmoothQuant, SmoothQuantSpec
from ptq.pipeline.passes import observe, starved_experts
from ptq.plan.describe import explain, group_modules
from ptq.report.parts.loss import one_of_experts
from tests.experts import FORMS, MOE, stack_experts
from tests.ptq.quantizing import (
    edit_model,
    files,
    fold_alpha,
    goes_on,
    make_plan,
    observed_work,
    opened,
    quantized,
    random_tokens,
    solved,
)

SMOOTH = (SmoothQuantSpec(alphas=(0.5, 0.9), search_samples=2), RTNSpec())
ROUTERS = {
    "mixtral": ["block_sparse_moe.gate"],
    "qwen2_moe": ["mlp.gate", "mlp.shared_expert_gate"],
    "qwen3_moe": ["mlp.gate"],
}


@pytest.mark.parametrize("family", MOE)
def test_routers_stay_in_float_and_experts_belong_together(make_model, tmp_path, family):
    plan = make_plan(make_model(family, **MOE[family]), tmp_path, methods=SMOOTH)
    block, (layer, (gate, up, down)) = "model.layers.0", FORMS[family]
    routers = [f"{block}.{name}" for name in ROUTERS[family]]
    by_name = {m.name: m for m in plan.modules}
    inside = [m for m in plan.modules if m.name.startswith(f"{block}.")]
    assert [m.name for m in inside if m.action == "float"] == routers
    assert all(by_name[name].reason.startswith("router") for name in routers)
    experts = f"{block}.{layer}.experts"
    fused = {by_name[f"{experts}.{i}.{leaf}"].fused_group for i in (0, 1) for leaf in (gate, up)}
    assert len(fused) == 2
    assert by_name[f"{experts}.1.{down}"].fused_group is None
    groups = [g for g in plan.smoothing if g.block == block]
    (source,) = [g for g in groups if g.kind == "mlp_input"]
    count = 8 if family == "qwen3_moe" else 4
    shared = family == "qwen2_moe"
    assert source.source == f"{block}.post_attention_layernorm"
    assert list(source.routers) == routers
    assert len(source.consumers) == 2 * (count + shared)
    outputs = [g for g in groups if g.kind == "mlp_output"]
    assert len(outputs) == count + shared
    assert {g.tied for g in outputs if ".experts." in g.source} == {f"{experts}.*.{up}"}
    assert [g.tied for g in outputs if ".experts." not in g.source] == [None] * shared


def test_what_a_run_would_do_is_told_in_few_lines(make_model, tmp_path):
    plan = make_plan(make_model("qwen3_moe", **MOE["qwen3_moe"]), tmp_path, methods=SMOOTH)
    rows = list(group_modules(plan))
    assert len(rows) == 4 + 3 + 1 + 3 + 1
    row = next(row for row in rows if ".experts.*.up_proj" in row)
    assert re.search(r"layers\.\*\.mlp\.experts\.\*\.up_proj +128x128 +blocks 0, experts 0-7 ", row)
    lines = list(explain(plan))
    title = "model.layers.0.mlp.experts.*.down_proj  128 x 128, 8 times"
    assert lines.count(title) == 1
    assert "model.layers.0.mlp.experts.*.up_proj is divided by" in lines[lines.index(title) + 1]
    assert not any(re.search(r"experts\.\d", line) for line in lines)
    [only, *_] = explain(plan, "experts.3.down_proj")
    assert only == "model.layers.0.mlp.experts.3.down_proj  128 x 128"


def test_plots_show_the_highest_of_a_blocks_experts():
    rows = {
        f"model.layers.{b}.mlp.experts.{e}.up_proj": 10 * b + e % 3
        for b in (0, 1)
        for e in range(5)
    }
    rows |= {"model.layers.0.mlp.shared_expert.up_proj": 7, "model.layers.0.self_attn.q_proj": 1}
    assert one_of_experts(rows, float) == {
        "model.layers.0.mlp.experts.2.up_proj": 2,
        "model.layers.1.mlp.experts.2.up_proj": 12,
        "model.layers.0.mlp.shared_expert.up_proj": 7,
        "model.layers.0.self_attn.q_proj": 1,
    }


def test_patterns_of_ignored_layers_match_experts(make_model, tmp_path):
    model = make_model("mixtral", **MOE["mixtral"])
    plan = make_plan(model, tmp_path / "a", ignore=("lm_head", r"re:.*experts\.[01]\."))
    assert len(plan.quantized) == 2 * (4 + 2 * 3)
    with pytest.raises(RecipeError, match=r"experts\.0\.w13 fuses w1, w3, but only w1 is ignored"):
        make_plan(model, tmp_path / "b", ignore=("lm_head", r"re:.*experts\.0\.w1"))


@pytest.mark.parametrize("family", MOE)
def test_smoothing_changes_neither_function_nor_routing(make_model, tmp_path, family):
    """Routers' logits are the same bit for bit; so is what they are stored as."""
    model = make_model(family, **MOE[family])
    work = observed_work(make_plan(model, tmp_path, methods=SMOOTH))
    routers = {name: work.module(f"{work.block.name}.{name}") for name in ROUTERS[family]}
    logits: dict[str, list[torch.Tensor]] = {name: [] for name in routers}
    for name, router in routers.items():
        router.register_forward_hook(
            lambda _, __, out, name=name: logits[name].append(
                out[0] if isinstance(out, tuple) else out
            )
        )
    before = work.block.run(0)
    weights = {name: router.get_parameter("weight").clone() for name, router in routers.items()}
    for group in [SmoothedGroup(work, group) for group in work.groups if "mlp" in group.kind]:
        folding = fold_alpha(group, 0.7)
        assert folding.scale.max() / folding.scale.min() > 1.5
        group.commit(folding)
    after = work.block.run(0)
    assert (after - before).norm() / before.norm() < 3e-6
    for name, router in routers.items():
        assert torch.equal(*logits[name])
        weight = router.get_parameter("weight")
        assert not torch.equal(weight, weights[name])
        stored = work.folded[f"{work.block.name}.{name}.weight"]
        assert stored.dtype == torch.bfloat16
        assert torch.equal(stored.float(), weight)


def test_outliers_of_the_experts_input_are_smoothed_in_the_checkpoint(make_model, tmp_path):
    """Norm times router is what it was, to the bit, and no channel stands out any more."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if name.endswith("post_attention_layernorm.weight"):
                tensor[[3, 50]] *= 64
            if "moe.gate" in name or name.endswith(("w1.weight", "w3.weight")):
                tensor[:, [3, 50]] /= 64

    model = edit_model(make_model("mixtral", **MOE["mixtral"]), tmp_path / "outliers", change)
    methods = (SmoothQuantSpec(alphas=(0.8,), search_samples=2), RTNSpec())
    before, after = Checkpoint.open(model), opened(model, tmp_path / "out", "a8w8", methods=methods)
    for block in ("model.layers.0", "model.layers.1"):
        names = f"{block}.post_attention_layernorm.weight", f"{block}.block_sparse_moe.gate.weight"
        (norm, router), (old_norm, old_router) = (
            [checkpoint.tensor(name).double() for name in names] for checkpoint in (after, before)
        )
        assert norm[3] < old_norm[3] / 4
        assert torch.equal(norm * router, old_norm * old_router)


def test_powers_of_two_are_exact_and_the_nearest():
    scale = torch.tensor([1.0, 1.41, 1.42, 3.0, 0.7, 0.71, 1e-3, 4.0], dtype=torch.float64)
    assert power_of_two(scale).tolist() == [1, 1, 2, 4, 0.5, 1, 2**-10, 4]


def test_experts_of_a_block_get_one_strength(make_model, tmp_path):
    """Found by one search; each expert has factors of its own."""
    model = make_model("qwen2_moe", **MOE["qwen2_moe"])
    work = observed_work(make_plan(model, tmp_path, "a8w8", methods=SMOOTH))
    method = solved(
        work, SmoothQuant(SmoothQuantSpec(search_samples=2, targets=("mlp_output",))), see=False
    )
    moe = "model.layers.0.mlp"
    assert [row.source for row in work.smoothing] == [
        f"{moe}.experts.*.up_proj",
        f"{moe}.shared_expert.up_proj",
    ]
    experts = work.smoothing[0]
    assert experts.consumers == tuple(f"{moe}.experts.{i}.down_proj" for i in range(4))
    assert experts.alpha is not None
    assert experts.error == min(c.error for c in experts.candidates) < experts.unsmoothed_error
    scales = [folding.scale for group, folding in method.solved if group.group.tied]
    assert len(scales) == 4
    assert not torch.equal(scales[0], scales[1])
    method.commit(work)
    assert not work.module(f"{moe}.experts.3.up_proj").get_parameter("weight").isnan().any()


def test_experts_share_the_hessian_of_their_input(make_model, tmp_path, monkeypatch):
    """It is factored once, and each expert comes out as it would alone."""
    model = make_model("qwen3_moe", **MOE["qwen3_moe"])
    work = observed_work(make_plan(model, tmp_path, "w4", methods=(GPTQSpec(),)))
    method, factor, sizes = GPTQ(GPTQSpec()), gptq.inverse_factor, []

    def counted(hessian, damp):
        sizes.append(len(hessian))
        return factor(hessian, damp)

    observe(work, [method])
    monkeypatch.setattr(gptq, "inverse_factor", counted)
    method.solve(work)
    assert len(sizes) == 3 + 8  # q k v, o, all gates and ups; each down has an input of its own
    for leaf in ("gate_proj", "down_proj"):
        name = f"model.layers.0.mlp.experts.5.{leaf}"
        [(_, alone)] = method._solve(work, [name], method._factor(work, name))
        assert torch.equal(method.solved[name].weight.q, alone.weight.q)
    method.commit(work)
    assert list(work.quantized) == list(work.targets)


def starve(tensors: dict[str, torch.Tensor]) -> None:
    """Rows a, -a, b, -b and zeros: two of the first four are positive for every token."""
    router = tensors["model.layers.0.mlp.gate.weight"]
    router[1], router[3], router[4:] = -router[0], -router[2], 0


def test_an_expert_that_is_never_chosen_is_told_of_and_calibrated(make_model, tmp_path):
    model = edit_model(make_model("qwen3_moe", **MOE["qwen3_moe"]), tmp_path / "starved", starve)
    result = quantized(model, tmp_path / "out", "w4", methods=(AWQSpec(steps=2), GPTQSpec()))
    starved = [event for event in result.events if event.kind == "expert_starved"]
    experts = [f"model.layers.0.mlp.experts.{i}" for i in range(4, 8)]
    assert [event.module for event in starved] == experts
    tokens = random_tokens().tokens
    assert starved[0].message.startswith(
        f"the router sent it 0 calibration tokens, an even share is {tokens * 2 / 8:.0f};"
    )
    statistics = Statistics.load(tmp_path / "out" / "statistics.safetensors")
    rows = {row.module: row for row in result.modules}
    for expert in experts:
        for leaf in ("gate_proj", "up_proj", "down_proj"):
            assert statistics[f"{expert}.{leaf}", "input"].tokens == tokens
            row = rows[f"{expert}.{leaf}"]
            assert row.output_sqnr_db > row.baseline_output_sqnr_db - 1


def test_starving_is_less_than_a_hundredth_of_an_even_share():
    counts = torch.tensor([0, 9, 11, 4000 - 20])
    assert [e.module for e in starved_experts({"m": counts})] == ["m.0", "m.1"]
    assert [e.module for e in starved_experts({"m": torch.tensor([0, 1, 7])})] == ["m.0"]


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_both_kinds_of_source_give_the_same_bytes(make_model, tmp_path, family):
    source = make_model(family, **MOE[family])
    stacked = stack_experts(source, tmp_path / "stacked", family)
    found = []
    for name, model in (("a", source), ("b", stacked)):
        found.append(quantized(model, tmp_path / name, methods=SMOOTH))
    assert files(found[0].checkpoint) == files(found[1].checkpoint)
    checkpoint = Checkpoint.open(found[0].checkpoint, verify=True)
    routers = [f"model.layers.0.{name}" for name in ROUTERS[family]]
    assert set(routers) < set(checkpoint.ignore)
    assert f"{routers[0]}.weight" in checkpoint
    assert checkpoint.dtype(f"{routers[0]}.weight") == torch.bfloat16
    layer, (gate, up, _) = FORMS[family]
    experts = f"model.layers.0.{layer}.experts"
    scales = {
        checkpoint.tensor(f"{experts}.{i}.{leaf}.input_scale").item()
        for i in range(4)
        for leaf in (gate, up)
    }
    assert len(scales) == 1


def test_a_stopped_run_goes_on(make_model, tmp_path):
    """Smoothing, GPTQ and refinement of experts, stopped after the first block: the same bytes."""
    model = make_model("mixtral", **MOE["mixtral"])
    methods = (AWQSpec(steps=2, search_samples=2), GPTQSpec(), RefineSpec(iterations=2, batch=2))
    expected = quantized(model, tmp_path / "whole", "w4", methods=methods)
    cut = partial(quantized, model, tmp_path / "out", "w4", methods=methods)
    found = goes_on(expected, cut, by=KeyboardInterrupt)
    assert (found.events, found.smoothing) == (expected.events, expected.smoothing)


def test_an_experts_rows_are_no_sample(make_model, tmp_path):
    """Even where an expert gets as many rows as a sample has tokens, its first is no sink token."""
    plan = make_plan(make_model("mixtral", **MOE["mixtral"]), tmp_path, "a8w8", methods=SMOOTH)
    work = observed_work(plan)
    work.block.sinks = 1
    rows, scales = len(work.block.inputs[0]), (torch.tensor([0.01]), torch.tensor([1.0]))
    expert = f"{work.block.name}.block_sparse_moe.experts.0.w1"
    for name, apart in ((expert, False), (f"{work.block.attention}.q_proj", True)):
        x = torch.randn(rows, work.block.linears[name].in_features)
        seen = work.seen_input(name, x, *scales)
        assert torch.equal(seen[1:], work.seen_input(name, x, scales[0])[1:])
        assert torch.equal(seen[0], work.seen_input(name, x, scales[int(apart)])[0])
