"""Sums over ranks: ranks are processes that share memory, kernels are interpreted or compiled."""

import re
from dataclasses import replace
from multiprocessing import get_context

import pytest
import torch

from kernels.triton import fused
from kernels.triton.collective import reference
from kernels.triton.collective.all_reduce import AllReduce, Scaling
from kernels.triton.collective.choice import choose, most_rows_of
from tests.kernels import triton_lab
from tests.kernels.triton.test_triton_fused import random
from tests.kernels.triton_lab import building_for, compiled, interpreted
from tests.refusals import refused

HIDDEN, ROWS = 264, 3  # not a power of two; no multiple of 2 or 4 ranks
FP16 = torch.float16  # the interpreter cuts bf16 off


def parts_of(ranks: int, calls: int, integers: bool) -> list[list[torch.Tensor]]:
    """Of each call and rank [rows, HIDDEN]; calls differ in their number of rows."""
    generator, parts = torch.Generator().manual_seed(ranks), []
    for call in range(calls):
        shape = (ranks, 1 if ranks == 8 else ROWS - call % 2, HIDDEN)
        some = torch.randint(-3000, 3000, shape, generator=generator, dtype=torch.int32)
        parts.append(list((some if integers else (some / 1000).half()).unbind()))
    return parts


CPU = torch.device("cpu")


def make_ranks(ranks: int = 2, way: str | None = None, most_rows: int = 8) -> list[AllReduce]:
    """Ranks that go one way, or the one that is chosen."""
    reduces = AllReduce.of_one_process(ranks, CPU, most_rows, HIDDEN, FP16)
    for reduce in reduces if way else ():
        reduce.way = way
    return reduces


def make_scaling(per_row: bool = False):
    x_scale = torch.tensor([[0.02], [0.005], [0.01]]) if per_row else torch.tensor([0.01])
    return Scaling(x_scale, random(HIDDEN).float().abs(), random(1, HIDDEN)[0].float())


def on_ranks(reduces, work) -> list:
    """work(rank, its AllReduce) in a process each; what they return, tensors copied."""
    context = get_context("fork")
    found = [context.SimpleQueue() for _ in reduces]

    def run(rank: int) -> None:
        try:
            found[rank].put(work(rank, reduces[rank]))
        except Exception as error:
            found[rank].put(error)

    processes = [context.Process(target=run, args=(rank,)) for rank in range(len(reduces))]
    for process in processes:
        process.start()
    results = [queue.get() for queue in found]
    for process in processes:
        process.join()
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def as_lists(*tensors: torch.Tensor | None) -> list:
    return [None if t is None else t.float().tolist() for t in tensors]


@pytest.mark.parametrize(
    ("ranks", "way", "integers"),
    [
        *((2, "one_shot", False), (4, "one_shot", False), (4, "two_shot", False)),
        *((4, "one_shot", True), (8, "one_shot", True), (2, "two_shot", True)),
    ],
)
@interpreted
def test_ranks_get_the_bits_of_the_twin(ranks, way, integers):
    """Three calls, one on the residual of another, rows of other numbers between them."""
    parts, weight = parts_of(ranks, 3, integers), random(HIDDEN)
    residual = random(len(parts[0][0]), HIDDEN)
    scaling, static = make_scaling() if integers else None, torch.tensor([0.02])
    reduces = make_ranks(ranks, way)

    def call(function, mine, **more) -> list:
        first, total = [], residual
        for rows, scale in zip(mine, (static, None, None), strict=True):
            more["after"] = weight if scale is None else None
            own = total[: len(rows[0] if isinstance(rows, list) else rows)].contiguous()
            q, scales, total = function(rows, own, weight, 1e-5, scale, scaling=scaling, **more)
            first += as_lists(q, scales, total)
            total = torch.cat((total, residual))[: len(residual)]
        return first

    def work(rank, reduce):
        found = call(reduce.add_rms_norm, [own[rank] for own in parts])
        reduce.check()
        return found

    results = on_ranks(reduces, work)
    assert all(result == results[0] for result in results), "all ranks have the same bits"
    wanted = call(reference.add_rms_norm, parts, result=FP16)
    for got, right in zip(results[0], wanted, strict=True):
        got, right = torch.tensor(got), torch.tensor(right)
        torch.testing.assert_close(got, right, rtol=2e-3, atol=1.01 if got.dim() > 1 else 0)
    for number in (2, 5):
        got, right = torch.tensor(results[0][number]), torch.tensor(wanted[number])
        torch.testing.assert_close(got, right, rtol=2e-3, atol=2e-3)
    assert results[0][2] == wanted[2], "a sum without a norm of its own is exact"


