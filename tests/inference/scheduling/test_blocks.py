"""Blocks of the cache: who holds them, what is found again, and in which order they are lost."""

import random

import pytest

from formats.errors import EngineError
from inference.scheduling.blocks import BlockManager, blocks_for
from kernels.op_inputs import KV_BLOCK


def text(count: int, start: int = 0) -> list[int]:
    return list(range(start, start + count))


def compute(blocks: BlockManager, owner: str, tokens: list[int], root: int = 0) -> int:
    """An owner computes its tokens; how many of them it found."""
    found = blocks.take_prefix(owner, tokens, root)
    assert blocks.grow(owner, len(tokens))
    blocks.promise(owner, tokens, root)
    blocks.note_computed(owner, len(tokens))
    blocks.check()
    return found


def test_equal_beginnings_are_found_in_whole_blocks_and_one_token_is_left():
    blocks = BlockManager(20, prefix_cache=True)
    first, other = text(200), [*text(130), *text(70, 1000)]
    assert compute(blocks, "first", first) == 0
    assert compute(blocks, "again", first) == 192
    assert compute(blocks, "other", other) == 128
    assert compute(blocks, "exact", text(128)) == 64, "its last token is to be computed"
    assert compute(blocks, "none", [7, *text(199)]) == 0
    tables = {name: blocks.table(name) for name in ("first", "again", "other")}
    assert tables["again"][:3] == tables["first"][:3]
    assert tables["other"][:2] == tables["first"][:2]
    assert tables["other"][2] != tables["first"][2]
    assert blocks.stats().used == 4 + 1 + 2 + 1 + 4
    for name in ("first", "again", "other", "exact", "none"):
        blocks.release(name)
        blocks.check()
    stats = blocks.stats()
    assert (stats.used, stats.free + stats.cached) == (0, 20)
    assert compute(blocks, "later", first) == 192


def test_what_is_promised_is_not_found_before_it_is_computed():
    blocks = BlockManager(8, prefix_cache=True)
    blocks.take_prefix("a", text(200))
    blocks.grow("a", 200)
    blocks.promise("a", text(200))
    assert blocks.take_prefix("b", text(200)) == 0
    blocks.release("b")
    blocks.note_computed("a", 100)
    assert blocks.take_prefix("b", text(200)) == 64
    blocks.release("b")
    blocks.release("a", text(140))  # aborted: what it computed stays
    blocks.check()
    assert blocks.take_prefix("b", text(200)) == 128


def test_generated_tokens_are_found_too():
    blocks = BlockManager(8, prefix_cache=True)
    compute(blocks, "a", text(100))
    blocks.grow("a", 200)
    blocks.release("a", text(200), seen=199)
    assert blocks.take_prefix("b", text(300)) == 192


def test_without_the_cache_nothing_is_found():
    blocks = BlockManager(8)
    compute(blocks, "a", text(100))
    blocks.release("a", text(100))
    assert compute(blocks, "b", text(100)) == 0
    assert blocks.stats().cached == 0


def test_roots_keep_models_and_schemes_apart():
    """An engine that shares the cache with another must not find what that one wrote."""
    blocks = BlockManager(8, prefix_cache=True)
    first, second = blocks.new_root(), blocks.new_root()
    compute(blocks, "a", text(100), first)
    blocks.release("a", text(100), root=first)
    assert compute(blocks, "b", text(100), second) == 0
    blocks.release("b", text(100), root=second)
    assert compute(blocks, "c", text(100), first) == 64


def test_equal_tokens_behind_other_ones_are_another_content():
    blocks = BlockManager(8, prefix_cache=True)
    compute(blocks, "a", [*text(64), *text(64, 500), 1])
    assert compute(blocks, "b", [*text(64, 900), *text(64, 500), 1]) == 0
    assert compute(blocks, "c", [*text(64, 500), 1]) == 0


