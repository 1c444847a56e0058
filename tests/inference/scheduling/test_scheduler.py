"""What runs in a step: who waits for whom, and that nobody waits for ever."""

import pytest

from inference.scheduling.blocks import BlockManager
from inference.scheduling.scheduler import Scheduler
from inference.scheduling.sequence import Sequence


def scheduler_of(blocks: int = 100, **sizes) -> Scheduler:
    found = {"max_batch_size": 8, "max_batched_tokens": 100} | sizes
    return Scheduler(BlockManager(blocks, prefix_cache=True), **found)


def step(scheduler: Scheduler, token: int = 1) -> dict[str, int]:
    """Run a step in which every sequence that samples gets a token: tokens computed of each."""
    work = scheduler.schedule()
    sequences = [scheduler.batch.sequences[place] for place in work.places]
    scheduler.advance(work)
    for sequence, samples in zip(sequences, work.samples, strict=True):
        if samples:
            sequence.append(token)
    scheduler.blocks.check()
    scheduler.check()
    return {s.name: count for s, count in zip(sequences, work.counts.tolist(), strict=True)}


def added(scheduler: Scheduler, name: str, tokens: list[int]) -> Sequence:
    sequence = Sequence(name, tokens)
    scheduler.add(sequence)
    return sequence


def leave(scheduler: Scheduler) -> None:
    """Whoever has a token of an answer leaves."""
    for sequence in list(scheduler.running):
        if len(sequence) > sequence.prompt:
            scheduler.remove(sequence)


PROMPT = list(range(300))


def test_a_prompt_that_several_ask_for_is_computed_once():
    scheduler = scheduler_of(max_batched_tokens=150)
    for i in range(4):
        added(scheduler, str(i), list(PROMPT))
    assert step(scheduler) == {"0": 150}
    assert step(scheduler) == {"0": 150}
    first = step(scheduler)  # all of them begin behind four blocks
    assert first == {"0": 1, "1": 44, "2": 44, "3": 44}
    assert scheduler.hit_tokens == 3 * 256


def test_who_waits_for_another_lets_the_rest_by():
    scheduler = scheduler_of()
    added(scheduler, "a", list(PROMPT))
    added(scheduler, "b", list(PROMPT))
    added(scheduler, "c", [7] * 130)
    steps = [step(scheduler) for _ in range(6)]
    assert steps[:2] == [{"a": 50, "c": 50}] * 2
    assert steps[2] == {"c": 30}, "nothing holds up what ends with this step"
    assert steps[3:] == [{"a": 99, "c": 1}, {"a": 99, "c": 1}, {"a": 2, "b": 44, "c": 1}]


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
    assert list(step(scheduler)) == ["first"]
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
    added(scheduler, "b", list(PROMPT)).findable = 0
    assert step(scheduler) == {"a": 300, "b": 300}
    assert scheduler.hit_tokens == 0


def finish_times(scheduler: Scheduler, arrivals: dict[int, tuple[str, int]], steps: int) -> dict:
    """The clock of a device at which each prompt had its first token; both by their names.

    Args:
        scheduler: Idle.
        arrivals: Name and length of what arrives, by step.
        steps: How many are run.
    """
    clock, found, sequences = 0.0, {}, {}
    for number in range(steps):
        if number in arrivals:
            name, count = arrivals[number]
            start = 1000 * len(sequences)
            sequences[name] = added(scheduler, name, list(range(start, start + count)))
            found[name, "arrival"] = clock
        leave(scheduler)  # one token is all that they want
        done = step(scheduler)
        clock += 2.4 + sum(done.values()) * 0.0122 if done else 0.0  # ms: an H200, 8 B
        for name in done:
            if len(sequences[name]) > sequences[name].prompt:
                found.setdefault((name, "first"), clock)
    return found


def alone(count: int) -> float:
    """The same of a prompt that is alone."""
    scheduler = scheduler_of(2000, max_batched_tokens=2048)
    return finish_times(scheduler, {0: ("x", count)}, 64)["x", "first"]


