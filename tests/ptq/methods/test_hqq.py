"""HQQ lowers the l_p norm of what rounding loses, block by block, and stores what it found."""

import pytest
import torch

from formats.checkpoint.read import Checkpoint
from formats.errors import RecipeError
from formats.scheme import LayerScheme, Scheme, WeightSpec
from inference.engine import Engine
from kernels.numerics import TYPES, block_view, dequantize, quantize
from ptq.methods.common.rounding import choose_qparams
from ptq.methods.common.spec import PlannedLayer
from ptq.methods.hqq import HQQSpec, half_quadratic, shrink
from ptq.recipe.reading import load_recipe
from tests.ptq.quantizing import quantized

GROUPS = WeightSpec(dtype="int4", granularity="group", group_size=32)
SPECS = {
    "int4": GROUPS,
    "int4 asymmetric": GROUPS.model_copy(update={"symmetric": False}),
    "int8": WeightSpec(),
    "int8 asymmetric": WeightSpec(symmetric=False),
}


def heavy_tailed(rows: int = 16, columns: int = 128) -> torch.Tensor:
    """Weights of which a few are far larger than the others, and not centred."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(rows, columns, generator=generator) + 0.3
    return weight * (1 + 6 * (torch.rand(rows, columns, generator=generator) > 0.97))


def errors(weight: torch.Tensor, spec: WeightSpec, scale, zeros) -> torch.Tensor:
    """|W - Q(W)|^0.7 summed over each block."""
    q = quantize(weight, scale, TYPES[spec.dtype], zeros, spec.block)
    lost = (weight - dequantize(q, scale, zeros, spec.block)).abs().pow(0.7)
    return block_view(lost, spec.block).sum(dim=(1, 3))


def test_shrinking_minimizes_the_split_error_where_it_does_not_vanish():
    """A grid finds nothing better than |W_e|^p + beta / 2 (W_e - x)^2 at its result, nearly."""
    p, beta = 0.7, 10.0
    x = torch.tensor([-2.0, -0.7, 0.9, 3.0])

    def cost(w_e: torch.Tensor) -> torch.Tensor:
        return w_e.abs().pow(p) / p + beta / 2 * (w_e - x).square()

    found = shrink(x, beta, p)
    grid = torch.linspace(-4, 4, 8001)[:, None].expand(-1, 4)
    assert torch.all(cost(found) - cost(grid).amin(dim=0) < 1e-3)
    assert torch.equal(shrink(torch.tensor([0.0, 0.01, -0.01]), beta, p), torch.zeros(3))


@pytest.mark.parametrize("kind", list(SPECS))
def test_no_block_is_worse_than_rounded_and_many_are_better(kind):
    spec, weight = SPECS[kind], heavy_tailed()
    start = choose_qparams(weight, spec, torch.float32)
    found = half_quadratic(weight, *start, spec, torch.float32, HQQSpec())
    before, after = errors(weight, spec, *start), errors(weight, spec, *found)
    assert torch.all(after <= before * (1 + 1e-5))
    assert (after < before).float().mean() > 0.3
    assert found[0].shape == start[0].shape
    assert (found[1] is None) == spec.symmetric
    if found[1] is not None and start[1] is not None:
        assert found[1].dtype == start[1].dtype


def test_the_scale_that_loses_nothing_is_found():
    """The largest magnitude, 7 of 7.5 steps, gives 14/15."""
    spec = SPECS["int4"]
    weight = torch.randint(-7, 8, (4, 64), generator=torch.Generator().manual_seed(0)).float()
    weight[:, ::32] = 7
    start = choose_qparams(weight, spec, torch.float32)
    assert not torch.equal(start[0], torch.ones(4, 2))
    found = half_quadratic(weight, *start, spec, torch.float32, HQQSpec())
    assert torch.allclose(found[0], torch.ones(4, 2), rtol=1e-6)


def test_a_block_of_zeros_keeps_a_positive_scale():
    for spec in SPECS.values():
        weight = torch.zeros(4, 64)
        start = choose_qparams(weight, spec, torch.bfloat16)
        scale, zeros = half_quadratic(weight, *start, spec, torch.bfloat16, HQQSpec())
        assert torch.all(scale > 0)
        q = quantize(weight, scale, TYPES[spec.dtype], zeros, spec.block)
        assert torch.equal(dequantize(q, scale, zeros, spec.block), weight)


@pytest.mark.parametrize("kind", [*SPECS, "two levels"])
def test_a_checkpoint_is_made_without_data_and_runs(kind, tiny_llama, tmp_path):
    two_level = GROUPS.model_copy(update={"two_level": True})
    scheme = Scheme(weights=SPECS.get(kind, two_level))
    result = quantized(tiny_llama, tmp_path / "out", scheme, methods=(HQQSpec(),))
    assert {row.statistic for row in result.scale_table.entries} == {"half-quadratic"}
    assert Checkpoint.open(result.checkpoint, verify=True).scheme == scheme
    engine = Engine.from_pretrained(result.checkpoint)
    assert torch.isfinite(engine.score(torch.arange(20))[1:]).all()


def test_weights_that_are_no_integers_are_refused(tmp_path):
    fp8 = LayerScheme(weights=WeightSpec(dtype="fp8_e4m3"))
    assert "not for fp8 weights" in (HQQSpec().misfit(Scheme(), [fp8]) or "")
    text = "model: {path: .}\nscheme: fp8_channel\nmethods: [hqq]\noutput: {path: out}\n"
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(RecipeError, match="hqq moves zero points and scales of integers"):
        load_recipe(tmp_path / "r.yaml")


def test_what_it_does_to_a_layer_is_told():
    (symmetric,), (free,) = (
        HQQSpec().explain(PlannedLayer("q_proj", LayerScheme(weights=SPECS[kind])))
        for kind in ("int4", "int4 asymmetric")
    )
    assert symmetric == "hqq: rounded, scales by 20 half-quadratic steps"
    assert "zero points and scales" in free
