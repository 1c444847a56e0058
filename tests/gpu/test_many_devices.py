"""Blocks solved by several GPUs, or by two workers on one: the bytes of a single GPU."""

from __future__ import annotations

import pytest
import torch

from calibrate.workers import InTurn, Task, Workers
from ptq.pipeline import solver
from ptq.pipeline.driver import quantize_tokens
from ptq.recipe.schema import DevicesSpec
from tests.ptq.pipeline.test_many_devices import RUNS_OF, left_by, plan_on, samples

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
GPUS = torch.cuda.device_count()


def solved(model, output, name, device):
    found = quantize_tokens(plan_on(device, model, output, name), samples(), progress=False)
    return left_by(found)


@pytest.mark.parametrize("name", RUNS_OF)
def test_workers_on_one_gpu_find_the_same(tiny_llama, tmp_path, monkeypatch, name):
    expected = solved(tiny_llama, tmp_path / "cuda", name, "cuda")
    assert solved(tiny_llama, tmp_path / "1", name, DevicesSpec(gpus=1)) == expected
    place = torch.device("cuda", 0)
    for workers in (2, 3):
        monkeypatch.setattr(solver, "devices_of", lambda _, n=workers: [place] * n)
        assert solved(tiny_llama, tmp_path / f"{workers}", name, "cuda") == expected


@pytest.mark.skipif(GPUS < 2, reason="needs several GPUs")
@pytest.mark.parametrize("name", RUNS_OF)
def test_several_gpus_find_the_same(tiny_llama, tmp_path, name):
    expected = solved(tiny_llama, tmp_path / "cuda", name, "cuda")
    for count in {2, GPUS}:
        found = solved(tiny_llama, tmp_path / str(count), name, DevicesSpec(gpus=count))
        assert found == expected


def test_sums_that_meet_on_one_gpu_are_taken_in_turn():
    """Each worker's part is made where it is, and added to the total of the first, in order."""
    devices = [torch.device("cuda", i % GPUS) for i in range(4)]
    workers, total = Workers(devices), torch.zeros(1 << 20, device=devices[0])
    turns, parts = InTurn(workers), [torch.full_like(total, 0.1 + 3.0**i) for i in range(16)]

    def add(worker: int) -> None:
        assert torch.cuda.current_device() == devices[worker].index
        for number in range(worker, len(parts), len(workers)):
            part = parts[number].to(devices[worker])
            with turns.turn(number):
                total.add_(part.to(total.device))

    workers.spread([Task("adding", 1.0, add) for _ in devices], range(len(devices)))
    expected = torch.zeros_like(total)
    for part in parts:
        expected.add_(part)
    assert torch.equal(total, expected)