def test_the_end_of_the_oldest_goes_first():
    blocks = BlockManager(6, prefix_cache=True)
    for name, start in (("old", 0), ("new", 1000)):
        compute(blocks, name, text(192, start))
        blocks.release(name, text(192, start), seen=192)
    assert blocks.stats().cached == 6
    assert compute(blocks, "used", text(129)) == 128  # the old one is now the newer
    blocks.release("used", text(129), seen=129)
    assert blocks.grow("x", 64 * 2)  # one free, one of the newest request's end
    found = [blocks.take_prefix(name, text(200, start)) for name, start in (("o", 0), ("n", 1000))]
    assert found == [128, 128]
    blocks.release("o")
    blocks.release("n")
    assert blocks.grow("x", 64 * 5)
    blocks.check()
    assert blocks.take_prefix("o", text(200)) + blocks.take_prefix("n", text(200, 1000)) == 64
    assert not blocks.grow("x", 64 * 6), "what is held is never taken"


def test_a_fork_shares_all_and_the_first_to_write_gets_a_copy():
    blocks = BlockManager(6, prefix_cache=True)
    compute(blocks, "a", text(100))
    own = list(blocks.table("a"))
    blocks.fork("a", "b", 100)
    blocks.check()
    assert blocks.table("b") == own
    assert blocks.stats().used == 2
    assert (blocks.missing("a", 101), blocks.missing("b", 101)) == (1, 1)
    assert blocks.grow("b", 101)
    assert blocks.table("a") == own
    assert blocks.table("b")[0] == own[0]
    changes = blocks.take_changes()
    assert changes.copies == [(own[1], blocks.table("b")[1])]
    assert blocks.take_changes() is None
    assert blocks.missing("a", 101) == 0, "nobody else holds its last block any more"
    assert blocks.grow("a", 101)
    assert blocks.table("a") == own
    blocks.check()
    for name in "ab":
        blocks.release(name, text(101), seen=100)
        blocks.check()
    assert blocks.stats().used == 0


def test_a_fork_at_the_edge_of_a_block_copies_nothing():
    blocks = BlockManager(6)
    blocks.grow("a", 128)
    blocks.fork("a", "b", 128)
    for name in "ab":
        assert blocks.grow(name, 129)
    assert blocks.take_changes() is None
    blocks.check()
    assert blocks.stats().used == 4


def test_a_fork_without_room_for_its_copy_changes_nothing():
    blocks = BlockManager(1)
    blocks.grow("a", 10)
    blocks.fork("a", "b", 10)
    assert not blocks.grow("b", 11)
    blocks.check()
    blocks.release("a")
    assert blocks.grow("b", 11)
    assert blocks.take_changes() is None


def test_copies_tell_what_each_block_is_to_hold_whatever_came_between():
    blocks = BlockManager(3)
    blocks.grow("a", 10)
    for new in ("b", "c"):
        blocks.fork("a", new, 10)
    source = blocks.table("a")[0]
    assert blocks.grow("b", 11)
    blocks.fork("b", "d", 10)  # of a block that is not copied yet
    assert blocks.grow("d", 11)
    changes = blocks.take_changes()
    assert changes.copies == [(source, blocks.table(name)[0]) for name in "bd"]
    blocks.check()


def test_what_nobody_has_looked_at_is_cleared_before_another_gets_it():
    blocks = BlockManager(3, prefix_cache=True)
    compute(blocks, "a", text(150))
    own = list(blocks.table("a"))
    blocks.release("a", text(150))  # without logits
    changes = blocks.take_changes()
    assert changes.clears == [own[2]], "the others are cached as they are"
    assert blocks.grow("b", 192)
    changes = blocks.take_changes()
    assert sorted(changes.clears) == sorted(own[:2])


def test_nothing_of_a_failed_request_is_found():
    blocks = BlockManager(8, prefix_cache=True)
    compute(blocks, "good", text(65))
    blocks.release("good", text(65), seen=65)
    assert compute(blocks, "bad", text(200)) == 64
    assert blocks.take_prefix("sharer", text(200)) == 192  # before anyone knew
    blocks.discard("bad")
    blocks.check()
    assert blocks.take_prefix("later", text(200)) == 64, "what others got on well with stays"
    blocks.release("sharer", text(192))
    blocks.check()
    blocks.release("later")
    assert (blocks.stats().cached, blocks.stats().used) == (1, 0)


