"""Tensors of padded steps: every token stands where it does in the step as it is."""

import itertools
import random

import numpy as np
import pytest

from inference.gpu.fields import HostBlock
from inference.gpu.sizes import (
    MANY,
    MOST_TOKENS,
    PROMPTS,
    Size,
    decodes_of,
    most_tokens,
    padded_sizes,
    size_of,
    whole_size,
)
from inference.gpu.steps import padded_shapes, places, step_shapes, wanted_tokens, write_step
from inference.scheduling.batch import RunningBatch
from inference.scheduling.sequence import NEVER, Draw, Sequence, Terms
from inference.scheduling.work import Work

SPARE, WIDTH = 99, 8


def some_work(
    singles: int, counts: list[int], seed: int, *, host: bool = False, whole: bool = False
) -> Work:
    """Slices of sequences of random tokens; those of one token first."""
    rng = random.Random(seed)
    batch, free = RunningBatch(SPARE), itertools.count()
    for i, count in enumerate([1] * singles + counts):
        start = rng.randint(0, 90) if i % 2 else 0
        samples = i < singles or rng.random() < 0.7
        tokens = [rng.randint(1, 500) for _ in range(start + count + (not samples))]
        terms = Terms(draw=Draw(0.5 * i, top_k=i), host_until=NEVER if host and i == 1 else 0)
        sequence = Sequence(f"s{i}", tokens, terms, whole=whole and i == 1)
        batch.enter(sequence)
        batch.set_table(i, [next(free) for _ in range(0, len(tokens), 64)])
        sequence.computed = start
    return Work.of(batch, np.arange(singles + len(counts)), np.array([1] * singles + counts))


def written(work: Work, size) -> dict[str, list]:
    """The arrays of a step, written over what another step left."""
    block = HostBlock(step_shapes(size, WIDTH), pinned=False)
    for array in block.arrays.values():
        array[...] = 7
    write_step(block.arrays, work, size)
    return {name: array.tolist() for name, array in block.arrays.items()}


