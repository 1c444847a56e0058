"""Low-rank adapters of linear layers: the compiled kernels against plain torch."""

import pytest
import torch

from kernels.cpu import native
from kernels.cpu.native_ops import LoraTable
from kernels.ops import add_lora
from kernels.reference import LowRank

if native.library() is None:
    pytest.skip("no C++ compiler, and no compiled kernels", allow_module_level=True)

SLOTS = [2, -1, 0, 0, 1, 2, 2, -1, 0, 2, 2]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def table_of(inputs: int, parts: list[int], dtype: torch.dtype) -> tuple[LoraTable, torch.Tensor]:
    """Three slots, of which the last has no first part; and B A of each [3, N, K]."""
    table, whole = LoraTable(2), torch.zeros(3, sum(parts), inputs)
    for slot, rank in enumerate((4, 7, 16)):
        own, first = [], 0
        for i, n in enumerate(parts):
            a, b = random(rank, inputs, seed=slot), random(n, rank, seed=slot + 9)
            if not (slot == 2 and i == 0):
                own.append(LowRank.of(a, b, first, dtype))
                exact = [t.to(dtype).double() for t in (b, a)]
                whole[slot, first : first + n] = (exact[0] @ exact[1]).float()
            first += n
        table.put(slot, {1: own})
    return table, whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inputs", "parts"), [(64, [32]), (37, [19, 5, 3]), (16, [96, 96])])
def test_rows_get_what_their_adapter_adds(isa, dtype, inputs, parts):
    table, whole = table_of(inputs, parts, dtype)
    x, y, slots = random(len(SLOTS), inputs), random(len(SLOTS), sum(parts)), torch.tensor(SLOTS)
    wanted = y.clone()
    for i, slot in enumerate(SLOTS):
        if slot >= 0:
            wanted[i] += whole[slot] @ x[i]
    found = add_lora(x, y, slots, table, 1)
    for i in range(len(SLOTS)):  # the bits of a row are its own
        alone = add_lora(x[i : i + 1], y[i : i + 1], slots[i : i + 1], table, 1)
        assert torch.equal(found[i : i + 1], alone)
    assert torch.equal(add_lora(x, y, slots, table, 0), y), "another layer"
    assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-3)
    assert torch.equal(found[slots < 0], y[slots < 0])


def test_plain_torch_gives_the_same(monkeypatch):
    table, _ = table_of(48, [40, 24], torch.float32)
    x, y, slots = random(len(SLOTS), 48), random(len(SLOTS), 64), torch.tensor(SLOTS)
    compiled = add_lora(x, y.half(), slots, table, 1)
    monkeypatch.setattr(native, "library", lambda: None)
    plain = add_lora(x, y.half(), slots, table, 1)
    assert compiled.dtype == torch.float16
    assert torch.allclose(compiled, plain, rtol=1e-2, atol=1e-2)


def test_a_slot_is_another_adapters_next():
    table, whole = table_of(32, [16], torch.float32)
    x, slots = random(1, 32), torch.tensor([1])
    table.put(1, {})
    assert torch.equal(add_lora(x, torch.zeros(1, 16), slots, table, 1), torch.zeros(1, 16))
    table.put(1, {1: [LowRank.of(random(3, 32), random(16, 3), 0, torch.float32)]})
    found = add_lora(x, torch.zeros(1, 16), slots, table, 1)[0]
    assert torch.allclose(found, random(16, 3) @ (random(3, 32) @ x[0]), atol=1e-4)
    assert not torch.allclose(found, whole[1] @ x[0], atol=1e-2)
