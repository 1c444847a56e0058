"""SmoothQuant: the equation, folding without loss, and a search that keeps what is better."""

from contextlib import ExitStack

import pytest
import torch
from transformers import AutoConfig

from calibrate.stream import BlockStream
from formats.checkpoint.read import Checkpoint
from formats.scheme import PRESETS, ActivationSpec, LayerScheme, WeightSpec
from kernels.numerics import dequantize, fake_quantize_activations
from ptq.methods.common.block import loss_against, replaced
from ptq.methods.common.cache import through_cache
from ptq.methods.common.folding import SmoothedGroup, Trials, fold_vector, source_channel
from ptq.methods.common.migration import Choice
from ptq.methods.common.rounding import round_to_nearest
from ptq.methods.rtn import RTNSpec
from ptq.methods.smoothquant import (
    SmoothQuant,
    SmoothQuantSpec,
    pieces_of,
    search_pieces,
    smoothing_scale,
)
from ptq.pipeline.passes import block_work, observe
from tests.families import transformers_logits
from tests.ptq.quantizing import (
    IDS,
    add_outliers,
    divergence,
    edit_model,
    enlarge_v,
    fold_alpha,
    make_plan,
    observed_work,
    per_channel,
    quantized,
    scored,
    solved,
)
from tests.undeclared import UNDECLARED


def methods(**options) -> tuple:
    return SmoothQuantSpec(**options), RTNSpec()


def test_scale_is_equation_4():
    x, w = torch.tensor([8.0, 2.0, 0.0, 3.0]), torch.tensor([0.5, 2.0, 1.0, 0.0])
    scale = smoothing_scale(x, w, 0.75)
    assert scale.dtype == torch.float64
    assert scale.tolist() == pytest.approx([8**0.75 / 0.5**0.25, 2**0.75 / 2**0.25, 1.0, 1.0])
    assert smoothing_scale(x, w, 1.0)[0] == 8.0
    assert smoothing_scale(x, w, 0.0)[0] == 2.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_folding_a_vector_loses_nothing(dtype):
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(512, generator=generator).to(dtype).float()
    scale = torch.rand(512, generator=generator).double() * 30 + 0.01
    folded, effective = fold_vector(vector, scale, dtype)
    assert folded.dtype == dtype
    assert torch.equal((folded.double() * effective).float(), vector)
    assert not torch.equal(effective, scale)
    assert torch.allclose(effective, scale, rtol=2**-7)


def test_folding_keeps_channels_that_leave_the_range_of_the_type():
    vector, scale = torch.tensor([0.0, 1e-4, 1e4, 1.0]), torch.tensor([3.0, 1e5, 1e-4, 2.0])
    folded, effective = fold_vector(vector, scale, torch.float16)
    assert effective.tolist() == [3.0, 1.0, 1.0, 2.0]
    assert folded.tolist() == [*vector.half().tolist()[:3], 0.5]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_folding_a_norm_of_1_plus_w_loses_nothing(dtype):
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(512, generator=generator).to(dtype).float()
    w[:3] = torch.tensor([-1.0, 0.0, -3.0])
    scale = torch.rand(512, generator=generator).double() * 30 + 0.01
    scale[1:3] = 1e5  # of which 1 + w keeps as much as w can hold
    folded, effective = fold_vector(w, scale, dtype, 1.0)
    assert folded.dtype == dtype
    assert torch.allclose((folded.double() + 1) * effective, w.double() + 1, rtol=1e-14)
    ordinary = (1 + w.double()).abs() / scale > 0.5
    assert torch.allclose(effective[ordinary], scale[ordinary], rtol=2**-7)
    assert effective[1] == effective[2] / 2 or dtype == torch.float32
    assert (effective[1:3] > 100).all()
    assert effective.isfinite().all()
    assert (effective > 0).all()


def test_query_heads_of_a_group_read_one_kv_head():
    kv = torch.arange(2 * 3).reshape(2, 3)  # [kv heads, head_dim]
    expected = kv.repeat_interleave(4, dim=0).flatten()  # as transformers' repeat_kv
    assert torch.equal(source_channel(6, 24, head_dim=3), expected)
    assert torch.equal(source_channel(6, 6, head_dim=3), torch.arange(6))