@pytest.mark.parametrize("count", [128, 600, 2000])
def test_a_short_prompt_does_not_wait_for_a_long_one_that_hardly_notices(count):
    scheduler = scheduler_of(2000, max_batched_tokens=2048)
    found = finish_times(scheduler, {0: ("long", 60_000), 7: ("short", count)}, 128)
    waited = found["short", "first"] - found["short", "arrival"]
    assert waited <= 2.1 * alone(count)
    assert found["long", "first"] <= 1.1 * alone(60_000)


def test_a_stream_of_short_prompts_leaves_a_long_one_half_of_the_time():
    scheduler = scheduler_of(2000, max_batched_tokens=2048)
    arrivals = {0: ("long", 30_000)} | {i: (f"short-{i}", 200) for i in range(1, 300)}
    found = finish_times(scheduler, arrivals, 300)
    assert found["long", "first"] <= 2 * alone(30_000)
    waits = [
        found[name, "first"] - found[name, "arrival"] for name, what in found if what == "first"
    ]
    assert len(waits) > 290


def test_steps_of_a_long_prompt_are_short_while_others_come():
    """A sixteenth of a step, until nobody has come for a while."""
    scheduler, sizes = scheduler_of(2000, max_batched_tokens=2048), []
    added(scheduler, "long", list(range(60_000)))
    for number in range(100):
        if number % 9 == 5 and number < 50:
            added(scheduler, str(number), [number] * 100)
        sizes.append(step(scheduler))
        leave(scheduler)
    part = {"long": 128}
    assert sizes[4:7] == [{"long": 1024}, {"5": 100}, part]
    assert sizes[41] == {"41": 100}
    assert sizes[42:66] == [part] * 24
    assert sizes[66:] == [{"long": 1024}] * 34


def test_among_waiting_prompts_the_oldest_is_not_passed_for_ever():
    scheduler = scheduler_of(200, max_batch_size=3, max_batched_tokens=100)
    added(scheduler, "long", list(range(2000)))
    second = added(scheduler, "second", list(range(5000, 7000)))
    for i in range(400):
        added(scheduler, str(i), list(range(9000 + 100 * i, 9090 + 100 * i)))
        step(scheduler)
        leave(scheduler)
        if len(second) > second.prompt:
            return
    pytest.fail("it was")


def test_beside_decodes_prompts_take_what_they_may():
    scheduler = scheduler_of()
    added(scheduler, "a", [7] * 10)
    assert step(scheduler) == {"a": 10}
    scheduler.prefill.beside_decodes = 30
    added(scheduler, "b", list(PROMPT))
    assert step(scheduler) == {"a": 1, "b": 30}
    scheduler.remove(scheduler.running[0])
    assert step(scheduler) == {"b": 100}, "nobody waits for the step"


def test_decodes_come_before_prompts_that_began_earlier():
    scheduler = scheduler_of(max_batched_tokens=100)
    added(scheduler, "long", list(range(1000)))
    assert step(scheduler) == {"long": 100}
    added(scheduler, "short", [7] * 10)
    assert step(scheduler) == {"short": 10}
    assert [step(scheduler) for _ in range(3)] == [{"long": 99, "short": 1}] * 3


def test_chunks_get_smaller_where_attention_is_what_costs():
    def chunks(span: float) -> list[int]:
        scheduler = scheduler_of(2000, max_batched_tokens=2048)
        scheduler.prefill.span = span
        added(scheduler, "long", list(range(60_000)))
        found = []
        while sum(found) < 60_000:
            found.append(step(scheduler)["long"])
        return found[:-1]

    assert set(chunks(float("inf"))) == {1024, 2048}, "half a step each while many are to come"
    assert chunks(float("inf"))[-1] == 2048
    found = chunks(8192)
    assert set(found) == {1024}, "the end, which may take whole steps, has too much to attend to"
