"""Scales of two levels, from the recipe to the checkpoint that runs."""

import json
import re

import pytest
import torch
from pydantic import ValidationError

from formats.checkpoint.compressed_tensors import quantization_config, read_groups
from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError, RecipeError
from formats.scheme import PRESETS, ActivationSpec, LayerScheme, Scheme, WeightSpec
from inference.engine import Engine
from kernels.cpu.weights import pack_quantized_weight
from kernels.numerics import dequantize
from kernels.ops import linear, quantize_per_token
from kernels.two_level import choose_unit, larger_unit, two_level
from ptq.commands import diff, explain, inspect
from ptq.convert.convert import convert
from ptq.methods.awq import AWQSpec
from ptq.methods.common.rounding import LEAST_HALF, choose_qparams, round_to_nearest, round_weight
from ptq.methods.gptq import GPTQSpec
from ptq.methods.refine import Adjustable, RefineSpec
from ptq.methods.rtn import RTNSpec
from tests.experts import MOE
from tests.ptq.plan.test_layer_schemes import reference, usual_distance
from tests.ptq.quantizing import make_plan, observed_work, opened

GROUPS = WeightSpec(dtype="int4", granularity="group", group_size=32, two_level=True)
PLAIN = GROUPS.model_copy(update={"two_level": False})
SCHEME = Scheme(weights=GROUPS, activations=ActivationSpec(granularity="per_token"))
SEARCHES = ("absmax", "mse", "weighted_mse", "output_mse")
METHODS = {
    "rtn": (RTNSpec(),),
    "awq": (AWQSpec(steps=2, search_samples=2), RTNSpec(scale="output_mse")),
    "gptq": (GPTQSpec(act_order=True),),
    "refine": (RTNSpec(), RefineSpec(iterations=30, batch=3, learning_rate=0.05)),
}