@pytest.mark.parametrize(
    ("singles", "counts"),
    [
        (1, []), (5, []), (0, [7]), (0, [16]), (3, [40, 2]), (4, [2] * PROMPTS),
        (1, [200, 100, 33]), (3, [5] * 20),
    ],
)  # fmt: skip
def test_tokens_stand_where_they_do_without_padding(singles, counts):
    work = some_work(singles, counts, len(counts))
    size = size_of(work)
    assert size is not None
    padded, whole = written(work, size), written(work, whole_size(work))
    for name, (_, shape) in padded_shapes(size, WIDTH).items():
        assert len(padded[name]) <= shape[0], name
    gap = size.decodes - singles
    tokens = [i if i < singles else i + gap for i in range(singles + sum(counts))]
    sequences = places(work, size).tolist()
    rows = work.places.tolist()
    spans = [range(a, a + n) for a, n in zip(work.starts.tolist(), work.counts, strict=True)]
    owned = zip(rows, spans, strict=True)
    assert whole["ids"] == [work.batch.ids[place, i] for place, own in owned for i in own]
    assert whole["positions"] == [i for own in spans for i in own]
    for name in ("ids", "positions", "slots", "batch_index"):
        assert [padded[name][i] for i in tokens] == whole[name]
    assert [padded["lengths"][i] for i in sequences] == whole["lengths"]
    for i, place in zip(sequences, rows, strict=True):
        held = -(-work.batch.length[place] // 64)
        assert padded["tables"][i][:held] == work.batch.tables[place, :held].tolist()
    others = set(range(size.decodes + size.tokens)) - set(tokens)
    assert all(padded["slots"][i] == -1 for i in others), "nothing is written for nobody"
    assert all(padded["lengths"][i] == 0 for i in range(size.sequences) if i not in sequences)
    sampled = [i for i, own in zip(sequences, work.samples, strict=True) if own]
    for name in ("sample_index", "temperature", "top_k", "seeds", "steps"):
        assert [padded[name][i] for i in sampled] == whole[name]
    held = [padded["sample_index"][i] for i in range(size.sequences) if i not in sampled]
    assert held == [SPARE] * len(held), "no token is lost to a row that samples nothing"
    if counts:
        starts = padded["query_start"]
        assert len(starts) == size.sequences + 1
        assert starts[: size.decodes + 1] == list(range(size.decodes + 1))
        own = [(starts[i], starts[i + 1]) for i in sequences]
        assert [b - a for a, b in own] == work.counts.tolist()
        assert [padded["rows"][i] for i in sequences] == [b - 1 for _, b in own]
        assert set(starts[sequences[-1] + 1 :]) == {starts[sequences[-1] + 1]}


def test_sizes():
    assert size_of(some_work(5, [], 0)) == Size(8) == decodes_of(5)
    assert size_of(some_work(3, [40], 1)) == Size(4, PROMPTS, 48)
    assert size_of(some_work(0, [3], 2)) == Size(0, PROMPTS, 16)
    assert size_of(some_work(1, [2] * (PROMPTS + 1), 3)) == Size(16, MANY, 128)
    assert size_of(some_work(40, [30] * 20, 3)) == Size(64, MANY, 768)
    assert size_of(some_work(0, [2] * (MANY + 1), 3)) is None
    assert size_of(some_work(1, [MOST_TOKENS + 1], 4)) is None
    sizes = padded_sizes(5, 300)
    assert sizes[:4] == [Size(8), Size(4), Size(2), Size(1)]
    counts = [size.tokens for size in sizes if size.prompts and size.decodes == 0]
    assert counts == [384, 256, 192, 128, 96, 64, 48, 32, 16]
    assert {size.decodes for size in sizes if size.tokens == 48} == {0, 1, 2, 4, 8}
    many = [size for size in padded_sizes(9, 300) if size.prompts == MANY]
    assert {(size.decodes, size.tokens) for size in many} == {
        (d, t) for d in (0, 16) for t in (128, 192, 256, 384)
    }
    assert max(size.tokens for size in padded_sizes(1, 10**6)) == MOST_TOKENS


def test_small_layers_are_worth_larger_graphs():
    """Those of SmolLM2-135M, of 1 B, and of 8 B, in int8."""
    assert [most_tokens(n) for n in (5e6, 7e7, 2.2e8)] == [8192, 4096, 2048]
    assert most_tokens(None) == most_tokens(None, 2) == MOST_TOKENS
    assert [most_tokens(n, 2) for n in (1.1e8, 4.3e8)] == [8192, 2048]  # 8 B and 70 B in int8
    assert size_of(some_work(0, [40] * 60, 0), 4096) == Size(0, MANY, 3072)


def test_every_padded_step_is_among_the_sizes():
    """What is captured at the start is all that steps of a server are padded to."""
    sizes = padded_sizes(20, 500)
    for seed, (ones, counts) in enumerate(
        [(0, [3]), (1, [2, 497]), (20, []), (13, [100]), (7, [])]
    ):
        assert size_of(some_work(ones, counts, seed)) in sizes


def test_what_the_host_reads_keeps_the_rows_of_all_tokens():
    """But for the logits of decodes, which are kept."""
    for whole in (False, True):
        rest = {"host": not whole, "whole": whole}
        assert size_of(some_work(2, [9], 0, **rest)) == Size(2, PROMPTS, 16, every=True)
        alone = Size(2, PROMPTS, 16, every=True) if whole else Size(2)
        assert size_of(some_work(2, [], 0, **rest)) == alone


def test_wanted_tokens_are_where_they_stand_without_padding():
    for ones, counts in ((3, [40, 2]), (0, [9, 30]), (2, [5] * 20), (2, [])):
        work = some_work(ones, counts, 1, whole=True)
        size, whole = size_of(work), whole_size(work)
        assert size.every
        wanted = wanted_tokens(work, size)
        padded, own = written(work, size), written(work, whole)
        for name in ("positions", "slots", "ids"):
            here = [padded[name][i] for i in wanted.tolist()]
            assert here == [own[name][i] for i in own["rows"]]
        assert wanted_tokens(work, whole) is None


@pytest.mark.parametrize("size", [Size(4), Size(0, PROMPTS, 16), Size(8, PROMPTS, 64)])
def test_a_step_of_nobody_writes_nothing(size):
    values = written(Work.nothing(RunningBatch(SPARE)), size)
    assert set(values["slots"]) == {-1}
    assert set(values["sample_index"]) == {SPARE}
    assert set(values["lengths"]) <= {0}
    if size.prompts:
        assert values["query_start"][-1] == size.decodes
