"""Shift: V is centred, the function stays, and families without biases are told."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from calibrate.stream import BlockStream
from formats.checkpoint.read import Checkpoint
from ptq.methods.common.float_model import config_of
from ptq.methods.registry import view_of
from ptq.methods.rotation import RotationSpec
from ptq.methods.rtn import RTNSpec
from ptq.methods.shift import Shift, ShiftSpec
from ptq.methods.smoothquant import SmoothQuantSpec
from ptq.pipeline.passes import block_work, observe
from tests.ptq.quantizing import (
    IDS,
    divergence,
    edit_model,
    executed,
    make_plan,
    random_tokens,
    scored,
    weight_bytes,
)
from tests.undeclared import UNDECLARED

V_ALONE = ("attention_output",)
SHIFTED = (ShiftSpec(), RTNSpec())


def shifted_work(model, tmp_path, methods: tuple = SHIFTED):
    """Block 0 as the method sees it, and the method after its pass."""
    plan = make_plan(model, tmp_path / "plan", methods=methods)
    source, method = view_of(Checkpoint.open(model), methods), Shift(ShiftSpec())
    stream = BlockStream(config_of(source), source.tensor)
    stream.start(random_tokens().sequences())
    work = block_work(plan, source, stream.load(0))
    observe(work, [method])
    return work, method


@pytest.mark.parametrize(("dtype", "loss"), [(torch.float32, 3e-6), (torch.bfloat16, 5e-3)])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_v_is_centred_and_the_function_stays(make_model, tmp_path, family, dtype, loss):
    work, method = shifted_work(make_model(family), tmp_path)
    work.dtype_of = lambda _: dtype
    before = [work.block.run(sample) for sample in range(3)]
    method.solve(work)
    method.commit(work)
    low, high = [], []

    def extremes(_: torch.Tensor, v: torch.Tensor) -> None:
        low.append(v.amin(dim=0))
        high.append(v.amax(dim=0))

    for sample in range(len(work.block.inputs)):
        out = work.block.run(sample, on_kv=extremes)
        if sample < 3:
            assert (out - before[sample]).norm() / before[sample].norm() < loss
    least, most = torch.stack(low).amin(dim=0), torch.stack(high).amax(dim=0)
    assert torch.allclose(least, -most, atol=0.02 * most.max().item())
    attention = work.block.attention
    assert set(work.folded) == {f"{attention}.v_proj.bias", f"{attention}.o_proj.bias"}


@pytest.mark.parametrize("family", ["qwen2", "mistral"])
def test_families_without_a_place_for_it_are_told(make_model, tmp_path, family):
    work, method = shifted_work(make_model(family), tmp_path)
    method.solve(work)
    method.commit(work)
    (event,) = work.events
    names = "o_proj" if family == "qwen2" else "v_proj and o_proj"
    assert event.message == f"not shifted: {names} of this family cannot have a bias"
    assert not work.folded


def plant(tensors: dict[str, torch.Tensor]) -> None:
    """A large constant in the values of one channel: what all tokens have in common."""
    for name, tensor in tensors.items():
        if name.endswith("embed_tokens.weight"):
            tensor[:, 3] = 0.5
        if name.endswith("v_proj.weight"):
            tensor[[7, 40], 3] = 2.0


def test_it_lowers_the_error_and_others_open_the_checkpoint(make_model, tmp_path):
    """Biases are written, config.json tells of them, and transformers computes the same."""
    model = make_model("llama", tie_word_embeddings=False)
    model = edit_model(model, tmp_path / "model", plant)
    smooth = SmoothQuantSpec(alpha=0.5, search_samples=2)
    exact, found = scored(model), {}
    for name, methods in {
        "plain": (RTNSpec(),),
        "shifted": SHIFTED,
        "all": (RotationSpec(), ShiftSpec(), smooth, RTNSpec()),
    }.items():
        plan = make_plan(model, tmp_path / name, methods=methods)
        result = executed(plan)
        checkpoint = Checkpoint.open(result.checkpoint, verify=True)
        assert plan.prediction.checkpoint_bytes == weight_bytes(result.checkpoint)
        found[name] = divergence(exact, scored(result.checkpoint))
        if name != "plain":
            assert checkpoint.config["attention_bias"] is True
            theirs = AutoModelForCausalLM.from_pretrained(result.checkpoint, dtype=torch.float32)
            bias = theirs.model.layers[1].self_attn.o_proj.bias
            stored = checkpoint.tensor("model.layers.1.self_attn.o_proj.bias")
            assert torch.equal(bias, stored.float())
            with torch.no_grad():
                logits = theirs(IDS[None]).logits[0].log_softmax(-1)
            assert divergence(exact, logits) < 2 * found["plain"]
    assert found["shifted"] < 0.8 * found["plain"]
    assert found["all"] < found["plain"]


def plant_constant(tensors: dict[str, torch.Tensor]) -> None:
    """A constant in two channels of each head's V, far beyond their spread; o's bias takes it back."""
    for name in [n for n in tensors if n.endswith("v_proj.bias")]:
        constant = torch.zeros(2, len(tensors[name]) // 2)
        constant[:, [3, 8]] = torch.tensor([60.0, -60.0])
        output = name.replace("v_proj", "o_proj")
        weight = tensors[output.replace("bias", "weight")].float()
        heads = constant.repeat_interleave(weight.shape[1] // constant.numel(), dim=0)
        tensors[name] += constant.flatten().to(tensors[name])
        tensors[output] -= (weight @ heads.flatten()).to(tensors[output])


@pytest.mark.parametrize("scheme", ["c4", "c8"])
def test_a_constant_of_v_costs_a_cache_nothing(make_model, tmp_path, scheme):
    model = make_model("llama", attention_bias=True)
    planted = edit_model(model, tmp_path / "planted", plant_constant)
    evened = RotationSpec(residual=False) if scheme == "c4" else SmoothQuantSpec(targets=V_ALONE)
    order = sorted((ShiftSpec(gain=1.2), evened), key=lambda spec: spec.stage)
    lost = {}
    for name, folder, methods in [
        ("plain", model, (evened,)),
        ("planted", planted, (evened,)),
        ("centred", planted, order),
    ]:
        plan = make_plan(folder, tmp_path / "runs" / name, scheme, methods=tuple(methods))
        lost[name] = divergence(scored(folder), scored(executed(plan).checkpoint))
    assert lost["centred"] < 1.5 * lost["plain"], lost
    assert lost["planted"] > 5 * lost["plain"] or scheme == "c4", lost


def test_a_constant_that_is_not_in_the_bias_is_found_in_the_data(make_model, tmp_path):
    model = make_model("llama", attention_bias=True, tie_word_embeddings=False)
    planted, lost = edit_model(model, tmp_path / "planted", plant), {}
    for name, shift in {"with": (ShiftSpec(gain=1.2),), "without": ()}.items():
        methods = (RotationSpec(residual=False), *shift)
        plan = make_plan(planted, tmp_path / "runs" / name, "c4", methods=methods)
        lost[name] = divergence(scored(planted), scored(executed(plan).checkpoint))
    assert lost["with"] < 0.7 * lost["without"], lost


@pytest.mark.parametrize(
    ("family", "settings", "why"),
    [
        ("llama", {}, "there is no bias of v_proj and o_proj"),
        ("qwen2", {}, "there is no bias of o_proj"),
        ("gpt_oss", {}, "attention has no V of its own, or weights that sum to less than 1"),
        ("opt", UNDECLARED["opt"], "nothing declares which layers make V and read it"),
    ],
)
def test_with_a_gain_it_leaves_out_what_it_cannot_centre(
    make_model, tmp_path, family, settings, why
):
    smooth = SmoothQuantSpec(targets=V_ALONE)
    methods = (ShiftSpec(gain=1.2), smooth)
    plan = make_plan(make_model(family, **settings), tmp_path / "a", "c8", methods=methods)
    assert plan.transforms == (f"leaves out the method shift: {why}",)
    assert plan.recipe.methods == (smooth,)


def test_a_gain_that_is_not_reached_changes_nothing(make_model, tmp_path):
    model, made = make_model("llama", attention_bias=True), []
    for name, shift in {"with": (ShiftSpec(gain=4.0),), "without": ()}.items():
        methods = (*shift, SmoothQuantSpec(targets=V_ALONE))
        plan = make_plan(model, tmp_path / name, "c8", methods=methods)
        made.append(Checkpoint.open(executed(plan).checkpoint))
    for name in made[1].names():
        assert torch.equal(made[0].tensor(name), made[1].tensor(name)), name


def test_schemes_that_do_not_fit(tiny_llama, tmp_path):
    with pytest.raises(ValueError, match="leaves activations and the cache in"):
        make_plan(tiny_llama, tmp_path, "w4", methods=SHIFTED)
