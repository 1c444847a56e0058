"""Sampling in Triton's interpreter: what is kept, what is drawn, and that batches do not matter."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch

import kernels.triton.reference as twins
from inference.scheduling.sampler import Draw, draw_token, keep_likely, log_min_p
from kernels.gumbel_noise import uniform
from kernels.triton.common import Workspace
from kernels.triton.sampling import sample as sampling
from kernels.triton.sampling.logits import LISTED, Edits
from kernels.triton.sampling.sample import BOUND, HEAD, HELD, sample
from tests.kernels.triton_lab import building_for, compiled, fitting, interpreted

V = 300


def rows(*each: tuple[float, int, float], sharp: float = 3.0, dtype: str = "float32"):
    """Logits with equals among them, and the parameters of the rows (temperature, k, p)."""
    generator = torch.Generator().manual_seed(len(each))
    logits = torch.randn(len(each), V, generator=generator) * sharp
    logits[:, 150:250] = logits[:, :100]
    logits[:, 7], logits[:, 260:290] = -torch.inf, 0.0
    logits[:, 270] = -0.0
    temperature, k, p = zip(*each, strict=True)
    return (
        logits.to(getattr(torch, dtype)),
        torch.tensor(temperature),
        torch.tensor(k, dtype=torch.int32),
        torch.tensor(p),
        torch.arange(len(each)) * 2**33 + 5,
        torch.arange(len(each)) + 2**32 * 3,
    )


@contextmanager
def cut(chunk: int, held: int) -> Iterator[None]:
    """Rows in parts of so many tokens, and so many in registers."""
    with patch.multiple(sampling, CHUNK=chunk, HELD=held):
        yield


def parts_of(chunk: int, held: int) -> int:
    """Elements of the workspace that a row takes."""
    return HEAD.value + 2 * (1 << (-(-V // chunk) - 1).bit_length()) + held


EACH = [
    (0.0, 0, 1.0), (1.0, 0, 1.0), (0.7, 1, 1.0), (1.3, 50, 1.0), (1.0, 0, 0.9), (0.5, 40, 0.7),
    (2.0, 0, 0.9999), (1.0, V, 1.0), (3.0, 170, 0.95), (0.0, 5, 0.5), (1.0, 3000, 1e-6),
]  # fmt: skip


def kept(logits, temperature, workspace, size):
    """What a row's draw kept, from the element that its cut leaves in the workspace."""
    bounds = workspace.parts.view(torch.int64)[BOUND.value :: size][: len(logits)]
    x = logits.float() / torch.where(temperature > 0, temperature, 1)[:, None] + 0.0
    bits = x.view(torch.int32)
    key = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    return ((key << 32) | (0x7FFFFFFF - torch.arange(x.shape[1]))) >= bounds[:, None]


@interpreted
def test_what_is_drawn_is_distributed_as_it_should():
    """Chi-square of 20000 steps of one request, of all tokens and of the likely."""
    draws, tokens = 20000, 32
    logits = torch.randn(1, tokens, generator=torch.Generator().manual_seed(0)).expand(draws, -1)
    for k, p in ((0, 1.0), (20, 0.9)):
        arguments = (
            logits.contiguous(), torch.full((draws,), 0.8), torch.full((draws,), k).int(),
            torch.full((draws,), p), torch.full((draws,), 11), torch.arange(draws),
        )  # fmt: skip
        with cut(tokens, tokens):
            few = [t[:4].contiguous() for t in arguments]
            got = sampling.sample(*few, Workspace.on("cpu", 1 << 20, 1 << 13))
        drawn = twins.sample(*arguments)
        assert torch.equal(got, drawn[:4])
        kept = twins.likely(*(t[:1] for t in arguments[:4]))[0]
        share = torch.softmax(torch.where(kept, logits[0] / 0.8, -torch.inf), 0) * draws
        counts = drawn.bincount(minlength=tokens)
        assert not counts[~kept].any()
        chi = ((counts - share)[kept] ** 2 / share[kept]).sum()
        freedom = int(kept.sum()) - 1
        assert chi < freedom + 4 * (2 * freedom) ** 0.5


