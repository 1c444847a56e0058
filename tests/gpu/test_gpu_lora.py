"""Adapters of linear layers on a GPU: within bounds of fp64, the same bits in any company, and
behind the base layer's kernel, while which it starts, in a graph whose slots change."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
if torch.cuda.is_available():
    from kernels.bench.case import relative
    from kernels.triton import fused
    from kernels.triton.common import alone
    from kernels.triton.linear.lora import LoraStack, add_lora
    from kernels.triton.linear.w8a8 import pack_w8a8
    from kernels.triton.reference import add_lora_reference

LAYERS = {"qkv": ((4096, 1024, 1024), 4096), "o": ((4096,), 4096),
          "gate_up": ((14336, 14336), 4096), "down": ((4096,), 14336),
          "small": ((576, 192, 192), 576)}  # fmt: skip
KINDS = ["float16", "bfloat16", "float32", "static", "rows", "fp8", "runs"]
ROWS = (1, 16, 40, 300)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def make_stack(layer: str, rank: int, dtype: torch.dtype, slots: int = 4):
    outputs, inputs = LAYERS[layer]
    stack = LoraStack.empty(slots, outputs, rank, inputs, dtype, "cuda")
    for slot in range(slots):
        for part, size in enumerate(outputs):
            a = torch.randn(rank, inputs, device="cuda") / inputs**0.5
            stack.put(slot, part, a, torch.randn(size, rank, device="cuda"))
    return stack


def make_rows(kind: str, rows: int, inputs: int):
    if kind.startswith(("float", "bfloat")):
        return torch.randn(rows, inputs, device="cuda", dtype=getattr(torch, kind)), None
    x = torch.randn(rows, inputs, device="cuda")
    if kind == "runs":
        return fused.quantize_rows(x, dtype=torch.float8_e4m3fn, group=128)
    one = torch.tensor([0.04], device="cuda") if kind == "static" else None
    return fused.quantize_rows(x, one, torch.float8_e4m3fn if kind == "fp8" else torch.int8)


def make_slots(rows: int, slots: int = 4) -> torch.Tensor:
    """Of any slot and of none; a row alone has one."""
    return torch.randint(-1 if rows > 1 else 0, slots, (rows,), device="cuda", dtype=torch.int32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layer", LAYERS)
def test_it_equals_its_fp64_twin(layer, kind):
    if kind in ("fp8", "runs") and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("bits of e4m3 are made from Ampere on")
    dtype = getattr(torch, kind, torch.bfloat16)
    for rank in (16, 64) if kind != "float32" else (16,):
        stack = make_stack(layer, rank, dtype)
        for rows in ROWS:
            x, scales = make_rows(kind, rows, LAYERS[layer][1])
            y, slots = (
                torch.randn(rows, stack.b.shape[1], device="cuda").to(dtype),
                make_slots(rows),
            )
            wide = torch.cat((y, y), 1)
            wanted = add_lora_reference(x, scales, y, slots, stack.a, stack.b, stack.starts)
            before = y.clone()
            add_lora(x, scales, y, slots, stack)
            bound = {torch.bfloat16: 5e-3, torch.float16: 1e-3, torch.float32: 1e-5}[dtype]
            assert relative(y, wanted) < bound, (rank, rows)
            assert torch.equal(y[slots < 0], before[slots < 0])
            add_lora(x, scales, wide[:, : y.shape[1]], slots, stack)
            assert torch.equal(wide, torch.cat((y, before), 1)), "rows of longer ones"


@pytest.mark.parametrize("layer", ["qkv", "down"])
@pytest.mark.parametrize("rank", [16, 128])
def test_a_row_has_its_bits_in_any_company(layer, rank):
    stack, slots = make_stack(layer, rank, torch.float16), make_slots(300)
    x, scales = make_rows("rows", 300, LAYERS[layer][1])
    y = torch.randn(300, stack.b.shape[1], device="cuda").half()

    def found(rows, invariant=True):
        own = y[rows].clone()
        add_lora(x[rows], scales[rows], own, slots[rows], stack, invariant=invariant)
        return own

    whole = found(slice(None))
    assert torch.equal(found(slice(None, 64), invariant=False), whole[:64])
    for count in (1, 5, 16, 17, 130):
        for start in (0, 31, 170):
            rows = slice(start, start + count)
            assert torch.equal(found(rows), whole[rows]), rows


@pytest.mark.parametrize("layer", ["qkv", "gate_up", "down"])
@pytest.mark.parametrize("rows", [1, 16, 64, 300])
def test_a_graph_with_kernels_around_gives_the_bits_of_launches_one_by_one(layer, rows, workspace):
    """The base layer ahead, whose y is not there yet, and a kernel after that reads the sum."""
    outputs, inputs = LAYERS[layer]
    stacks = [make_stack(layer, 16, torch.bfloat16) for _ in range(3)]
    weights = [
        pack_w8a8(
            torch.randint(-127, 128, (sum(outputs), inputs), dtype=torch.int8, device="cuda"),
            torch.rand(sum(outputs), device="cuda") * 1e-4,
        )
        for _ in stacks
    ]
    x, slots = torch.randn(rows, inputs, device="cuda").bfloat16(), make_slots(rows)

    def run():
        results, total = [], x
        for weight, stack in zip(weights, stacks, strict=True):
            q, scales = fused.quantize_rows(total)
            y = weight.run(q, scales, workspace)
            add_lora(q, scales, y, slots, stack, ready=True)
            results += [y, fused.quantize_rows(y)[0]]
            total = total + y[:, :1]
        return [*results, total]

    run()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = run()
    for turn in range(20):
        slots.copy_(make_slots(rows) if turn else torch.full_like(slots, -1))
        x.normal_()
        with alone():
            wanted = run()
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(out, wanted, strict=True)), turn


def test_rows_of_none_change_nothing_behind_a_base_layer(workspace):
    """Programs with nothing to do wait all the same, so that who comes next reads all of y."""
    weight = pack_w8a8(
        torch.randint(-127, 128, (28672, 4096), dtype=torch.int8, device="cuda"),
        torch.rand(28672, device="cuda") * 1e-4,
    )
    stack = make_stack("gate_up", 16, torch.bfloat16)
    q, scales = make_rows("rows", 16, 4096)
    slots = torch.full((16,), -1, dtype=torch.int32, device="cuda")
    for _ in range(50):
        with alone():
            wanted = fused.gated_product(weight.run(q, scales, workspace))
        y = weight.run(q, scales, workspace)
        add_lora(q, scales, y, slots, stack, ready=True)
        found = fused.gated_product(y)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
