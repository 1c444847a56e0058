"""What runs in a step: who waits for whom, and that nobody waits for ever."""

from __future__ import annotations

from inference.scheduling.blocks import BlockManager
from inference.scheduling.scheduler import Scheduler
from inference.scheduling.sequence import Sequence


def scheduler_of(blocks: int = 100, **sizes) -> Scheduler:
    found = {"max_batch_size": 8, "max_batched_tokens": 100} | sizes
    return Scheduler(BlockManager(blocks, prefix_cache=True), **found)


def step(scheduler: Scheduler, token: int = 1) -> dict[str, int]:
    """Run a step in which every sequence that samples gets a token: tokens computed of each."""
    work = scheduler.schedule()
    slices = list(work)
    scheduler.advance(work)
    for part in slices:
        if part.samples:
            part.sequence.append(token)
    scheduler.blocks.check()
    return {part.sequence.name: part.count for part in slices}


def added(scheduler: Scheduler, name: str, tokens: list[int]) -> Sequence:
    sequence = Sequence(name, tokens)
    scheduler.add(sequence)
    return sequence


PROMPT = list(range(300))


def test_a_prompt_that_several_ask_for_is_computed_once():
    scheduler = scheduler_of(max_batched_tokens=150)
    for i in range(4):
        added(scheduler, str(i), list(PROMPT))
    other = added(scheduler, "other", [7] * 10)
    assert step(scheduler) == {"0": 150}
    assert step(scheduler) == {"0": 150}
    assert other.computed == 0
    first = step(scheduler)  # all of them begin behind four blocks
    assert first == {"0": 1, "1": 44, "2": 44, "3": 44, "other": 10}
    assert scheduler.hit_tokens == 3 * 256


def test_who_waits_for_another_lets_the_rest_by():
    scheduler = scheduler_of()
    added(scheduler, "a", list(PROMPT))
    added(scheduler, "b", list(PROMPT))
    added(scheduler, "c", [7] * 130)
    assert step(scheduler) == {"a": 100}
    assert step(scheduler) == {"a": 100}
    assert step(scheduler) == {"a": 100}
    assert step(scheduler) == {"a": 1, "b": 44, "c": 55}
    scheduler.remove(scheduler.running[0])
    assert step(scheduler) == {"b": 1, "c": 75}


def test_a_shared_beginning_is_waited_for_and_no_more():
    scheduler = scheduler_of()
    added(scheduler, "long", [*PROMPT[:130], *range(1000, 1800)])
    added(scheduler, "short", [*PROMPT[:140]])
    assert step(scheduler) == {"long": 100}
    long = scheduler.running[0]
    scheduler.max_batched_tokens = 130
    assert step(scheduler) == {"long": 130}
    assert long.computed == 230
    scheduler.max_batched_tokens = 1000
    assert step(scheduler)["short"] == 12


def test_whoever_was_waited_for_may_leave():
    for leave in ("abort", "fail"):
        scheduler = scheduler_of()
        first, second = (added(scheduler, name, list(PROMPT)) for name in "ab")
        assert step(scheduler) == {"a": 100}
        scheduler.remove(first, failed=leave == "fail")
        assert step(scheduler) == {"b": 100}
        assert second.computed == (164 if leave == "abort" else 100)


def test_whoever_was_waited_for_may_be_preempted():
    scheduler = scheduler_of(blocks=6, max_batch_size=3)
    first = added(scheduler, "first", [7] * 63)
    assert step(scheduler) == {"first": 63}
    second = added(scheduler, "second", PROMPT[:250])
    third = added(scheduler, "third", PROMPT[:250])
    assert step(scheduler) == {"first": 1, "second": 99}
    first.append(*[7] * 200)  # needs five blocks of the six
    scheduler.max_batched_tokens = 300
    assert step(scheduler) == {"first": 201}
    assert second.preemptions == 1
    assert [s.name for s in scheduler.waiting] == ["second", "third"]
    scheduler.remove(first)
    assert step(scheduler)["second"] >= 186
    scheduler.remove(second)
    assert step(scheduler) == {"third": 250 - 192}
    scheduler.remove(third)
    assert scheduler.blocks.stats().used == 0


def test_who_takes_no_hits_waits_for_nobody():
    scheduler = scheduler_of(max_batched_tokens=1000)
    added(scheduler, "a", list(PROMPT))
    added(scheduler, "b", list(PROMPT)).takes_hits = False
    assert step(scheduler) == {"a": 300, "b": 300}
    assert scheduler.hit_tokens == 0
