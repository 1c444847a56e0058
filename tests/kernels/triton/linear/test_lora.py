"""Adapters of linear layers in Triton's interpreter against their twin; what they compile to."""

from dataclasses import replace

import pytest
import torch

from kernels.triton.linear.lora import LoraStack, add_lora
from kernels.triton.reference import add_lora_reference
from tests.kernels.triton_lab import SHARED, building_for, compiled, fitting, interpreted

PARTS = {1: (72,), 2: (40, 40), 3: (64, 24, 16)}
KINDS = ["float16", "float32", "static", "rows", "column", "fp8", "runs"]
MIXED = [2, -1, 0, 2, 1, -1, 0, 2, 2, -1, -1, 0, 1, 2, 0, 0, -1, 1, 2, -1, 0]


def make_stack(outputs, rank: int, inputs: int, dtype=torch.float16, slots: int = 3):
    """A stack whose slots hold adapters of this rank, and of smaller ones."""
    stack = LoraStack.empty(slots, outputs, rank, inputs, dtype, "cpu")
    stack.a.fill_(7.0)  # whoever comes next finds what another left
    stack.b.fill_(7.0)
    for slot in range(slots):
        for part, size in enumerate(outputs):
            own = max(1, rank - 3 * slot)
            stack.put(slot, part, torch.randn(own, inputs), torch.randn(size, own) / 16)
    return stack