def problem(rows=40, columns=512) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight whose groups differ, and the second moments of its inputs."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(600, columns, generator=generator) * torch.logspace(-1, 1, columns)
    weight = torch.randn(rows, columns, generator=generator)
    weight *= torch.rand(rows, columns // 32, generator=generator).repeat_interleave(32, 1) + 0.3
    return weight, x.T @ x / len(x)


def layers_of(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    return {name: checkpoint.weight(name).scale for name in checkpoint.quantized_modules}


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_chosen_scales_have_two_levels(search, dtype) -> None:
    weight, moments = problem()
    weight[3, 64:96], weight[5] = 0, 0
    weight[7] *= 1e-5
    scale, zeros = choose_qparams(weight, GROUPS, dtype, search, moments)
    assert zeros is None
    held = scale.to(dtype).float() == scale
    small = (scale < LEAST_HALF).any(dim=1) & (dtype == torch.float16)
    assert held[~small].all()
    found = two_level(scale.to(dtype) if held.all() else scale)  # as the layer's are stored
    assert found is not None
    assert found[1].max() > 8


@pytest.mark.parametrize("search", SEARCHES)
def test_they_cost_little(search) -> None:
    """In what the search lowers: the error of each group's output, or of the weights."""
    weight, moments = problem()
    wide = moments.diagonal() if search == "weighted_mse" else torch.ones(512)
    groups = torch.block_diag(*[torch.ones(32, 32)] * 16)
    measure = moments * groups if search == "output_mse" else torch.diag(wide)
    errors = []
    for spec in (PLAIN, GROUPS):
        stored = round_weight(weight, spec, torch.bfloat16, search, moments)
        left = weight - dequantize(stored.q, stored.scale, block=spec.block)
        errors.append(((left @ measure) * left).sum().item())
    assert errors[1] < 1.02 * errors[0]


@pytest.mark.parametrize("search", ["mse", "output_mse"])
def test_a_search_is_the_best_of_its_units_and_multiples(search) -> None:
    """For each channel, of the scales that a search finds without levels, each moved by one."""
    weight, moments = problem()
    groups = torch.block_diag(*[torch.ones(32, 32)] * 16)
    measure = moments * groups if search == "output_mse" else torch.eye(512)
    plain, _ = choose_qparams(weight, PLAIN, torch.float32, search, moments)
    found, _ = choose_qparams(weight, GROUPS, torch.float32, search, moments)

    def errors(scale: torch.Tensor) -> torch.Tensor:
        wide = scale.repeat_interleave(32, 1)
        left = weight - (weight / wide).round().clamp(-8, 7) * wide
        return ((left @ measure) * left).sum(1)

    unit, best = choose_unit(plain), errors(found)
    gains = []
    for _ in range(4):
        for offset in (-1, 0, 1):
            multiple = (torch.round(plain / unit) + offset).clamp(1, 16)
            gains.append(errors(multiple * unit) - best)
        unit = larger_unit(unit)
    gain = torch.stack(gains) / best
    assert gain.min() > -1e-5
    assert gain.mean() > 1e-3


@pytest.mark.parametrize("kind", METHODS)
def test_every_method_keeps_two_levels(kind, tiny_llama, tmp_path) -> None:
    checkpoint = opened(tiny_llama, tmp_path, SCHEME, methods=METHODS[kind])
    assert checkpoint.scheme == SCHEME
    for name, scale in layers_of(checkpoint).items():
        assert scale.shape[1] in (4, 8)
        assert two_level(scale) is not None, name
    if kind == "refine":
        before = layers_of(opened(tiny_llama, tmp_path / "rtn", SCHEME, methods=(RTNSpec(),)))
        assert any(not torch.equal(s, before[name]) for name, s in layers_of(checkpoint).items())


def test_experts_and_fused_layers(make_model, tmp_path) -> None:
    model = make_model("mixtral", **MOE["mixtral"])
    checkpoint = opened(model, tmp_path, SCHEME, methods=(GPTQSpec(),))
    assert sum(".experts." in name for name in checkpoint.quantized_modules) >= 12
    for scale in layers_of(checkpoint).values():
        assert two_level(scale) is not None
    ids = torch.arange(40) % 384
    assert torch.isfinite(Engine.from_pretrained(checkpoint.path).score(ids)).all()


def test_refinement_that_moved_nothing_is_the_layer_itself(tiny_llama, tmp_path) -> None:
    work = observed_work(make_plan(tiny_llama, tmp_path, SCHEME, methods=(RTNSpec(),)))
    for name, layer in round_to_nearest(work).items():
        still = Adjustable.of(layer, work.block.linears[name].weight, torch.bfloat16)
        assert torch.equal(still.solved().weight.scale, layer.weight.scale)
        with torch.no_grad():
            still.factor.mul_(1.1)
        moved = still.solved().weight.scale
        assert not torch.equal(moved, layer.weight.scale)
        assert two_level(moved) is not None
        still.scale().sum().backward()
        assert still.factor.grad is not None
        assert bool((still.factor.grad != 0).any())


@pytest.fixture(scope="module")
def made(tiny_llama, tmp_path_factory):
    """A checkpoint with scales of two levels."""
    return opened(tiny_llama, tmp_path_factory.mktemp("two"), SCHEME, methods=(GPTQSpec(),))


def test_layers_run_as_one_sum_of_integers(made) -> None:
    """y = sx unit sum(xq (q m)): what the kernel of int4 weights gives group by group."""
    generator = torch.Generator().manual_seed(1)
    for name in made.quantized_modules:
        stored = made.weight(name)
        found = two_level(stored.scale)
        assert found is not None
        unit, multiple = found
        whole = stored.q.long() * multiple.repeat_interleave(32, dim=1)
        assert int(whole.min()) >= -128
        assert int(whole.max()) <= 112
        xq, scale = quantize_per_token(torch.randn(5, whole.shape[1], generator=generator))
        packed = pack_quantized_weight(
            stored.q, stored.scale, "int4", None, 32, None, integer_inputs=True
        )
        want = scale.double() * unit.double() * (xq.long() @ whole.T).double()
        torch.testing.assert_close(linear(xq, packed, scale).double(), want, atol=1e-5, rtol=1e-5)


def test_it_runs_as_the_dequantized_model_does(made, tiny_llama) -> None:
    engine = Engine.from_pretrained(made.path)
    assert usual_distance(engine, reference(tiny_llama, made)) < 1e-4


def test_tools_name_them(made, capsys, tmp_path, tiny_llama) -> None:
    assert GROUPS.text == "int4 weights group of 32, two-level scales"
    assert inspect.main([str(made.path)]) == 0
    assert "llama, scheme a8w4_g32_two_level, " in capsys.readouterr().out
    two, one = tmp_path / "two.yaml", tmp_path / "one.yaml"
    text = f"model: {{path: {tiny_llama}}}\nscheme: NAME\nmethods: [gptq]\noutput: {{path: out}}\n"
    two.write_text(text.replace("NAME", "a8w4_two_level"))
    one.write_text(text.replace("NAME", "a8w4"))
    assert explain.main([str(two), "--module", "layers.0.mlp.down_proj"]) == 0
    assert "stored as int4 weights group of 128, two-level scales" in capsys.readouterr().out
    assert diff.main([str(one), str(two)]) == 1
    assert capsys.readouterr().out == "scheme.weights.two_level: False -> True\n"
    levels = [str(one), "--set", "scheme.weights.two_level=true"]
    assert explain.main(levels) == 0
    assert "two-level scales" in capsys.readouterr().out
    with pytest.raises(RecipeError, match="found two_level for int4 weights group of 128 or .* as"):
        explain.main([*levels, "--set", "scheme.weights.symmetric=false"])


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "int8"},
        {"symmetric": False},
        {"granularity": "per_channel", "group_size": None},
        {"dtype": "fp8_e4m3", "granularity": "block", "group_size": None},
    ],
)
def test_other_weights_have_no_two_levels(change) -> None:
    found = {key: value for key, value in GROUPS.model_dump().items() if key != "two_level"}
    name = WeightSpec(**(found | change)).text
    with pytest.raises(ValidationError, match=re.escape(f"found two_level for {name}")):
        WeightSpec(**(found | change), two_level=True)


