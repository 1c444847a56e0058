"""`ptq bench --kernels all_reduce` and `links` without a GPU: their arguments and tables."""

import pytest
import torch

from kernels.bench.command import parse_kernels
from tests.kernels.triton_lab import building_for, compiled, interpreted


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("all_reduce w8a8", "beside other families"),
        ("all_reduce --device cpu", "runs on GPUs"),
        ("all_reduce --peers", "--peers: all_reduce takes --ranks and --json alone"),
        ("w8a8 --ranks 2", "only all_reduce has ranks"),
        ("all_reduce --ranks 3", "invalid choice: 3"),
        ("links fused", "found links beside other families"),
        ("links --ranks 2", "--ranks: links takes --json alone"),
    ],
)
def test_arguments_that_do_not_fit(words, message, capsys):
    with pytest.raises(SystemExit):
        parse_kernels(words.split())
    assert message in capsys.readouterr().err


def test_arguments_that_fit():
    assert parse_kernels(["all_reduce", "--ranks", "4"]).ranks == 4
    assert parse_kernels(["all_reduce"]).families == ["all_reduce"]
    assert parse_kernels(["links", "--json", "links.json"]).families == ["links"]


@interpreted
def test_the_slowest_rank_counts_and_the_way_taken_is_marked(monkeypatch):
    from kernels.bench.all_reduce import SumRow, default_ranks, lines, slowest

    ranks = [
        SumRow(16, 4096, "int32", "int8", "one_shot", 0.5, {"one_shot": us, "NCCL alone": 12.0})
        for us in (4.0, 4.6)
    ]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Chip")
    told = list(lines(2, 4e5, [slowest(ranks)], shared=True))
    assert told[0] == "Chip, 2 ranks, copy to a peer 400 GB/s"
    assert "times mean nothing" in told[1]
    assert told[3].split() == "16 x 4096 int32 -> int8 0.5 4.6* - - 12.0".split()
    assert [default_ranks(gpus) for gpus in (1, 2, 3, 4, 8)] == [2, 2, 2, 4, 8]


@interpreted
def test_the_floor_is_that_of_the_bytes_that_a_rank_receives():
    from kernels.bench.all_reduce import SumCase
    from kernels.triton.collective.all_reduce import AllReduce

    reduce = AllReduce.of_one_process(4, torch.device("cpu"), 8, 256, torch.bfloat16)[0]
    x = torch.zeros(2, 8, 256, dtype=torch.int32)
    case = SumCase(reduce, x, x, x[0].bfloat16(), x[0, 0], None, torch.int8, None)
    assert case.floor(1000.0) == 0.75 * 8 * 256 * (4 + 1 + 2) / 1000


@compiled
def test_kernels_of_links_are_built_for_hopper():
    from kernels.bench import links

    with building_for(90) as built:
        links.empty_kernel[(132,)](OVERLAP=2, launch_pdl=True)
        links.barriers_kernel[(132,)](torch.zeros(32, dtype=torch.int32), 5, PROGRAMS=132)
    early, barriers = built
    assert early.count("griddepcontrol.wait") == early.count("griddepcontrol.launch") == 1
    assert barriers.count("red.release.gpu") == barriers.count("ld.acquire.gpu") == 1


@interpreted
def test_the_table_of_links():
    from kernels.bench.links import Link, table

    found = table([Link(1, "kernel", 0.824), Link(132, "barrier", 1.0)])
    assert found.splitlines()[2:] == ["| kernel | 1 | 0.82 |", "| barrier | 132 | 1.00 |"]
