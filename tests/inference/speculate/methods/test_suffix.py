"""Suffix decoding: counts of what was served, and that its memory is bounded."""

import random
from collections import Counter

import pytest

from inference.speculate.methods.suffix import LENGTHS, MOST_PLACES, Served, SuffixProposer
from tests.inference.speculate.running import Running, steps


def brute_force(past: list[list[int]], context: list[int], most: int):
    """The path that most of the newest occurrences of the longest n-gram take."""
    for n in LENGTHS:
        texts = [
            [*tokens[end:], -1]
            for tokens in reversed(past)
            for end in range(len(tokens), n - 1, -1)
            if len(context) >= n and tokens[end - n : end] == context[-n:]
        ][:MOST_PLACES]
        if texts:
            path, shares = [], []
            while len(path) < most:
                counts = Counter(text[len(path)] for text in texts)
                total = sum(counts.values())
                counts.pop(-1, None)
                if not counts:
                    break
                token, count = counts.most_common(1)[0]
                path.append(token)
                shares.append(count / total)
                texts = [text for text in texts if text[: len(path)] == path]
            return path, shares, n
    return [], [], 0


@pytest.mark.parametrize("alphabet", [2, 5, 40])
def test_paths_are_those_of_brute_force(alphabet):
    rng = random.Random(alphabet)
    for _ in range(30):
        served = Served(1 << 10)
        past = [[rng.randrange(alphabet) for _ in range(rng.randrange(60))] for _ in range(12)]
        for tokens in past:
            served.add(tokens)
        context = [rng.randrange(alphabet) for _ in range(rng.randrange(1, 20))]
        assert served.follow(context, 6) == brute_force(past, context, 6)


def test_what_was_served_longest_ago_is_forgotten():
    served, rng = Served(256), random.Random(0)
    nbytes, past = served.nbytes, []
    for _ in range(50):
        past.append([rng.randrange(3) for _ in range(rng.randrange(70))])
        served.add(past[-1])
        held, room = [], 256
        for tokens in reversed(past):  # of the oldest there is a part
            held.insert(0, tokens[max(len(tokens) + 1 - room, 0) :])
            room -= len(tokens) + 1
            if room <= 0:
                break
        context = past[-1][-5:] or [0]
        assert served.follow(context, 5) == brute_force(held, context, 5)
    assert served.nbytes == nbytes
    served.add([7, 8, 9] * 100)  # more than there is room for
    assert served.follow([7, 8], 2)[0] == [9, 7]


def test_the_more_frequent_continuation_is_proposed_and_ends_where_it_is_unlikely():
    running = Running(proposer := SuffixProposer(1 << 10))
    for i in range(8):
        proposer.note_end([1, 2, 3, 4, 5 if i % 4 else 6, 7, 20 + i], 2)
    sequence = running.enter([9, 1, 2, 3, 4])
    assert running.draft(sequence) == [[5, 7]]
    assert proposer.confidence[0, 0] == pytest.approx(0.75 * 0.8)  # shares times prior trust
    assert proposer.confidence[0, 1] == pytest.approx(0.8)
    assert not proposer.confidence[0, 2:].any()


def test_repeated_requests_take_as_few_steps_as_drafts_allow():
    proposer, rng = SuffixProposer(), random.Random(0)
    requests = [[rng.randrange(50) for _ in range(100)] for _ in range(10)]
    before = [steps(proposer, tokens[:20], tokens[20:], most=8) for tokens in requests]
    again = [steps(proposer, tokens[:20], tokens[20:], most=8) for tokens in requests]
    assert min(before) > 60
    assert max(again) <= 12


def test_without_past_requests_drafts_are_of_the_own_text():
    running = Running(SuffixProposer(1 << 10))
    sequence = running.enter([1, 2, 3, 4, 1, 2], [5, 5])
    assert running.draft(sequence, most=2) == [[3, 4]]
    assert running.draft(running.enter([3])) == [[]]


def test_a_place_that_another_sequence_takes_does_not_judge_the_last_draft():
    running = Running(proposer := SuffixProposer(1 << 10), places=1)
    proposer.note_end([1, 2, 3, 4], 2)
    first = running.enter([1, 2])
    running.draft(first)
    before = proposer.confidence[0, 0]
    running.batch.leave(first)
    running.draft(running.enter([1, 2, 9, 1, 2]))
    running.batch.leave(running.batch.sequences[0])
    running.draft(running.enter([1, 2]))
    assert proposer.confidence[0, 0] == before > 0