def test_sink_tokens_are_not_rounded_by_one_channel(tiny_llama, tmp_path):
    """Rounded by token, their products err less, and those of ordinary tokens little more."""

    def explode(tensors: dict[str, torch.Tensor]) -> None:
        embedding = tensors["model.embed_tokens.weight"]
        large = 60 * embedding.float().square().mean().sqrt().to(embedding.dtype)
        embedding[:, 5], embedding[:, 9] = 0, large  # which ordinary tokens have elsewhere
        embedding[7, 5], embedding[7, 9] = large / 3, 0
        for name in "qkv":
            tensors[f"model.layers.0.self_attn.{name}_proj.weight"][:, 5] *= 0.5

    folder = edit_model(tiny_llama, tmp_path / "model", explode)
    plan = make_plan(folder, tmp_path / "out", "a8w8_dynamic", methods=methods())
    checkpoint = Checkpoint.open(folder)
    stream = BlockStream(AutoConfig.from_pretrained(folder), checkpoint.tensor)
    stream.sinks = 1
    ids = torch.randint(8, 384, (4, 40), generator=torch.Generator().manual_seed(0))
    ids[:, 0] = 7
    stream.start(list(ids))
    work = block_work(plan, checkpoint, stream.load(0))
    rows: list[torch.Tensor] = []
    observe(work)
    for sample in range(4):
        work.block.sinks = 0
        work.block.run(sample, on_input=lambda n, x: rows.append(x) if "q_proj" in n else None)
        work.block.sinks = 1
    group = next(SmoothedGroup(work, g) for g in work.groups if g.kind == "attention_input")
    wanted = smoothing_scale(group.x_absmax, group.w_absmax, 0.7)
    wanted[5] = 1.0  # as no ordinary token has it
    weight = work.block.linears["model.layers.0.self_attn.v_proj"].weight

    def errors(scale: torch.Tensor) -> torch.Tensor:  # of a sink token's, and of all others
        found = torch.zeros(2)
        for x in rows:
            own = (weight * scale.float(), x / scale.float())
            stored, scales = per_channel(own[0])
            seen = fake_quantize_activations(own[1], None)
            error = (seen @ (stored.float() * scales).T - x @ weight.T).square().sum(1)
            found += torch.stack((error[:1].sum(), error[1:].sum()))
        return found

    before, after = errors(wanted), errors(group.protected(wanted))
    assert after[0] < before[0] / 4
    assert after[1] < before[1] * 1.5
    moved = group.protected(wanted) != wanted
    assert moved[5]
    assert group.sink_absmax is not None
    assert (group.sink_absmax > group.x_absmax)[moved].all()
    known = work.schemes
    for inputs in (None, ActivationSpec()):  # weights alone, static
        own = LayerScheme(weights=WeightSpec(), activations=inputs)
        work.schemes = dict.fromkeys(work.targets, own)
        assert torch.equal(group.protected(wanted), wanted)
    work.schemes = known
    group.sink_absmax = None
    assert torch.equal(group.protected(wanted), wanted)


def test_smoothing_bounds_inputs_as_predicted(tiny_llama, tmp_path):
    """The largest smoothed input is max_j max|X_j| / s_j, without running the samples."""
    work = observed_work(make_plan(tiny_llama, tmp_path, methods=methods()))
    predicted = {}
    for group in [SmoothedGroup(work, group) for group in work.groups]:
        folding = fold_alpha(group, 0.8)
        predicted[group.group.consumers[0]] = (group.x_absmax / folding.scale).max().item()
        group.commit(folding)
    observe(work)
    for name, absmax in predicted.items():
        assert work.observed(name, "input").absmax == pytest.approx(absmax, rel=1e-5)