@pytest.mark.parametrize("way", ["one_shot", "two_shot"])
@interpreted
def test_sums_alone_and_other_rows(way):
    """Rows in floats, runs of 128, sums of integers with scales of rows, rows that are the sum."""
    integers, floats = parts_of(2, 1, True)[0], parts_of(2, 1, False)[0]
    scaling, weight, reduces = make_scaling(per_row=True), random(HIDDEN), make_ranks(way=way)

    def calls(function, own, of_floats, **more):
        yield function(own, None, None, 0.0, None, FP16, scaling=scaling, **more)
        yield function(of_floats, None, weight, 1e-5, None, FP16, **more)
        yield function(of_floats, random(ROWS, HIDDEN), weight, 1e-5, None, torch.int8, 128, **more)

    def work(rank, reduce):
        found = [as_lists(reduce.sum(floats[rank]))]
        found += [as_lists(*r) for r in calls(reduce.add_rms_norm, integers[rank], floats[rank])]
        return found

    results = on_ranks(reduces, work)
    assert results[0] == results[1]
    wanted = [as_lists(sum(part.float() for part in floats).half())]
    wanted += [as_lists(*r) for r in calls(reference.add_rms_norm, integers, floats, result=FP16)]
    for got, right in zip(results[0], wanted, strict=True):
        assert got[-1] == right[-1]
        for a, b in zip(got[:-1], right[:-1], strict=True):
            if b is not None:
                torch.testing.assert_close(torch.tensor(a), torch.tensor(b), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("static", [True, False])
@interpreted
def test_more_integers_than_there_is_room_for_go_piece_by_piece(static):
    """Ranks of one process have no library: nothing else could sum them."""
    generator, rows = torch.Generator().manual_seed(3), 11
    parts = torch.randint(-3000, 3000, (2, rows, HIDDEN), generator=generator, dtype=torch.int32)
    scaling, residual = make_scaling(), random(rows, HIDDEN)
    if not static:
        scaling = replace(scaling, x_scale=torch.rand(rows, 1, generator=generator))
    arguments = (residual, random(HIDDEN), 1e-5, torch.tensor([0.02]) if static else None)
    reduces = make_ranks(most_rows=4)

    def work(rank, reduce):
        return as_lists(*reduce.add_rms_norm(parts[rank], *arguments, scaling=scaling))

    results = on_ranks(reduces, work)
    assert results[0] == results[1]
    wanted = reference.add_rms_norm(list(parts), *arguments, scaling=scaling, result=FP16)
    q, scales, total = map(torch.tensor, results[0])
    assert torch.equal(total, wanted[2].float())
    assert (q - wanted[0].float()).abs().max() <= 1
    torch.testing.assert_close(scales, wanted[1].float(), rtol=2e-3, atol=0)


@interpreted
def test_a_sum_that_is_a_residual_alone_stays_where_it_is_summed():
    """The call that takes it goes the same way, whatever the table says."""
    parts, weight, reduces = parts_of(2, 3, False), random(HIDDEN), make_ranks()

    def work(rank, reduce):
        mine, found = [own[rank][:2].contiguous() for own in parts], []
        for whole in (True, False):
            reduce.way = "two_shot"
            _, _, total = reduce.add_rms_norm(mine[0], mine[0], weight, 1e-5, whole_sum=whole)
            found.append(total.tolist())
            reduce.way = "one_shot"
            rows, _, total = reduce.add_rms_norm(mine[1], total, weight, 1e-5)
            found += as_lists(rows, total)
            found += as_lists(reduce.add_rms_norm(mine[2], total, weight, 1e-5)[0])
        return found

    both = on_ranks(reduces, work)
    for rank, found in enumerate(both):
        whole, partial = found[:4], found[4:]
        assert partial[1:] == whole[1:]
        assert partial[0][rank] == whole[0][rank]
        assert partial[0][1 - rank] != whole[0][1 - rank]
    assert both[0][1:4] == both[1][1:4]


@pytest.mark.parametrize(
    ("rank", "way", "waited_for"),
    [
        (0, "one_shot", r"part of a sum \(one-shot"),
        (0, "two_shot", r"part of a sum \(two-shot"),
        (1, "two_shot", r"results of a sum \(two-shot kernel\)"),  # of the other rank
    ],
)
@interpreted
def test_a_rank_that_does_not_come_is_named(rank, way, waited_for):
    reduce = make_ranks(way=way)[rank]
    reduce.patience = 1e-4
    reduce.check()
    reduce.sum(random(1, HIDDEN))
    message = (
        rf"rank {1 - rank} did not take part.* for 0.0001 seconds: rank {rank} waited for its "
    )
    with pytest.raises(RuntimeError, match=message + waited_for):
        reduce.check()


@interpreted
def test_a_rank_that_is_told_to_give_up_waits_no_longer():
    reduce = make_ranks(way="one_shot")[0]
    reduce.patience = 1000.0
    reduce.give_up()
    reduce.sum(random(1, HIDDEN))
    with pytest.raises(RuntimeError, match="rank 0 was made to wait for no sum any more"):
        reduce.check()


@pytest.mark.every_triton
@pytest.mark.parametrize("way", ["one_shot", "two_shot"])
@compiled
def test_no_warp_counts_an_exchange_before_all_have_read_its_number(way):
    """Each warp reads it: between that and the store of the next there is a barrier."""
    x = torch.zeros(4, 4096).bfloat16()
    reduce = AllReduce.of_one_process(2, CPU, 4, 4096, x.dtype)[0]
    reduce.way = way
    with building_for(90) as built:
        reduce.add_rms_norm(x, x, x[0], 1e-6, torch.ones(1), torch.int8)
        reduce.add_rms_norm(x, x, x[0], 1e-6, None, x.dtype)
        reduce.sum(x)
    for binary in built:
        between = counted(binary.ptx)
        assert len(between) == (1 if way == "one_shot" else 2), "a store a branch"
        assert all("bar.sync" in text for text in between)


def counted(ptx: str) -> list[str]:
    """What stands between the load of a number that a whole program reads, and its store."""
    found, stored = [], r"^\t@%p\d+ st\.global\.b32 \[ (%rd\d+) \+ 0 \]"
    for store in re.finditer(stored, ptx, re.MULTILINE):
        place = re.escape(store.group(1))
        load = re.search(rf"^\tld\.global\.b32 \{{ %r\d+ \}}, \[ {place} \+ 0", ptx, re.MULTILINE)
        if load is not None:
            found.append(ptx[load.end() : store.start()])
    return found


@interpreted
def test_what_does_not_fit_is_refused():
    reduce, x, scaling = make_ranks()[0], random(2, HIDDEN), make_scaling(per_row=True)
    refused(r"part is torch.float32 .*needed is contiguous torch.fl", reduce.sum, x.float())
    refused(r"needed is contiguous torch.int32 \[rows, 264\], since", reduce.sum, x, scaling)
    refused("3 scales for 2 rows", reduce.sum, x.int(), scaling)
    refused(r"norm weight is \(8,\); needed is \(264,\)", reduce.add_rms_norm, x, x, x[0, :8], 1e-5)
    refused("residual must be contiguous", reduce.add_rms_norm, x, x[:1], None, 1e-5)
    refused("no library", reduce.sum, random(9, HIDDEN))
    make = AllReduce.of_one_process
    refused("over 3 ranks; the kernels are for 2, 4, 8", make, 3, CPU, 8, HIDDEN, FP16)
    refused("rows are of 20; needed is a multiple of 8", make, 2, CPU, 8, 20, FP16)
    some = (2, CPU, 8, HIDDEN, torch.float32)
    refused("in torch.float32; supported are torch.bfloat16", make, *some)
    few, most = most_rows_of(4, 8192, 4096)
    assert (few, most) == (16, 1024)
    sizes = [(rows, rows * 8192 * 2) for rows in (16, 17, 1024, 1025)]
    ways = [choose(4, nbytes, rows, few, most) for rows, nbytes in sizes]
    assert ways == ["one_shot", "two_shot", "two_shot", "library"]
    assert choose(4, 16 * 8192 * 4, 16, few, most) == "two_shot", "of int32 there are more bytes"


def reductions(ttgir: str) -> list[str]:
    """The layouts of what is summed or compared over a row, in order."""
    named = dict(re.findall(r"^(#\w+) = (#ttg.*)$", ttgir, re.MULTILINE))
    found = re.findall(r'"tt\.reduce"\(%\w+\).*?\}\) : \(tensor<\w+, (#\w+)>\)', ttgir, re.DOTALL)
    return [named[each] for each in found]


@pytest.mark.parametrize("hidden", [4096, 8192])
@compiled
def test_rows_are_summed_in_the_order_of_one_gpu(hidden, monkeypatch):
    """A sum of squares has the same bits where threads hold the same elements of a row."""
    orders, binary = [], triton_lab._binary
    keep = lambda kernel: (orders.append(reductions(kernel.asm["ttgir"])), binary(kernel))[1]  # noqa: E731
    monkeypatch.setattr(triton_lab, "_binary", keep)
    x, one = torch.zeros(4, hidden).bfloat16(), torch.ones(1)
    reduce = AllReduce.of_one_process(4, CPU, 4, hidden, torch.bfloat16)[0]
    for scale, dtype, after in (
        (one, torch.int8, None),
        (one, torch.int8, x[0]),
        (None, torch.int8, None),
        (None, torch.bfloat16, x[0]),
    ):
        arguments = (x, x[0], 1e-6, scale, dtype)
        with building_for(90):
            fused.add_rms_norm(x, *arguments, after=after)
            for way in ("one_shot", "two_shot"):
                reduce.way = way
                reduce.add_rms_norm(x, *arguments, after=after)
    for single, one_shot, two_shot in zip(*[iter(orders)] * 3, strict=True):
        assert len(single) >= 1
        assert single == one_shot == two_shot


@pytest.mark.parametrize("integers", [False, True])
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.every_triton), 8])
@compiled
def test_words_go_by_16_bytes_and_nothing_is_spilled(ranks, integers):
    for hidden in (4096, 8192):
        x, one = torch.zeros(4, hidden).bfloat16(), torch.ones(1)
        reduce = AllReduce.of_one_process(ranks, CPU, 4, hidden, x.dtype)[0]
        part, scaling = x, None
        if integers:
            part, scaling = x.int(), Scaling(one, torch.ones(hidden), torch.ones(hidden))
        for way in ("one_shot", "two_shot")[: 2 if ranks < 8 else 1]:
            reduce.way = way
            with building_for(90) as built:
                reduce.add_rms_norm(part, x, x[0], 1e-6, one, scaling=scaling)
            (binary,) = built
            wide = integers and way == "one_shot" and hidden == 8192 and ranks == 4
            assert not binary.spills(248 if wide else 16), (hidden, way, binary.stack)
            assert binary.count(r"griddepcontrol\.wait")
            if way == "one_shot":  # a thread has two grains, of two or four pieces
                of_rank, loop = 8 if integers else 4, integers and ranks == 8
                pushed = (ranks if loop else ranks - 1) * of_rank
                assert binary.count(r"st\.volatile\.global\.v4") == pushed
                seen = of_rank if loop else pushed
                assert binary.count(r"ld\.volatile\.global\.v4") == 2 * seen, "a look, and more"
                assert not binary.count(r"fence")
            else:
                assert binary.count(r"fence\.acq_rel\.sys") == ranks, "each peer's row, the result"
                assert binary.count(r"ld\.acquire\.sys") >= ranks
                assert binary.count(r"st\.global\S*v4\.b32"), "results leave by 16 bytes"
