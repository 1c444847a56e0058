"""Samples that go through a block at once, as on a GPU, show what each shows alone."""

import pytest
import torch

from calibrate import transfers
from calibrate.replay import Replay
from calibrate.statistics import Statistics
from formats.families.registry import BY_TYPE
from ptq.methods.gptq import GPTQSpec
from ptq.methods.rtn import RTNSpec
from ptq.methods.smooth_k import SmoothKSpec
from ptq.methods.smoothquant import SmoothQuantSpec
from ptq.output import STATISTICS_FILE
from ptq.recipe.schema import SinksSpec
from tests.calibrate.test_stream import WINDOWED, open_stream
from tests.ptq.quantizing import add_outliers, edit_model, executed, make_plan
from tests.tiny_families import TINY

LENGTHS = (24, 24, 24, 24, 30, 30)
DENSE = [kind for kind, family in BY_TYPE.items() if family.mixture is None]


@pytest.fixture
def at_once(monkeypatch):
    """Let samples go together on a CPU, in runs of three of six."""
    monkeypatch.setitem(transfers.TOGETHER, "cpu", 1 << 20)
    monkeypatch.setattr(transfers, "RUNS", 2)


def shown(block) -> dict[str, torch.Tensor]:
    """All that a block's samples show, one after the other."""
    seen: dict[str, list[torch.Tensor]] = {}
    calls = [list[int]()]

    def keep(name, x):
        seen.setdefault(name, []).append(x.clone())

    outputs = block.outputs(
        on_input=keep,
        on_sinks=lambda name, x: keep(f"{name} sinks", x),
        on_kv=lambda k, v: (keep("k", k), keep("v", v)),
        begin=lambda group: calls.append([*group]),
    )
    assert [i for group in calls for i in group] == [*range(len(LENGTHS))]
    block.calls = calls[1:]
    return {name: torch.cat(parts) for name, parts in (seen | {"outputs": outputs}).items()}


@pytest.mark.parametrize("family", DENSE)
def test_every_family_shows_the_same(make_model, monkeypatch, at_once, family):
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(1, 384, (n,), generator=generator) for n in LENGTHS]
    stream = open_stream(make_model(family, **(WINDOWED | TINY).get(family, {})), ids)
    stream.sinks = 1
    block = stream.load(1)
    found = shown(block)
    assert block.calls == [[0, 1, 2], [3], [4, 5]]  # no run with another, of one length each
    monkeypatch.setitem(transfers.TOGETHER, "cpu", 0)
    alone = shown(block)
    assert block.calls == [[i] for i in range(len(LENGTHS))]
    assert found.keys() == alone.keys()
    for name, wanted in alone.items():
        torch.testing.assert_close(found[name], wanted, atol=2e-5, rtol=1e-4)


def test_a_search_runs_them_at_once_with_keys_of_each_replaced(make_model, monkeypatch, at_once):
    ids = [torch.randint(1, 384, (n,)) for n in LENGTHS]
    block = open_stream(make_model("llama"), ids).load(0)
    wide, shapes = block.begins(5), list[tuple[int, ...]]()
    assert [tuple(x.shape[:-1]) for x in wide.inputs] == [(4, 24), (30,)]

    def cache(k, v):
        shapes.append(tuple(k.shape[:-2]))
        return k * torch.linspace(0.5, 1, k.shape[-3])[:, None, None], v

    norm = block.submodule(f"{block.name}.post_attention_layernorm")
    runs = Replay(wide, (), norm)
    found = [runs.run(i, cache) for i in (0, 1, 0, 1)]
    assert shapes == [(4, 24), (30,)] * 2
    monkeypatch.setitem(transfers.TOGETHER, "cpu", 0)
    single = Replay(block, (), norm)
    alone = [single.run(i, cache) for i in range(5)]
    for first in (found[:2], found[2:]):
        torch.testing.assert_close(torch.cat((*first[0], first[1])), torch.cat(alone))


@pytest.mark.parametrize("last", [RTNSpec(), GPTQSpec()])
def test_a_run_finds_the_same(make_model, tmp_path, monkeypatch, at_once, last):
    """Sums of floats alone are others: statistics, sink tokens' too, follow from the same rows."""
    model = edit_model(make_model("llama"), tmp_path / "outliers", add_outliers)
    methods = (SmoothQuantSpec(alphas=(0.5, 0.9)), SmoothKSpec(search_samples=3), last)
    results, statistics = [], []
    for most in (0, 1 << 20):
        monkeypatch.setitem(transfers.TOGETHER, "cpu", most)
        plan = make_plan(model, tmp_path / f"{most}", "a8w8c8", methods=methods)
        recipe = plan.recipe.model_copy(update={"sinks": SinksSpec(keep=1)})
        plan = plan.model_copy(update={"recipe": recipe})
        results.append(executed(plan))
        statistics.append(Statistics.load(tmp_path / f"{most}" / STATISTICS_FILE))
    alone, wide = results
    assert [row.alpha for row in wide.smoothing] == [row.alpha for row in alone.smoothing]
    for mine, other in zip(wide.modules, alone.modules, strict=True):
        assert mine.output_sqnr_db == pytest.approx(other.output_sqnr_db, abs=0.05), mine.module
    assert statistics[0].keys() == statistics[1].keys()
    for key, other in statistics[0].items():
        mine = statistics[1][key]
        assert (mine.tokens, mine.peak_position) == (other.tokens, other.peak_position), key
        for name in ("channel_absmax", "sample_absmax"):
            torch.testing.assert_close(
                getattr(mine, name), getattr(other, name), rtol=1e-4, atol=1e-5
            )