@pytest.mark.parametrize("scheme", ["a8w8", "a8w8_dynamic"])
def test_trial_equals_the_real_thing(tiny_llama, tmp_path, scheme):
    """The error that the search sees is that of the folded block with its layers rounded.

    Of groups in attention it is seen in what attention leaves to the feed-forward layer.
    """

    def states(work, kind):
        read = []
        hook = work.feed_forward_norm.register_forward_pre_hook(
            lambda _, args: read.append(args[0])
        )
        outputs = [work.block.run(sample) for sample in range(3)]
        hook.remove()
        return [x[0] for x in read] if kind.startswith("attention") else outputs

    plan = make_plan(tiny_llama, tmp_path, scheme, methods=methods())
    work = observed_work(plan)
    whole = [work.block.run(sample) for sample in range(3)]
    for index in range(4):
        work = observed_work(plan)
        group = SmoothedGroup(work, work.groups[index])
        folding, kind = fold_alpha(group, 0.6), group.group.kind
        reference = states(work, kind)
        tried = Trials([group], whole).error([folding])
        group.commit(folding)
        observe(work)
        solved = round_to_nearest(work)
        with ExitStack() as stack:
            for name in group.group.consumers:
                scale = solved[name].input_scale
                stack.enter_context(
                    replaced(
                        work.block.linears[name],
                        solved[name].dequantized(),
                        lambda x, scale=scale: fake_quantize_activations(x, scale),
                    )
                )
            outputs = states(work, kind)
        real = sum(
            (y.double() - r.double()).square().sum().item()
            for y, r in zip(outputs, reference, strict=True)
        )
        assert tried == pytest.approx(real, rel=0.02), kind


def test_a_part_of_a_block_is_searched_by_the_same_error(tiny_llama, tmp_path):
    """Devices that share a block's groups give the factors that one device finds."""
    work = observed_work(make_plan(tiny_llama, tmp_path, methods=methods()))
    reference = [work.block.run(sample) for sample in range(2)]
    for group in work.groups:
        part = work.part(work.block, groups=(group,))
        errors = [
            Trials([own], reference).error([fold_alpha(own, 0.6)])
            for own in (SmoothedGroup(work, group), SmoothedGroup(part, group))
        ]
        assert errors[0] == errors[1]


def test_trial_of_v_includes_the_quantized_cache(tiny_llama, tmp_path):
    errors = {}
    for scheme in ("a8w8", "a8w8c8"):
        work = observed_work(make_plan(tiny_llama, tmp_path, scheme, methods=methods()))
        reference = [work.block.run(sample) for sample in range(2)]
        group = next(g for g in work.groups if g.kind == "attention_output")
        smoothed = SmoothedGroup(work, group)
        errors[scheme] = Trials([smoothed], reference).error([fold_alpha(smoothed, 0.5)])
    assert errors["a8w8c8"] > 1.05 * errors["a8w8"]


def test_trials_leave_the_block_as_it_was(tiny_llama, tmp_path):
    work = observed_work(make_plan(tiny_llama, tmp_path, methods=methods()))
    before = {name: p.clone() for name, p in work.block.module.named_parameters()}
    output = work.block.run(0)
    method = solved(work, SmoothQuant(SmoothQuantSpec(search_samples=2)), see=False)
    assert all(torch.equal(p, before[n]) for n, p in work.block.module.named_parameters())
    assert torch.equal(work.block.run(0), output)
    method.commit(work)
    assert not torch.equal(
        work.module("model.layers.0.mlp.up_proj").get_parameter("weight"),
        before["mlp.up_proj.weight"],
    )


def test_search_finds_the_outliers_of_down_proj(tiny_llama, tmp_path):
    model = edit_model(tiny_llama, tmp_path / "outliers", add_outliers)
    work = observed_work(make_plan(model, tmp_path / "out", "a8w8", methods=methods()))
    solved(work, SmoothQuant(SmoothQuantSpec(search_samples=3)), see=False)
    rows = {row.source: row for row in work.smoothing}
    assert len(rows) == 4
    for row in rows.values():
        assert row.error == min(candidate.error for candidate in row.candidates)
        assert [c.alpha for c in row.candidates] == [None, *SmoothQuantSpec().alphas]
    down = rows["model.layers.0.mlp.up_proj"]
    assert down.alpha is not None
    assert down.error < down.unsmoothed_error / 50
    assert down.scale_max / down.scale_min > 50