def test_layers_that_run_as_one_have_one_kind_of_scales(tiny_llama, tmp_path) -> None:
    with pytest.raises(RecipeError, match="two-level scales"):
        make_plan(
            tiny_llama, tmp_path, "a8w4", methods=(RTNSpec(),),
            layers={"re:.*q_proj": "a8w4_two_level"},
        )  # fmt: skip


def test_the_configuration_tells_of_them(made) -> None:
    config = json.loads((made.path / "config.json").read_bytes())["quantization_config"]
    (group,) = config["config_groups"].values()
    assert group["weights"]["observer_kwargs"] == {"two_level": True}
    plain = quantization_config(LayerScheme(weights=PLAIN), [])
    assert plain is not None
    assert "observer_kwargs" not in plain["config_groups"]["group_0"]["weights"]
    for extra, told in (({"two_level": False}, False), ({"bins": 3}, False), (None, False)):
        group["weights"]["observer_kwargs"] = extra
        ((_, scheme),) = read_groups(config)
        assert scheme.weights is not None
        assert scheme.weights.two_level is told
    group["weights"]["observer_kwargs"] = {"two_level": "yes"}
    with pytest.raises(CheckpointError, match="two_level"):
        read_groups(config)


def test_other_software_takes_the_configuration(made) -> None:
    library = pytest.importorskip("compressed_tensors.quantization")
    config = json.loads((made.path / "config.json").read_bytes())["quantization_config"]
    read = library.QuantizationConfig.model_validate(config)
    weights = read.config_groups["group_0"].weights
    assert (weights.num_bits, weights.group_size, weights.symmetric) == (4, 32, True)
    written = json.loads(read.model_dump_json())["config_groups"]["group_0"]["weights"]
    assert written["observer_kwargs"] == {"two_level": True}


@pytest.mark.parametrize("target", ["gptq", "awq"])
def test_other_layouts_hold_the_same_scales(target, tiny_llama, tmp_path) -> None:
    """In fp16, exactly; of the two levels they tell no more than the scales do."""
    source = opened(tiny_llama, tmp_path / "run", Scheme(weights=GROUPS), methods=(RTNSpec(),))
    assert convert(source.path, tmp_path / "out", target).scale_rounding == 0.0
    convert(tmp_path / "out", tmp_path / "back", "compressed_tensors")
    back = Checkpoint.open(tmp_path / "back")
    assert back.scheme == Scheme(weights=PLAIN)
    for name, scale in layers_of(back).items():
        assert torch.equal(scale, source.weight(name).scale)
        assert two_level(scale) is not None


def test_presets_differ_from_the_plain_ones_by_them_alone() -> None:
    for name in ("a8w4", "a8w4c8"):
        weights = PRESETS[f"{name}_two_level"].weights
        assert weights is not None
        assert weights.two_level
        plain = PRESETS[f"{name}_two_level"].model_dump()
        plain["weights"]["two_level"] = False
        assert plain == PRESETS[name].model_dump()
