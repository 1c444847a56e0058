"""Sums over ranks on GPUs: ranks as streams of one, as processes on one, and with one each."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
if torch.cuda.is_available():
    from kernels.bench.all_reduce import on_ranks
    from kernels.triton import fused
    from kernels.triton.collective import reference
    from kernels.triton.collective.all_reduce import AllReduce, Scaling
    from kernels.triton.linear.w8a8 import pack_w8a8
    from tests.gpu.all_reduce_ranks import many_exchanges, parts_of, sums_on_a_rank

HIDDEN = 4096


class Streams:
    """Ranks that are streams of one GPU, which all run at once."""

    def __init__(self, ranks: int, most: int, hidden: int = HIDDEN) -> None:
        device = torch.device("cuda")
        self.reduces = AllReduce.of_one_process(ranks, device, most, hidden, torch.bfloat16)
        self.streams = [torch.cuda.Stream() for _ in range(ranks)]

    def compile(self, call) -> None:
        """Each rank alone: kernels are loaded, and memory is had, while none waits. It gives up,
        and all is reset."""
        torch.cuda.synchronize()
        for rank, (reduce, stream) in enumerate(zip(self.reduces, self.streams, strict=True)):
            reduce.patience = 1e-3
            with torch.cuda.stream(stream):
                call(rank, reduce)
            torch.cuda.synchronize()
            reduce.patience = 5.0
        for reduce in self.reduces:
            reduce._counts.zero_(), reduce._fault.zero_()
            for region in reduce.memory.regions:
                region.zero_()
        torch.cuda.synchronize()

    def run(self, call) -> list:
        """call(rank, its AllReduce) on all streams."""
        results = []
        for rank, (reduce, stream) in enumerate(zip(self.reduces, self.streams, strict=True)):
            with torch.cuda.stream(stream):
                results.append(call(rank, reduce))
        torch.cuda.synchronize()
        for reduce in self.reduces:
            reduce.check()
        return results


@pytest.mark.parametrize("way", ["one_shot", "two_shot"])
@pytest.mark.parametrize(("ranks", "rows"), [(2, 16), (4, 5), (8, 1)])
def test_floats_are_added_in_the_order_of_ranks(ranks, way, rows):
    parts = parts_of(ranks, rows, HIDDEN, False, seed=rows).cuda()
    residual, weight = (torch.randn(n, HIDDEN, device="cuda").bfloat16() for n in (rows, 1))
    streams, one = Streams(ranks, 16), torch.full((1,), 0.02, device="cuda")
    for reduce in streams.reduces:
        reduce.way = way
    for scale, dtype, group in (
        (one, torch.int8, None),
        (None, torch.int8, None),
        (None, torch.float8_e4m3fn, 128),
        (None, torch.bfloat16, None),
    )[: 4 if ranks == 2 else 1]:
        arguments = (residual, weight[0], 1e-5, scale, dtype, group)
        call = lambda rank, reduce, a=arguments: reduce.add_rms_norm(parts[rank], *a)  # noqa: E731
        streams.compile(call)
        first, *rest = streams.run(call)
        total = reference.add_rms_norm(list(parts), *arguments)[2]
        assert torch.equal(first[2], total), "sums in fp32, rounded once"
        same = fused.add_rms_norm(total, None, *arguments[1:])
        for got, wanted in zip(first[:2], same[:2], strict=True):
            assert wanted is None or torch.equal(got, wanted), "the norm of one GPU"
        for other in rest:
            for got, wanted in zip(other, first, strict=True):
                assert wanted is None or torch.equal(got, wanted)


@pytest.mark.parametrize(
    ("ranks", "way"), [(2, "one_shot"), (2, "two_shot"), (4, "two_shot"), (8, "one_shot")]
)
def test_integer_layers_give_the_bits_of_one_gpu(ranks, way, workspace):
    """A layer whose inputs are cut among ranks: its sum, then what follows it, quantized."""
    inputs, rows = 2048, 7
    q = torch.randint(-127, 128, (HIDDEN, inputs), device="cuda", dtype=torch.int8)
    x = torch.randint(-127, 128, (rows, inputs), device="cuda", dtype=torch.int8)
    scale, bias = torch.rand(HIDDEN, device="cuda") * 0.01, torch.randn(HIDDEN, device="cuda")
    residual, weight = (torch.randn(n, HIDDEN, device="cuda").bfloat16() for n in (rows, 1))
    own, out = torch.tensor([0.013], device="cuda"), torch.tensor([0.02], device="cuda")
    whole = pack_w8a8(q, scale, bias)
    wanted = fused.add_rms_norm(whole.run(x, own, workspace), residual, weight[0], 1e-5, out)
    pairs = zip(x.chunk(ranks, 1), q.chunk(ranks, 1), strict=True)
    parts = [
        pack_w8a8(w.contiguous(), scale).run(a.contiguous(), own, workspace, torch.int32)
        for a, w in pairs
    ]
    streams, scaling = Streams(ranks, 16), Scaling(own, whole.output_scale, whole.bias)

    def call(rank: int, reduce: AllReduce):
        reduce.way = way
        return reduce.add_rms_norm(parts[rank], residual, weight[0], 1e-5, out, scaling=scaling)

    streams.compile(call)
    for _ in range(3):
        for got in streams.run(call):
            assert torch.equal(got[0], wanted[0])
            assert torch.equal(got[2], wanted[2])


@pytest.mark.parametrize("way", ["one_shot", "two_shot"])
def test_graphs_replay_with_new_parts_and_no_reset(way):
    """An odd number of calls in a graph, replayed many times, each time with other parts."""
    ranks, rows = 4, 7
    streams, parts = Streams(ranks, 8), torch.empty(ranks, rows, HIDDEN, device="cuda").bfloat16()
    weight = torch.ones(HIDDEN, device="cuda").bfloat16()
    for reduce in streams.reduces:
        reduce.way = way

    def call(rank: int, reduce: AllReduce):
        total = reduce.add_rms_norm(parts[rank], parts[0], weight, 1e-5, None, torch.int8)[2]
        total = reduce.add_rms_norm(parts[rank], total, weight, 1e-5, None, torch.bfloat16)[2]
        return reduce.sum(total).clone()

    parts.zero_()
    streams.compile(call)
    graphs, results = [torch.cuda.CUDAGraph() for _ in range(ranks)], []
    for rank, (graph, reduce) in enumerate(zip(graphs, streams.reduces, strict=True)):
        with torch.cuda.graph(graph, stream=streams.streams[rank]):
            results.append(call(rank, reduce))
    for seed in range(20):
        parts.copy_(parts_of(ranks, rows, HIDDEN, False, seed))
        torch.cuda.synchronize()
        streams.run(lambda rank, reduce: graphs[rank].replay())
        total, sums = parts[0].float(), reference.sum_of_parts(list(parts), torch.float32)
        for _ in range(2):
            total = (sums + total).bfloat16().float()
        for got in results:
            assert torch.equal(got.float(), ranks * total), seed


def test_a_rank_that_does_not_come_is_named():
    streams = Streams(2, 4)
    for way in ("one_shot", "two_shot"):
        first = streams.reduces[0]
        first.way, first.patience = way, 0.05
        first.sum(torch.ones(2, HIDDEN, device="cuda").bfloat16())
        torch.cuda.synchronize()
        with pytest.raises(RuntimeError, match="rank 1 did not take part"):
            first.check()
        first._fault.zero_()


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_in_processes(ranks):
    """With a GPU each and NCCL, few rows to many; or two on the only one, in turns, by gloo."""
    found = torch.cuda.device_count()
    if found < ranks and ranks > 2:
        pytest.skip(f"{found} GPUs; {ranks} are needed")
    rows = (1, 6) if found < ranks else (1, 16, 64, 257)
    wrong = on_ranks(ranks, sums_on_a_rank, HIDDEN, rows)
    assert wrong == [[]] * ranks


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_exchanges_are_counted_alike_by_all_warps():
    """Warps that are late, since the SM has other work, read the same number."""
    assert on_ranks(2, many_exchanges, HIDDEN) == [[], []]


def test_links_between_kernels_are_measured():
    from kernels.bench.links import links

    found = list(links(torch.device("cuda", 0)))
    assert [link.way for link in found] == ["kernel", "early kernel"] * 3 + ["barrier"] * 2
    assert all(0.1 < link.us < 50 for link in found)