def make_rows(kind: str, rows: int, inputs: int):
    """(x, scales) of a kind, and the model's float type."""
    if kind.startswith(("float", "bfloat")):
        return torch.randn(rows, inputs, dtype=getattr(torch, kind)) / 8, None
    x = torch.randint(-127, 128, (rows, inputs), dtype=torch.int8)
    if kind in ("fp8", "runs"):
        x = torch.randn(rows, inputs).to(torch.float8_e4m3fn)
    shapes = {"static": (1,), "rows": (rows, 1), "column": (rows,), "fp8": (rows, 1)}
    if kind == "runs":
        return x, torch.rand(-(-inputs // 128), rows).add_(0.1).t()
    return x, torch.rand(shapes[kind]).add_(0.5) / (1000 if x.dtype == torch.int8 else 8)


def check(x, scales, slots, stack, y=None, **more) -> torch.Tensor:
    """The op's result, which is the twin's, with rows of no adapter as they were."""
    slots = torch.as_tensor(slots, dtype=torch.int32)
    if y is None:
        y = torch.randn(len(x), stack.b.shape[1]).to(stack.a.dtype)
    before = y.clone()
    wanted = add_lora_reference(x, scales, y, slots, stack.a, stack.b, stack.starts)
    add_lora(x, scales, y, slots, stack, **more)
    assert torch.equal(y[slots < 0], before[slots < 0])
    if (slots >= 0).any():
        error = (y.double() - wanted).norm() / wanted.norm()
        assert error < (1e-3 if y.dtype == torch.float16 else 1e-6)
        assert not torch.equal(y, before)
    return y


@pytest.mark.parametrize("kind", KINDS)
@interpreted
def test_rows_of_every_kind_and_parts(kind):
    x, scales = make_rows(kind, len(MIXED), 272)
    dtype = x.dtype if scales is None else torch.float16
    for parts in PARTS.values() if kind == "static" else (PARTS[3],):
        check(x, scales, MIXED, make_stack(parts, 8, 272, dtype))


@pytest.mark.parametrize("rank", [1, 16, 20, 64, 100])
@interpreted
def test_ranks_are_filled_up(rank):
    torch.manual_seed(rank)
    stack = make_stack(PARTS[2], rank, 144)
    assert stack.a.shape[2] == stack.b.shape[2] == max(16, 1 << (rank - 1).bit_length())
    check(torch.randn(5, 144).half(), None, [1, 0, -1, 2, 0], stack)
    stack.clear(1)
    assert not stack.a[1].any()
    assert not stack.b[1].any()
    assert stack.a[2].any()


@pytest.mark.parametrize("slots", [[1], [-1], [-1] * 18, [0] * 17, [-1] * 20 + [2]])
@interpreted
def test_one_row_and_rows_of_none_or_one_adapter(slots):
    check(*make_rows("rows", len(slots), 160), slots, make_stack(PARTS[3], 16, 160))


@pytest.mark.parametrize("invariant", [False, True])
@interpreted
def test_rows_of_prompts(invariant):
    slots = [*MIXED, *[1] * 40, *[-1] * 66, *[2] * 14]  # tiles of many, of one, of none
    x, scales = make_rows("rows", len(slots), 160)
    check(x, scales, slots, make_stack(PARTS[2], 16, 160), invariant=invariant)


@interpreted
def test_rows_that_are_parts_of_longer_ones_and_rows_of_other_lengths():
    stack, slots = make_stack(PARTS[1], 16, 300), MIXED[:9]
    wide = torch.randn(9, 100).half()
    before = wide.clone()
    check(*make_rows("rows", 9, 300), slots, stack, y=wide[:, 20:92])
    assert torch.equal(wide[:, :20], before[:, :20])
    assert torch.equal(wide[:, 92:], before[:, 92:])
    for columns in (200, 384):  # some are missing; some fill a quantized weight's rows up
        x = torch.full((9, columns), 3.0).half()
        x[:, :300] = torch.randn(9, min(columns, 300))
        check(x, None, slots, stack)
    inner = torch.randn(9, 400).half()[:, 50:350]
    check(inner, None, slots, stack)


@pytest.mark.parametrize("rows", [21, 70])
@interpreted
def test_a_row_has_its_bits_in_any_company(rows):
    """In any place, with any slots beside, cut into any ways; `invariant`, among any number."""
    stack, slots = make_stack(PARTS[3], 16, 330), torch.tensor(MIXED * 4, dtype=torch.int32)[:rows]
    x, scales = make_rows("rows", rows, 330)
    y = torch.randn(rows, 104).half()
    tile = replace(stack.tile(rows, invariant=True), inputs=64, splits=3)
    whole = check(x, scales, slots, stack, y=y.clone(), tile=tile)
    assert torch.equal(
        whole, check(x, scales, slots, stack, y=y.clone(), tile=replace(tile, ways=1))
    )
    turned = check(x.flip(0), scales.flip(0), slots.flip(0), stack, y=y.flip(0), tile=tile)
    assert torch.equal(turned.flip(0), whole)
    alike = check(x, scales, slots, stack, y=y.clone(), invariant=True)
    for row in (3, rows - 1):
        own = slice(row, row + 1)
        some = x[own], scales[own], slots[own], stack
        assert torch.equal(check(*some, y=y[own].clone(), invariant=True), alike[own])


@interpreted
def test_more_slots_than_ways_and_slots_that_are_not_there():
    stack = make_stack((16,), 4, 32, slots=11)
    assert stack.tile(16).ways == 8
    x, y = torch.randn(16, 32).half(), torch.randn(16, 16).half()
    check(x, None, [10, 0, 9, 1, 8, 2, 7, 3, 6, 4, 5, 5, -1, 10, 0, 9], stack)
    before = y.clone()
    add_lora(x, None, y, torch.full((16,), 11, dtype=torch.int32), stack)
    assert torch.equal(y, before), "nothing is read beyond the stack"
    add_lora(x[:0], None, y[:0], torch.zeros(0, dtype=torch.int32), stack)


def test_rules_cut_products_evenly():
    for rank in (16, 32, 64, 128):
        for inputs in (64, 576, 4096, 14336):
            stack = LoraStack.empty(4, (4096,), rank, inputs, torch.bfloat16, "meta")
            alike = {stack.tile(rows, invariant=True).splits for rows in (1, 64, 8192)}
            assert len(alike) == 1
            for rows in (1, 16, 65, 2048, 8192):
                tile = stack.tile(rows)
                steps = -(-inputs // tile.inputs)
                assert (tile.splits - 1) * -(-steps // tile.splits) < steps, "no split is empty"
                assert 3 * tile.inputs * (tile.rows + rank) * 2 <= 99 << 10, "fits on Ada"
    small, many = stack.tile(16), stack.tile(8192)
    assert (small.rows, many.rows, many.splits) == (16, 64, 2)


@interpreted
def test_what_does_not_fit_is_refused():
    stack = make_stack(PARTS[2], 16, 64)
    x, y, slots = torch.zeros(3, 64).half(), torch.zeros(3, 80).half(), torch.zeros(3).int()
    for message, call in (
        ("x is torch.float32", lambda: add_lora(x.float(), None, y, slots, stack)),
        ("y is", lambda: add_lora(x, None, y[:, :79], slots, stack)),
        ("slots are torch.int64", lambda: add_lora(x, None, y, slots.long(), stack)),
        ("scales are", lambda: add_lora(x.char(), torch.ones(2), y, slots, stack)),
        ("rank is 129", lambda: LoraStack.empty(1, (8,), 129, 8, torch.half, "cpu")),
        ("4 parts", lambda: LoraStack.empty(1, (8,) * 4, 8, 8, torch.half, "cpu")),
        ("int8; supported", lambda: LoraStack.empty(1, (8,), 8, 8, torch.int8, "cpu")),
        ("none may be 0", lambda: LoraStack.empty(0, (8,), 8, 8, torch.half, "cpu")),
        ("slot 3", lambda: stack.clear(3)),
        ("part 2", lambda: stack.put(0, 2, torch.ones(1, 64), torch.ones(40, 1))),
        ("B \\(41, 1\\)", lambda: stack.put(0, 1, torch.ones(1, 64), torch.ones(41, 1))),
        ("r up to 16", lambda: stack.put(0, 1, torch.ones(17, 64), torch.ones(40, 17))),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("capability", [80, 89, 90])
@compiled
def test_what_it_compiles_to(capability):
    """Tensor cores; loads of 16 bytes; nothing spilled; each kernel waits for the one ahead."""
    for rank, outputs in ((16, (14336, 14336)), (128, (4096, 1024, 1024))):
        stack = LoraStack.empty(4, outputs, rank, 4096, torch.bfloat16, "cpu")
        for rows, dtype in ((16, torch.int8), (512, torch.bfloat16)):
            x, scales = torch.zeros(rows, 4096, dtype=dtype), torch.ones(rows, 1)
            y = torch.zeros(rows, sum(outputs), dtype=torch.bfloat16)
            own = scales if dtype == torch.int8 else None
            with building_for(capability) as built:
                add_lora(x, own, y, torch.zeros(rows).int(), stack, ready=True)
            for binary in fitting(built, 2, SHARED if capability == 90 else 101376):
                assert binary.count(r"mma\S*\.bf16\.bf16")
                assert bool(binary.count(r"griddepcontrol\.wait")) == (capability == 90)
                started = binary.count(r"griddepcontrol\.launch_dependents")
                assert bool(started) == (capability == 90 and (rows == 16 or binary is built[0]))
            shrink, expand = built
            assert shrink.count(r"cp\.async\.cg|ld\.global\S*v4") >= 3
            assert expand.count(r"st\.global\S*v4"), "rows of y leave in pieces of 16 bytes"
