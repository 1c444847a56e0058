"""Chunks of prompts follow from the time that there is for them, by what past steps took."""

import pytest

from inference.scheduling.blocks import BlockManager
from inference.scheduling.prompt_share import FIRST, LEAST_TOKENS, PromptRate
from inference.scheduling.scheduler import Scheduler
from inference.scheduling.sequence import Sequence


@pytest.fixture
def rate() -> PromptRate:
    """Of 100 tokens in 20 ms beside the decodes."""
    made = PromptRate()
    assert made.tokens_in(0.1) == FIRST
    for _ in range(20):
        made.note(4, 0, 0.010)
        made.note(4, 100, 0.030)
    return made


def test_a_step_has_the_tokens_for_which_there_is_time(rate):
    assert rate.tokens_in(0.050) == pytest.approx(200, abs=2)
    assert rate.tokens_in(0.005) == LEAST_TOKENS, "prompts go on, however late a step is"


def test_a_step_that_had_to_compile_something_says_little(rate):
    before = rate.tokens_in(0.050)
    rate.note(4, 100, 60.0)
    assert rate.tokens_in(0.050) > 0.8 * before


@pytest.mark.parametrize(("fixed", "each"), [(2.4e-3, 12e-6), (20e-3, 2e-3), (1e-4, 1e-5)])
def test_decodes_come_in_time_beside_a_long_prompt(fixed, each):
    """Devices of very different speed; attention makes the end twice as slow."""
    target = 5 * fixed
    scheduler = Scheduler(
        BlockManager(1000, prefix_cache=True), 4, max_batched_tokens=2048, target_s=target
    )
    for i in range(3):
        scheduler.add(Sequence(str(i), [i] * 5))
    late, steps = 0, 0
    long = Sequence("long", list(range(20_000)))
    for number in range(3000):
        if number == 10:
            scheduler.add(long)
        work = scheduler.schedule()
        sequences = [scheduler.batch.sequences[place] for place in work.places]
        scheduler.advance(work)
        for sequence, samples in zip(sequences, work.samples, strict=True):
            if samples:
                sequence.append(1)
        slower = 1 + long.computed / 20_000
        seconds = fixed + each * slower * work.tokens
        scheduler.note_time(work, seconds)
        assert {sequence.name for sequence in sequences} >= {"0", "1", "2"}, "each has its token"
        late += seconds > 1.3 * target
        steps += number >= 10
        if long.computed >= 20_000:
            break
    assert late <= 3
    busy = 1.5 * each * 20_000 + fixed * steps  # what the prompt takes at its mean speed
    assert steps * target < 2.5 * busy, "the time that there is is used"