def test_a_strength_that_does_harm_is_not_applied(tiny_llama, tmp_path):
    """One token with an enormous value: all of it in the weights would drown the other columns."""
    spec = SmoothQuantSpec(alpha=1.0, search_samples=2, targets=("mlp_output",))
    work = observed_work(make_plan(tiny_llama, tmp_path, "a8w8_dynamic", methods=(spec, RTNSpec())))
    work.observed("model.layers.0.mlp.down_proj", "input").channel_absmax[0] = 1e4
    weight = work.module("model.layers.0.mlp.up_proj").get_parameter("weight").clone()
    method = solved(work, SmoothQuant(spec), see=False)
    method.commit(work)
    (row,) = work.smoothing
    assert row.alpha is None
    assert (row.scale_min, row.scale_max) == (1.0, 1.0)
    assert row.candidates[1].error > 10 * row.error == 10 * row.unsmoothed_error
    assert [(e.kind, e.module) for e in work.events] == [("fallback", row.source)]
    assert torch.equal(work.module("model.layers.0.mlp.up_proj").get_parameter("weight"), weight)


@pytest.mark.parametrize(
    ("ignore", "skipped"),
    [
        (r"re:.*down_proj", {"mlp.up_proj"}),
        (r"re:.*(gate|up)_proj", {"mlp.up_proj"}),
        (r"re:.*o_proj", {"self_attn.v_proj"}),
    ],
)
def test_groups_with_float_members_are_skipped(tiny_llama, tmp_path, ignore, skipped):
    plan = make_plan(tiny_llama, tmp_path, methods=methods(), ignore=("lm_head", ignore))
    work = observed_work(plan)
    method = SmoothQuant(SmoothQuantSpec())
    method.prepare(work)
    events = {e.module for e in work.events if e.kind == "smoothing_skipped"}
    assert events == {f"model.layers.0.{name}" for name in skipped}
    assert not events & {group.source for group in method.groups}
    assert method.groups


V_ALONE = SmoothQuantSpec(targets=("attention_output",), search_samples=2)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "starcoder2"])
def test_v_of_a_cache_alone_is_evened(make_model, tmp_path, kind):
    """Weights stay in float: in powers of two, so that their values stay what they were."""
    model = edit_model(make_model(kind, **UNDECLARED.get(kind, {})), tmp_path / "model", enlarge_v)
    found = {}
    for name, methods in {"plain": (), "even": (V_ALONE,)}.items():
        result = quantized(model, tmp_path / name, "c8", methods=methods)
        found[name] = divergence(scored(model), scored(result.checkpoint))
    assert found["even"] < found["plain"] / 5
    assert len(result.smoothing) == 2
    before, after = (transformers_logits(f, IDS) for f in (model, result.checkpoint))
    assert torch.allclose(before, after, atol=1e-4)
    old, new = map(Checkpoint.open, (model, result.checkpoint))
    for name in (n for n in old.names() if "self_attn.v_proj" in n):
        ratio = old.tensor(name).double() / new.tensor(name).double()
        assert torch.equal(ratio, ratio.log2().round().exp2())


