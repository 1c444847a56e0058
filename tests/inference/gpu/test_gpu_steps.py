"""Tensors of padded steps: every token stands where it does in the step as it is."""

from __future__ import annotations

import random

import pytest

from inference.gpu.sizes import (
    MOST_TOKENS,
    PROMPTS,
    Draw,
    ScheduledSlice,
    Size,
    decodes_of,
    prompt_sizes,
    size_of,
)
from inference.gpu.steps import padded_shapes, padded_values, places, whole_values
from inference.scheduling.blocks import BlockManager
from inference.scheduling.scheduler import Sequence, Slice

SPARE, WIDTH = 99, 8


def some_work(
    blocks: BlockManager, singles: int, counts: list[int], seed: int
) -> list[ScheduledSlice]:
    """Slices of sequences of random tokens; those of one token first."""
    rng = random.Random(seed)
    work = []
    for i, count in enumerate([1] * singles + counts):
        start = rng.randint(0, 90) if i % 2 else 0
        samples = i < singles or rng.random() < 0.7
        tokens = [rng.randint(1, 500) for _ in range(start + count + (not samples))]
        sequence = Sequence(f"s{i}", tokens)
        assert blocks.grow(sequence.name, len(tokens))
        work.append(ScheduledSlice(Slice(sequence, start, count), samples, i, Draw(0.5 * i, i)))
    return work


@pytest.mark.parametrize(
    ("singles", "counts"),
    [(1, []), (5, []), (0, [7]), (0, [16]), (3, [40, 2]), (4, [2] * PROMPTS), (1, [200, 100, 33])],
)
def test_tokens_stand_where_they_do_without_padding(singles, counts):
    blocks = BlockManager(64)
    work = some_work(blocks, singles, counts, len(counts))
    size = size_of(work)
    assert size is not None
    padded = padded_values(work, size, blocks, SPARE)
    whole = whole_values(work, blocks)
    for name, (_, shape) in padded_shapes(size, WIDTH).items():
        assert len(padded[name]) <= shape[0], name
    gap = size.decodes - singles
    tokens = [i if i < singles else i + gap for i in range(singles + sum(counts))]
    sequences = places(work, size)
    for name in ("ids", "positions", "slots", "batch_index"):
        assert [padded[name][i] for i in tokens] == whole[name]
    for name in ("tables", "lengths"):
        assert [padded[name][i] for i in sequences] == whole[name]
    others = set(range(size.decodes + size.tokens)) - set(tokens)
    assert all(padded["slots"][i] == -1 for i in others), "nothing is written for nobody"
    sampled = [i for i, w in zip(sequences, work, strict=True) if w.samples]
    for name in ("sample_index", "temperature", "top_k", "seeds"):
        assert [padded[name][i] for i in sampled] == whole[name]
    held = [padded["sample_index"][i] for i in range(size.sequences) if i not in sampled]
    assert held == [SPARE] * len(held), "no token is lost to a row that samples nothing"
    if counts:
        starts = padded["query_start"]
        assert len(starts) == size.sequences + 1
        assert starts[: size.decodes + 1] == list(range(size.decodes + 1))
        own = [(starts[i], starts[i + 1]) for i in sequences]
        assert [b - a for a, b in own] == [w.part.count for w in work]
        assert [padded["rows"][i] for i in sequences] == [b - 1 for _, b in own]
        assert set(starts[sequences[-1] + 1 :]) == {starts[sequences[-1] + 1]}


def test_sizes():
    blocks = BlockManager(256)
    assert size_of(some_work(blocks, 5, [], 0)) == Size(8) == decodes_of(5)
    assert size_of(some_work(blocks, 3, [40], 1)) == Size(4, PROMPTS, 48)
    assert size_of(some_work(blocks, 0, [3], 2)) == Size(0, PROMPTS, 16)
    assert size_of(some_work(blocks, 1, [2] * (PROMPTS + 1), 3)) is None
    assert size_of(some_work(blocks, 1, [MOST_TOKENS + 1], 4)) is None
    counts = [size.tokens for size in prompt_sizes(300)]
    assert counts == [16, 32, 48, 64, 96, 128, 192, 256, 384]
    assert max(size.tokens for size in prompt_sizes(10**6)) == MOST_TOKENS


def test_what_the_host_reads_is_not_padded():
    blocks = BlockManager(64)
    for whole in (False, True):
        work = some_work(blocks, 2, [9], 0)
        work[1] = ScheduledSlice(work[1].part, True, 1, logits=not whole, whole=whole)
        assert size_of(work) is None
        assert (size_of(work[:2]) is None) == whole, "of decodes logits are kept"


@pytest.mark.parametrize("size", [Size(4), Size(0, PROMPTS, 16), Size(8, PROMPTS, 64)])
def test_a_step_of_nobody_writes_nothing(size):
    values = padded_values((), size, BlockManager(4), SPARE)
    assert set(values["slots"]) == {-1}
    assert set(values["sample_index"]) == {SPARE}
    assert set(values["lengths"]) <= {0}
    if size.prompts:
        assert values["query_start"][-1] == size.decodes