FLOORS = [0.0, 0.3, 0.1, 0.02, 0.5, 1.0, 1e-9, 0.9, 0.05, 0.5, 0.2]  # min_p of the rows of EACH


def edits_of(count: int, vocabulary: int = V):
    """Rows in turn with nothing, biases, a mask, and all of it; lists and masks of several rows."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randperm(vocabulary, generator=generator)[:40].int()
    lists = torch.full((3, LISTED), -5, dtype=torch.int32)
    lists[1, :40], lists[2, :20] = ids, ids[:20]
    values = torch.randn(3, LISTED, generator=generator) * 4
    values[1, 3], values[2, 0] = -torch.inf, 100.0
    words = -(-vocabulary // 32)
    masks = torch.randint(-(2**31), 2**31, (2, words), generator=generator).int()
    rows = torch.arange(count)
    biased, masked = rows % 2 == 1, rows % 4 >= 2
    return Edits(
        ids=lists,
        values=values,
        masks=masks,
        lists=torch.where(biased, 1 + rows // 2 % 2, 0),
        starts=torch.where(biased, rows % 5, 0).int(),
        ends=torch.where(biased, 15 + rows % 5, 0).int(),
        mask_rows=torch.where(masked, rows % 2, -1).int(),
    )


@pytest.mark.parametrize(
    ("edited", "chunk", "held", "sharp", "dtype", "each"),
    [
        (False, 128, 128, 3.0, "float32", slice(3, 6)),
        (False, 256, 32, 0.1, "float32", slice(5, 6)),
        (False, 512, 512, 2.0, "float16", slice(None)),
        (True, 128, 128, 3.0, "float32", slice(0, 8)),
        (True, 512, 512, 3.0, "float16", slice(None)),
        (True, 256, 16, 3.0, "float32", slice(2, 7)),
    ],
)
@interpreted
def test_equals_its_twin(edited, chunk, held, sharp, dtype, each):
    """Also where many are equal, and where the kept do not fit in registers; of biases, masks and
    min-p, rows that ask for none are as they were. Batches do not matter."""
    logits, *rest = rows(*EACH[each], sharp=sharp, dtype=dtype)
    more, one, wanted = {}, {}, logits
    if edited:
        logits = logits.nan_to_num(neginf=-30.0)
        floors, edits = torch.tensor(FLOORS[each]).log(), edits_of(len(logits))
        wanted = edits.applied(logits)
        assert not torch.equal(wanted[1], logits[1])
        assert torch.equal(wanted[0], logits[0])
        own = {n: getattr(edits, n)[-1:] for n in ("lists", "starts", "ends", "mask_rows")}
        more = {"log_min_p": floors, "edits": edits}
        one = {"log_min_p": floors[-1:], "edits": replace(edits, **own)}
    last = [t[-1:].clone() for t in (logits, *rest)]
    workspace, floors = Workspace.on("cpu", 1 << 16, 64), more.get("log_min_p")
    with cut(chunk, held):
        got = sampling.sample(logits, *rest, workspace, **more)
        found = kept(wanted, rest[0], workspace, parts_of(chunk, held))
        alone = sampling.sample(*last, workspace, **one)
    assert torch.equal(logits, wanted)
    assert torch.equal(got, twins.sample(wanted, *rest, log_min_p=floors))
    likely = twins.likely(wanted, *rest[:3], floors)
    for row, (temperature, k, p) in enumerate(EACH[each]):
        if temperature and (0 < k < V or p < 1 or (edited and floors[row] > -torch.inf)):
            assert torch.equal(found[row], likely[row]), EACH[each][row]
    assert alone == got[-1], "a token depends on its batch"
    assert not workspace.arrivals.any()


@pytest.mark.parametrize("floors", [None, FLOORS])
def test_the_twin_keeps_what_the_engine_keeps(floors):
    logits, temperature, k, p, _, _ = rows(*EACH)
    wanted = twins.likely(
        logits, temperature, k, p, *([torch.tensor(floors).log()] if floors else [])
    )
    for row in range(len(EACH)):
        if temperature[row] > 0:
            x, floor = (logits[row] / temperature[row]).numpy(), floors and [log_min_p(floors[row])]
            found = keep_likely(x, int(k[row]), float(p[row]), *(floor or []))
            assert found.tolist() == wanted[row].nonzero().flatten().tolist(), EACH[row]


@pytest.mark.parametrize("sharp", [0.1, 3.0])
@interpreted
def test_the_engine_draws_on_a_cpu_what_the_kernel_draws(sharp):
    """The same noise, bit for bit, and the same token of the same logits, seed and step."""
    logits, temperature, k, p, seeds, steps = arguments = rows(*EACH * 2, sharp=sharp)
    workspace = Workspace.on("cpu", 1 << 16, 64)
    floors = torch.tensor([0.0, 0.05] * len(EACH)).log()
    drawn = sampling.sample(*arguments, workspace, log_min_p=floors)
    numbers = twins.uniform(seeds, steps, V)
    for row in range(len(logits)):
        seed, step = int(seeds[row]), int(steps[row])
        own = Draw(*(float(t[row]) for t in (temperature, p)), int(k[row]), floors[row], seed)
        assert draw_token(logits[row].numpy(), own, step) == drawn[row], row
        assert uniform(seed, step, np.arange(V)).tolist() == numbers[row].tolist()


@interpreted
def test_rows_that_no_token_is_left_of_or_that_are_not_finite_are_told():
    """Also where the mask forbids what is not finite."""
    each = [(0.0, 0, 1.0), (1.0, 0, 1.0), (0.7, 40, 0.9), (1.0, 0, 1.0), (0.0, 0, 1.0)]
    floors = torch.tensor([0.0, 0.0, 0.0, 0.1, 0.0]).log()
    edits = replace(edits_of(5), mask_rows=torch.zeros(5, dtype=torch.int32))
    edits.ends.copy_(edits.starts)
    edits.masks.zero_()
    workspace = Workspace.on("cpu", 1 << 16, 64)
    logits, *rest = rows(*each)
    got = sampling.sample(logits, *rest, workspace, log_min_p=floors, edits=edits)
    assert got.tolist() == [-1] * 5
    edits.masks[:, 1] = 1 << 3
    for bad in (torch.nan, -torch.nan, torch.inf):
        for own in ({}, {"log_min_p": floors, "edits": edits}):
            logits, *rest = rows(*each)
            logits[:4, 77] = bad
            *broken, last = sampling.sample(logits, *rest, workspace, **own).tolist()
            assert broken == [-1] * 4
            assert last == 35 if own else last >= 0


@interpreted
def test_more_rows_than_the_workspace_holds():
    arguments, size = rows(*EACH[:7]), HEAD.value + 2 + HELD
    wanted = twins.sample(*arguments)
    for elements, tiles in ((2 * size, 64), (6 * size, 64), (1 << 24, 2)):
        workspace = Workspace.on("cpu", elements, tiles)
        assert torch.equal(sample(*arguments, workspace), wanted)
        assert not workspace.arrivals.any()


@interpreted
def test_what_does_not_fit_is_refused():
    workspace, arguments = Workspace.on("cpu", 1 << 10, 64), rows(*EACH[:2])
    for i, t, message in (
        (0, arguments[0].t(), r"needed is float \[B, V\], contiguous"),
        (1, arguments[1][:1], "temperature is"),
        (2, arguments[2].long(), r"top_k is torch.int64 \(2,\); needed is torch.int32"),
    ):
        with pytest.raises(ValueError, match=message):
            sample(*arguments[:i], t, *arguments[i + 1 :], workspace)
    with pytest.raises(ValueError, match="make a larger one"):
        sample(*arguments, workspace)


@pytest.mark.parametrize("capability", [80, 89, pytest.param(90, marks=pytest.mark.every_triton)])
@compiled
def test_compiled(capability):
    arguments = rows(*EACH)
    kind = torch.float32 if capability == 90 else torch.bfloat16
    logits = torch.zeros(len(EACH), 128256, dtype=kind)
    for edits in (None, edits_of(len(EACH), 128256)):
        with building_for(capability) as built:
            sample(logits, *arguments[1:], Workspace.on("cpu", 1 << 20, 64), edits=edits)
        fitting(built, 2, registers=128)