def test_v_of_a_cache_alone_is_tried_as_it_will_be(tiny_llama, tmp_path):
    """The error that the search sees is that of the folded block with V rounded."""
    model = edit_model(tiny_llama, tmp_path / "model", enlarge_v)
    work = observed_work(make_plan(model, tmp_path / "out", "c8", methods=(V_ALONE,)))
    reference = [work.block.run(sample) for sample in range(3)]
    group = SmoothedGroup(work, work.groups[0])
    folding = fold_alpha(group, 0.85)
    assert folding.scale.log2().mean().abs() <= 0.5
    assert torch.equal(group.fold(folding.scale).scale, folding.scale)
    tried = Trials([group], reference).error([folding])
    group.commit(folding)
    for sample, expected in enumerate(reference):
        assert (work.block.run(sample) - expected).norm() / expected.norm() < 3e-6
    absmax, spec = work.observed(work.block.attended, "v_cache").channel_absmax, PRESETS["c8"]
    observe(work)
    seen = work.observed(work.block.attended, "v_cache").channel_absmax
    assert torch.allclose(absmax, seen.to(absmax), rtol=1e-4)
    cache = spec.kv_cache
    assert cache is not None

    def held(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return k, through_cache(v, seen, cache, "v_cache")

    losses = [loss_against(y, 0)(work.block.run(i, cache=held)) for i, y in enumerate(reference)]
    assert tried == pytest.approx(sum(loss.item() for loss in losses), rel=0.02)


def test_layers_that_stay_as_stored_are_left_alone(tiny_llama, tmp_path):
    model = edit_model(tiny_llama, tmp_path / "model", enlarge_v)
    four = quantized(model, tmp_path / "four", "mxfp4", methods=(RTNSpec(),)).checkpoint
    result = quantized(four, tmp_path / "out", "c8", methods=(V_ALONE,))
    before, after = Checkpoint.open(four), Checkpoint.open(result.checkpoint, verify=True)
    assert all(torch.equal(before.tensor(n), after.tensor(n)) for n in before.names())
    attention = "model.layers.0.self_attn"
    layers = f"{attention}.o_proj, {attention}.v_proj"
    assert result.events[0].message == f"not smoothed: {layers} is kept as it is stored"


def test_targets_that_a_cache_alone_does_not_have_are_refused(tiny_llama, tmp_path):
    with pytest.raises(ValueError, match=r"set targets: \[attention_output\], and V alone"):
        make_plan(tiny_llama, tmp_path, "c8", methods=(SmoothQuantSpec(),))


def test_weights_of_v_and_up_round_to_the_same_integers(tiny_llama, tmp_path):
    """Dividing the rows of a source changes its scales, not its integers."""
    work = observed_work(make_plan(tiny_llama, tmp_path, methods=methods()))
    up = work.module("model.layers.0.mlp.up_proj")
    q, scale = per_channel(up.get_parameter("weight"))
    group = SmoothedGroup(work, next(g for g in work.groups if g.kind == "mlp_output"))
    folding = fold_alpha(group, 0.9)
    group.commit(folding)
    q_after, scale_after = per_channel(up.get_parameter("weight"))
    assert (q != q_after).float().mean() < 1e-3
    restored = dequantize(q_after, scale_after) * folding.scale[:, None].float()
    assert torch.allclose(restored, dequantize(q, scale), atol=scale.max().item() * 1.01)


def test_pieces_are_quantiles_of_the_magnitudes():
    magnitude = torch.tensor([1.0, 9.0, 3.0, 7.0, 2.0, 8.0, 3.0])
    assert pieces_of(magnitude, 3).tolist() == [2, 0, 1, 0, 2, 0, 1]
    assert pieces_of(magnitude, 1).tolist() == [0] * 7


def test_pieces_are_searched_from_the_largest_down():
    """Each piece ends with its own best strength, and what is tried is told by the error alone."""
    scales: dict[float | None, torch.Tensor] = {
        a: torch.full((6,), s).double() for a, s in ((None, 1.0), (0.5, 2.0), (1.0, 4.0))
    }
    piece, wanted = torch.tensor([0, 0, 1, 1, 2, 2]), torch.tensor([4.0, 4, 1, 1, 2, 2]).double()
    tried: list[list[float]] = []

    def error(scale: torch.Tensor) -> float:
        tried.append(scale[::2].tolist())
        return (scale - wanted).square().sum().item()

    found = search_pieces(piece, scales, Choice((0.5,), scales[0.5], 10.0), error)
    assert found.alphas == (1.0, None, 0.5)
    assert torch.equal(found.scale, wanted)
    assert found.error == 0.0
    assert tried[:4] == [[1, 2, 2], [4, 2, 2], [4, 1, 2], [4, 4, 2]]


def test_pieces_are_never_worse_and_keep_the_function(tiny_llama, tmp_path):
    model = edit_model(tiny_llama, tmp_path / "outliers", add_outliers)
    errors = {}
    for pieces in (1, 3):
        work = observed_work(make_plan(model, tmp_path / "out", "a8w8", methods=methods()))
        before = work.block.run(0)
        method = solved(
            work, SmoothQuant(SmoothQuantSpec(pieces=pieces, search_samples=3)), see=False
        )
        method.commit(work)
        assert (work.block.run(0) - before).norm() / before.norm() < 3e-6
        errors[pieces] = [row.error for row in work.smoothing]
        assert {len(row.pieces) for row in work.smoothing} == ({3} if pieces == 3 else {0})
    assert all(new <= old for new, old in zip(errors[3], errors[1], strict=True))
    assert any(new < old for new, old in zip(errors[3], errors[1], strict=True))
    assert any(" / " in row.strength for row in work.smoothing)
    with pytest.raises(ValueError, match="only a search"):
        SmoothQuantSpec(alpha=0.5, pieces=2)