def test_after_a_failed_step_nothing_is_found():
    blocks = BlockManager(8, prefix_cache=True)
    compute(blocks, "a", text(200))
    blocks.release("a", text(200), seen=200)
    compute(blocks, "b", text(200))
    blocks.discard("b")
    blocks.forget()
    blocks.check()
    assert (blocks.free, blocks.stats().cached) == (8, 0)
    assert compute(blocks, "c", text(200)) == 0


def test_counts_that_are_wrong_are_told():
    blocks = BlockManager(4, prefix_cache=True)
    blocks.grow("a", 100)
    blocks.table("a").append(blocks.table("a")[0])
    with pytest.raises(EngineError, match="do not add up"):
        blocks.check()


def test_what_an_adapter_gives_is_written_once_and_not_after_a_step_that_failed():
    blocks = BlockManager(4)
    assert blocks.grow("a", 70)
    first, second = blocks.table("a")
    blocks.fill("a", 2, range(62, 66))
    changes = blocks.take_changes()
    slots = [64 * first + 62, 64 * first + 63, 64 * second, 64 * second + 1]
    assert changes.fills == [(2, 62, slots)]
    blocks.fill("a", 2, range(66, 70))
    blocks.forget()
    assert blocks.take_changes() is None


@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens_every_block_is_accounted_for(seed):
    """Contents are simulated, too: what is found was written for the tokens that ask for it."""
    rng = random.Random(seed)
    blocks = BlockManager(24, prefix_cache=True)
    cells: dict[tuple[int, int], object] = {}  # (block, place) -> all tokens up to there
    alive: dict[str, list[int]] = {}
    names = iter(map(str, range(10**6)))

    def written(name: str, start: int):
        changes = blocks.take_changes()
        copies, clears, *_ = changes or ([], [])
        old = dict(cells)
        for source, target in copies:
            for place in range(KV_BLOCK):
                cells[target, place] = old.get((source, place))
        for block in clears:
            for place in range(KV_BLOCK):
                cells[block, place] = None
        tokens, table = alive[name], blocks.table(name)
        for i in range(start, len(tokens)):
            cells[table[i // KV_BLOCK], i % KV_BLOCK] = tuple(tokens[: i + 1])

    def check(name: str):
        tokens, table = alive[name], blocks.table(name)
        assert len(table) == blocks_for(len(tokens))
        for i in range(len(tokens)):
            assert cells[table[i // KV_BLOCK], i % KV_BLOCK] == tuple(tokens[: i + 1])

    for _ in range(150):
        action = rng.random()
        if action < 0.35 or not alive:
            name, stem = next(names), rng.choice([0, 1, 2])
            tokens = [*text(64 * rng.randint(0, 3), 1000 * stem), *text(rng.randint(1, 99), 7)]
            found = blocks.take_prefix(name, tokens)
            if not blocks.grow(name, len(tokens)):
                blocks.release(name)
                continue
            alive[name] = tokens
            blocks.promise(name, tokens)
            written(name, found)
            blocks.note_computed(name, len(tokens))
        elif action < 0.6:
            name = rng.choice(list(alive))
            start, more = len(alive[name]), text(rng.choice([1, 1, 40]), rng.choice([5, 6]))
            if blocks.grow(name, start + len(more)):
                alive[name] = alive[name] + more
                written(name, start)
        elif action < 0.75:
            name, new = rng.choice(list(alive)), next(names)
            blocks.fork(name, new, len(alive[name]))
            alive[new] = alive[name]
        else:
            name = rng.choice(list(alive))
            check(name)
            tokens = alive.pop(name)
            if rng.random() < 0.2:
                blocks.discard(name)
            else:
                blocks.release(name, tokens, rng.choice([0, len(tokens) - 1]))
        blocks.check()
        for name in alive:
            check(name)
    for name in alive:
        blocks.release(name)
    blocks.check()
    assert blocks.stats().used == 0
