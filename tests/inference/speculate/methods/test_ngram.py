"""Inference with reference: what is followed, and how it is found again behind a change."""

import random

import numpy as np
import pytest

from inference.speculate.methods.ngram import NGramProposer, Text
from tests.inference.speculate.running import Running, steps


def brute_force(tokens: list[int], reference: list[int], longest: int, shortest: int):
    """Length of the longest match and what follows it, the newest first, then the reference's."""
    for n in range(min(longest, len(tokens)), shortest - 1, -1):
        for text in (tokens[:-1], reference):
            for end in range(len(text), n - 1, -1):
                if text[end - n : end] == tokens[-n:]:
                    return n, (tokens if text is not reference else reference)[end:]
    return 0, []


@pytest.fixture
def running(request) -> Running:
    return Running(NGramProposer(), getattr(request, "param", 4))


@pytest.mark.parametrize("alphabet", [2, 4, 30])
@pytest.mark.parametrize("referred", [0, 40])
def test_longest_match_is_that_of_brute_force(alphabet, referred):
    rng = random.Random(alphabet + referred)
    for _ in range(60):
        longest, shortest = rng.choice([(8, 2), (3, 1), (2, 2), (5, 3)])
        reference = [rng.randrange(alphabet) for _ in range(referred)]
        tokens = [rng.randrange(alphabet) for _ in range(rng.randrange(1, 90))]
        text = Text(reference, longest, shortest)
        cuts = sorted(rng.sample(range(len(tokens)), min(3, len(tokens))))
        for piece in np.split(np.array(tokens, np.int32), cuts):
            text.take(piece)  # what has come at once and one by one is indexed alike
        text.find()
        length, wanted = brute_force(tokens, reference, longest, shortest)
        most = len(wanted) or 3
        assert text.agreed == length
        assert text.draft(most) == wanted[:most]


def test_what_comes_step_by_step_is_as_if_it_had_come_at_once():
    rng = random.Random(1)
    tokens = [rng.randrange(3) for _ in range(200)]
    one_by_one, at_once = Text((), 8, 2), Text((), 8, 2)
    for token in tokens:
        one_by_one.take(np.array([token], np.int32))
    at_once.take(np.array(tokens, np.int32))
    for text in (one_by_one, at_once):
        text.find()
    assert one_by_one.draft(20) == at_once.draft(20) != []


def test_no_draft_where_nothing_occurred_before(running):
    sequences = [running.enter(tokens) for tokens in ([5], [1, 2, 3, 4], [1, 1])]
    assert running.draft(*sequences) == [[], [], []]
    assert not running.proposer.confidence.any()


def test_a_repetition_goes_on_beyond_its_end(running):
    sequence = running.enter([1, 2, 3, 1, 2, 3, 1, 2])
    assert running.draft(sequence, most=7) == [[3, 1, 2, 3, 1, 2, 3]]
    assert (running.proposer.confidence[0] > 0.5).all()


def test_a_reference_is_followed_to_its_end_and_comes_after_the_output(running):
    only, both = running.enter([1, 2], [7, 1, 2, 8, 9]), running.enter([1, 2, 5, 1, 2], [1, 2, 8])
    assert running.draft(only, both, most=2) == [[8, 9], [5, 1]]
    assert running.draft(only, most=6) == [[8, 9]]
    longer = running.enter([1, 2, 5, 3, 1, 2], [3, 1, 2, 8])
    assert running.draft(longer, most=1) == [[8]]


@pytest.mark.parametrize("new", [[90], [90, 91, 92], [], [90, 13]])
def test_a_text_is_followed_on_behind_a_change(running, new):
    """A token is replaced by others; at most three steps pass until all drafts come again."""
    source = list(range(10, 40))
    sequence = running.enter([*source, 70, *source[:9]])
    wanted = [*new, *source[10:]]
    running.draft(sequence)
    for token in wanted[: len(new) + 1]:
        sequence.append(token)
        (draft,) = running.draft(sequence, most=3)
    assert draft == source[11:14]


def test_behind_a_change_of_one_token_the_draft_goes_on_at_once(running):
    source = list(range(10, 30))
    sequence = running.enter([*source, 70, *source[:9]])
    assert running.draft(sequence, most=3) == [source[9:12]]
    sequence.append(90)
    assert running.draft(sequence, most=3) == [source[10:13]]


def test_an_edit_takes_few_steps():
    rng = random.Random(0)
    source = [rng.randrange(1000) for _ in range(200)]
    edited = [token + 1000 if i % 25 == 9 else token for i, token in enumerate(source)]
    assert steps(NGramProposer(), source, edited, most=16) <= 30


@pytest.mark.parametrize("running", [1], indirect=True)
def test_a_place_that_another_sequence_takes_begins_anew(running):
    first = running.enter([1, 2, 3, 4, 1, 2])
    assert running.draft(first, most=2) == [[3, 4]]
    running.batch.leave(first)
    assert running.draft(running.enter([8, 9, 3, 1, 2]), most=2) == [[]]


@pytest.mark.parametrize("running", [2], indirect=True)
def test_a_preempted_sequence_comes_back_with_all_it_knew(running):
    sequence, other = running.enter([1, 2, 3, 4, 5, 1, 2]), running.enter([6, 6])
    assert running.draft(sequence, most=2) == [[3, 4]]
    sequence.append(3)
    for leaving in (sequence, other):
        running.batch.leave(leaving)
    running.batch.enter(other)
    running.batch.enter(sequence)
    assert running.draft(sequence, most=2) == [[4, 5]]


def test_confidence_follows_what_came(running):
    sequence, rng = running.enter([1, 2] * 3), random.Random(0)
    running.draft(sequence)
    before = running.proposer.confidence[0, 0]
    for _ in range(40):
        sequence.append(1, 2)
        running.draft(sequence)
    assert running.proposer.confidence[0, 0] > before
    for _ in range(40):
        sequence.append(rng.randrange(100, 200), 1, 2)
        running.draft(sequence)
    assert running.proposer.confidence[0, 0] < before


@pytest.mark.parametrize("new", [[90], [90, 91, 92]])
def test_a_change_is_expected_again_until_it_is_not_made(running, new):
    """A name of two tokens, 5 6, comes four times in a text: replaced, replaced, kept, kept."""
    source = [10, 11, 12, 5, 6, 13, 14, 15, 16, 5, 6, 17, 18, 19, 5, 6, 20, 21, 22, 5, 6, 23, 24]
    sequence = running.enter([*source, 70, 10, 11, 12])
    assert running.draft(sequence, most=2) == [[5, 6]]
    for token in [*new, 13, 14]:
        sequence.append(token)
        running.draft(sequence, most=1)
    (draft,) = running.draft(sequence, most=8)
    assert draft == [15, 16, *new, 17, 18, 19, *new, 20, 21][: len(draft)]
    assert len(draft) > 4
    sequence.append(15, 16, *new, 17, 18, 19)  # more than one draft at once
    assert running.draft(sequence, most=1) == [[90]]
    sequence.append(5)
    assert running.draft(sequence, most=2) == [[6, 20]]
    sequence.append(6, 20, 21)
    assert running.draft(sequence, most=3) == [[22, 5, 6]]
