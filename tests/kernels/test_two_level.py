"""Two-level scales: told from the scales alone, exactly."""

import pytest
import torch
from torch import Tensor

from kernels.two_level import (
    LARGEST,
    choose_unit,
    larger_unit,
    nearest_multiples,
    stored_unit,
    two_level,
)

FLOATS = [torch.bfloat16, torch.float16, torch.float32]


def scales_of_two_levels(rows: int, groups: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Units of 4 bits and multiples from 1 to 16; their products are exact in every type."""
    generator = torch.Generator().manual_seed(seed)
    power = torch.randint(4, 12, (rows,), generator=generator)
    unit = torch.randint(8, 16, (rows,), generator=generator) * 2.0**-power
    return unit, torch.randint(1, LARGEST + 1, (rows, groups), generator=generator)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("groups", [2, 3, 32, 37])
def test_two_levels_are_found(dtype: torch.dtype, groups: int) -> None:
    unit, multiple = scales_of_two_levels(5000, groups)
    multiple[7], multiple[4999, 0] = 1, 16
    scale = (unit[:, None] * multiple).to(dtype)
    found = two_level(scale)
    assert found[0].dtype == torch.float32
    assert found[0].shape == unit.shape
    assert found[1].dtype == torch.int8
    assert found[1].shape == scale.shape
    assert int(found[1].min()) >= 1
    assert int(found[1].max()) <= LARGEST
    torch.testing.assert_close(found[0][:, None] * found[1], scale.float(), rtol=0, atol=0)


def test_the_unit_is_the_largest() -> None:
    unit, multiple = scales_of_two_levels(64, 8)
    multiple[:, 2], multiple[:, 5] = 9, 4  # without a common divisor
    found = two_level(unit[:, None] * multiple)
    torch.testing.assert_close(found, (unit, multiple.to(torch.int8)), rtol=0, atol=0)
    twice = two_level(unit[:, None] * torch.full((64, 4), 6))
    assert bool((twice[1] == 1).all())


@pytest.mark.parametrize("dtype", FLOATS)
def test_ordinary_scales_have_none(dtype: torch.dtype) -> None:
    scale = torch.rand(32, 16, generator=torch.Generator().manual_seed(1)).add(0.5).to(dtype)
    assert two_level(scale) is None


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("row", [0, 4999])
def test_one_scale_beside_the_multiples_is_told(dtype: torch.dtype, row: int) -> None:
    unit, multiple = scales_of_two_levels(5000, 8)
    multiple[:, 1] = 9
    scale = (unit[:, None] * multiple).to(dtype)
    assert two_level(scale) is not None
    scale[row, 1] = torch.nextafter(scale[row, 1], torch.tensor(1e3, dtype=dtype))
    assert two_level(scale) is None


def test_seventeen_times_the_unit_is_too_much() -> None:
    assert two_level(torch.tensor([[1.0, 17.0]])) is None
    assert two_level(torch.tensor([[2.0, 17.0]])) is None
    assert two_level(torch.tensor([[1.0, 16.0]])) is not None


@pytest.mark.parametrize("dtype", FLOATS)
def test_one_scale_a_row_is_always_a_unit(dtype: torch.dtype) -> None:
    scale = torch.rand(100, 1, generator=torch.Generator().manual_seed(2)).add(1e-3).to(dtype)
    found = two_level(scale)
    assert bool((found[1] == 1).all())
    torch.testing.assert_close(found[0], scale[:, 0].float(), rtol=0, atol=0)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("inf"), float("nan")])
def test_what_is_no_scale_has_none(bad: float) -> None:
    scale = torch.ones(3, 4)
    scale[1, 2] = bad
    assert two_level(scale) is None
    assert two_level(torch.full((3, 1), bad)) is None


@pytest.mark.parametrize("dtype", FLOATS)
def test_subnormal_scales_are_exact(dtype: torch.dtype) -> None:
    about = torch.finfo(dtype)
    smallest = about.tiny * about.eps
    unit = torch.tensor(3 * smallest, dtype=torch.float64)
    multiple = torch.tensor([[1, 16, 5], [7, 2, 2]])
    scale = (unit * multiple).to(dtype)
    found = two_level(scale)
    torch.testing.assert_close(found[0].double(), unit.expand(2), rtol=0, atol=0)
    torch.testing.assert_close(found[1].long(), multiple, rtol=0, atol=0)


def test_no_rows_are_of_two_levels() -> None:
    found = two_level(torch.ones(0, 4))
    assert found[0].shape == (0,)
    assert found[1].shape == (0, 4)


@pytest.mark.parametrize("scale", [torch.ones(4), torch.ones(4, 0), torch.ones(2, 2).int()])
def test_other_tensors_are_refused(scale: Tensor) -> None:
    with pytest.raises(ValueError, match=r"group scales \[rows, groups\]"):
        two_level(scale)


def bits(x: Tensor) -> int:
    """Most significant bits of any of some numbers."""
    mantissa = (torch.frexp(x.double())[0] * 2**24).long()
    return 24 - min(int(m & -m).bit_length() - 1 for m in mantissa.flatten())


def test_a_chosen_unit_is_the_least_that_reaches_the_scales() -> None:
    scale = torch.rand(500, 8, generator=torch.Generator().manual_seed(3)).add(1e-4)
    scale = scale * 2.0 ** torch.arange(-12, 13)[torch.arange(500) % 25, None]
    scale[:3] = torch.tensor([2.0**-60, 16.0, 15.5])[:, None]
    unit, high = choose_unit(scale), scale.amax(dim=1, keepdim=True)
    assert unit.shape == (500, 1)
    assert unit[1].item() == 1.0
    assert bits(unit) == bits(larger_unit(unit)) == 4
    assert bool((unit * LARGEST >= high).all())
    digits = torch.frexp(unit)[0] * 16  # from 8 to 15
    below = torch.where(digits == 8, 7.5, digits - 1) * (unit / digits)
    assert bits(below) == 4
    assert bool((below * LARGEST < high).all())
    steps = larger_unit(unit) / unit
    assert steps.min().item() == pytest.approx(16 / 15)
    assert steps.max().item() == pytest.approx(9 / 8)


@pytest.mark.parametrize("dtype", FLOATS)
def test_rounded_scales_have_two_levels_in_every_type(dtype: torch.dtype) -> None:
    scale = torch.rand(200, 16, generator=torch.Generator().manual_seed(4)).add(0.01) / 40
    scale[0, 3], scale[1] = 2.0**-60, 2.0**-14  # nothing but zeros; fp16's smallest normal
    unit = choose_unit(scale)
    rounded = nearest_multiples(scale, unit) * unit
    assert torch.equal(rounded.to(dtype).float(), rounded)
    assert two_level(rounded.to(dtype)) is not None
    near = (rounded - scale).abs() <= unit / 2
    assert bool((near | (scale < unit / 2)).all())
    assert rounded[0, 3] == unit[0, 0]


def test_the_unit_of_rounded_scales_is_found_again_or_a_finer_one() -> None:
    unit, multiple = scales_of_two_levels(3000, 3)
    scale = unit[:, None] * multiple
    found = stored_unit(scale)
    assert bits(found) <= 4
    assert bool((found <= unit[:, None]).all())
    assert bool((scale / found <= LARGEST).all())
    assert torch.equal(torch.round(scale / found) * found, scale)
    multiple[:, 0], multiple[:, 1] = 16, 15
    assert torch.equal(stored_unit(unit[:, None] * multiple), unit[:, None])
