"""Sampling against its definitions, and text that is only shown when it is certain."""

import itertools
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch

from inference.requests.detokenizer import Detokenizer
from inference.requests.request import RequestOutput, SamplingParams
from inference.scheduling.acceptance import Acceptance
from inference.scheduling.active import ActiveRequest, ActiveRequests
from inference.scheduling.blocks import BlockManager
from inference.scheduling.sampler import (
    ROWS_AT_ONCE,
    draw_token,
    keep_likely,
    log_min_p,
    penalize,
    permit,
    sample,
    top_logprobs,
)
from inference.scheduling.scheduler import Scheduler
from inference.scheduling.sequence import Draw, Sequence
from kernels.gumbel_noise import draw, noise

CHI_SQUARE = {5: 20.5, 6: 22.5, 7: 24.3, 8: 26.1, 15: 37.7}  # exceeded by one in a thousand
LOGITS = torch.tensor([1.0, -2.0, 3.0, 0.5, 3.0, -0.1])


def test_greedy_takes_the_lowest_id_of_equals():
    assert sample(LOGITS, [], [], SamplingParams(), (), 0) == 2
    assert sample(LOGITS, [], [], SamplingParams(), (2,), 0) == 4


def test_penalties():
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    got = penalize(LOGITS, [0, 1], [2, 2, 5], params)
    want = [1 / 2, -4.0, 3 / 2 - 0.5 - 0.5, 0.5, 3.0, -0.2 - 0.5 - 0.25]
    torch.testing.assert_close(got, torch.tensor(want))
    assert LOGITS[0] == 1.0
    assert penalize(LOGITS, [0, 1], [2], SamplingParams()) is LOGITS


@pytest.mark.parametrize("top_k", [0, 1, 2, 3, 100])
@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.9, 1.0])
def test_top_k_and_top_p(top_k, top_p):
    got = set(keep_likely(LOGITS.numpy(), top_k, top_p).tolist())
    ordered = sorted(range(6), key=lambda i: (-LOGITS[i].item(), i))[: top_k or 6]
    weights = LOGITS[ordered].exp() / LOGITS[ordered].exp().sum()
    reached = [w.item() for w in weights.cumsum(0)]
    count = 1 + sum(total < top_p - 1e-6 for total in reached[:-1])
    assert got == set(ordered[:count] if top_p < 1 else ordered)


def test_samples_follow_the_distribution():
    """Chi-square of the draws of many steps and of many seeds, on a vocabulary of 16."""
    logits = torch.randn(16, generator=torch.Generator().manual_seed(3)).numpy()
    count = 3000
    for top_k, top_p, by_seed in ((0, 1.0, False), (0, 1.0, True), (9, 0.9, False)):
        kept = keep_likely(logits / np.float32(0.7), top_k, top_p)
        own = Draw(0.7, top_p, top_k, seeds=12345)
        drawn = [
            draw_token(logits, replace(own, seeds=i) if by_seed else own, 0 if by_seed else i)
            for i in range(count)
        ]
        found = np.bincount(drawn, minlength=16)
        assert found[kept].sum() == count
        wanted = np.exp(logits[kept].astype(np.float64) / 0.7)
        wanted *= count / wanted.sum()
        assert ((found[kept] - wanted) ** 2 / wanted).sum() < CHI_SQUARE[len(kept) - 1]


def test_only_noise_that_counts_is_made_and_the_token_is_that_of_all_noise():
    generator = np.random.default_rng(0)
    for step in range(60):
        x = (generator.standard_normal(9000) * generator.uniform(0.1, 30)).astype(np.float32)
        tokens = np.sort(generator.choice(10**5, 9000, replace=False))
        noisy = x + noise(7, step, tokens)
        assert draw(x, tokens, 7, step) == tokens[noisy.argmax()]


def test_where_no_token_may_come_none_does():
    nothing = np.full(6, -np.inf, np.float32)
    assert draw_token(nothing, Draw(), 0) == draw_token(nothing, Draw(1.0), 0) == -1


def test_top_logprobs_hold_the_chosen_token():
    (got,) = top_logprobs(LOGITS[None], [1], 2)
    assert list(got) == [2, 4, 1]
    assert got[1] == pytest.approx(torch.log_softmax(LOGITS, 0)[1].item())


@pytest.mark.parametrize("vocabulary", [6, 384, 4103])
def test_log_probabilities_of_many_rows_are_those_of_each_alone(vocabulary):
    """Bit for bit, in order, equals among them too; and what JSON cannot hold is not there."""
    logits = torch.randn(ROWS_AT_ONCE + 5, vocabulary, generator=torch.Generator().manual_seed(1))
    logits[:, 2], logits[3, 1] = logits[:, 4], -3.4e38
    logits[3, 0] = 3.4e38
    tokens = [row % vocabulary for row in range(len(logits))]
    together = top_logprobs(logits, tokens, 5)
    for row, token in enumerate(tokens):
        (alone,) = top_logprobs(logits[row : row + 1], [token], 5)
        assert list(alone.items()) == list(together[row].items())
        likely = torch.log_softmax(logits[row], 0).topk(5).indices.tolist()
        assert {*likely, token} == set(alone)
        assert alone[token] == max(
            torch.log_softmax(logits[row], 0)[token].item(), torch.finfo(torch.float32).min
        )
    assert top_logprobs(logits[:0], [], 5) == []


def test_bias_forbidden_tokens_and_mask():
    params = SamplingParams(logit_bias={1: 50, 2: -2.5})
    mask = np.array([0b101011], dtype=np.int32)
    got = permit(LOGITS, params, [5], mask)
    assert got.tolist() == [1.0, 48.0, -torch.inf, 0.5, -torch.inf, -torch.inf]
    assert permit(LOGITS, SamplingParams(), (), None) is LOGITS
    assert sample(LOGITS, [], [], params, (), 0) == 1
    assert sample(LOGITS, [], [], params, (1,), 0) == 4
    assert sample(LOGITS, [], [], params, (), 0, np.array([0b1100], dtype=np.int32)) == 2


@pytest.mark.parametrize("min_p", [1e-3, 0.1, 0.9, 1.0])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (3, 1.0), (0, 0.7), (4, 0.9)])
def test_min_p_keeps_of_what_the_others_keep_the_nearly_likeliest(min_p, top_k, top_p):
    before = keep_likely(LOGITS.numpy(), top_k, top_p).tolist()
    got = keep_likely(LOGITS.numpy(), top_k, top_p, log_min_p(min_p)).tolist()
    p = torch.softmax(LOGITS, 0)
    assert got == [i for i in before if p[i] >= min_p * p.max() * (1 - 1e-6)]


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def decode(self, tokens, skip_special_tokens):
        return bytes(tokens).decode("utf-8", errors="replace")


def text_of(detokenizer: Detokenizer) -> str:
    return "".join(detokenizer.pieces)


def feed(text: str, stop=()) -> tuple[list[str], Detokenizer]:
    detokenizer, shown = Detokenizer(Bytes(), stop), []
    for byte in text.encode():
        detokenizer.add(byte)
        shown.append(text_of(detokenizer))
        if detokenizer.stopped:
            break
    detokenizer.finish()
    return [*shown, text_of(detokenizer)], detokenizer


def test_half_characters_are_held_back():
    text = "naïve 你好 🙂!"
    shown, _ = feed(text)
    assert shown[-1] == text
    assert all(text.startswith(part) for part in shown)
    assert all(len(a) <= len(b) for a, b in itertools.pairwise(shown))


def test_a_sequence_that_ends_within_a_character_shows_it_as_broken():
    detokenizer = Detokenizer(Bytes())
    for byte in b"ab\xf0\x9f":
        detokenizer.add(byte)
    assert text_of(detokenizer) == "ab"
    detokenizer.finish()
    assert text_of(detokenizer) == "ab\ufffd"


@pytest.mark.parametrize(
    ("text", "stop", "want"),
    [
        ("one STOP two", ("STOP",), "one "),
        ("one STO two", ("STOP",), "one STO two"),
        ("aab", ("ab",), "a"),
        ("xyz", ("z", "yz"), "x"),
        ("end ST", ("STOP",), "end ST"),
        ("é!", ("é",), ""),
    ],
)
def test_stop_texts(text, stop, want):
    shown, detokenizer = feed(text, stop)
    assert text_of(detokenizer) == want
    assert all(want.startswith(part) for part in shown)
    assert detokenizer.stopped == (want != text)


class Running:
    """A request that runs, and is given tokens."""

    def __init__(self, prompt: list[int], params: SamplingParams, limit: int) -> None:
        scheduler = Scheduler(BlockManager(limit), max_batch_size=1, max_batched_tokens=10**6)
        self._requests = ActiveRequests(scheduler, lambda blocks: None)
        self.request = ActiveRequest("a", prompt, params, Bytes(), frozenset(), limit)
        self._requests.add(self.request)
        self._acceptance = Acceptance(self._requests)
        self._places = scheduler.schedule().places

    def accept(self, token: int) -> None:
        self._acceptance.take_tokens(self._places, np.array([token]), {})

    def abort(self) -> RequestOutput:
        return self._requests.finish(self.request, "abort")


def test_the_host_pays_the_same_for_a_token_at_any_length():
    """Bytes that are allocated for one, not seconds: nothing told before is copied."""
    params = SamplingParams(max_tokens=10**6, ignore_eos=True, stop=("STOP",))
    running = Running([1] * 1000, params, 10**6)

    def most_of_one(count: int) -> int:
        found = []
        for _ in range(count):
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            running.accept(97)
            running.request.snapshot()
            found.append(tracemalloc.get_traced_memory()[1] - before)
        return sorted(found)[count // 2]  # now and then a list moves to a larger place

    tracemalloc.start()
    try:
        early = most_of_one(51)
        for _ in range(20_000):
            running.accept(97)
        assert most_of_one(51) < early + 200
    finally:
        tracemalloc.stop()


def test_an_output_stays_as_it_was_while_its_request_goes_on():
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    running = Running([1], params, 99)
    seen = []
    for token in b"abc":
        running.accept(token)
        seen.append(running.request.snapshot())
    last = running.abort()
    assert [out.token_ids for out in seen] == [[97], [97, 98], [97, 98, 99]]
    assert [out.text for out in seen] == ["a", "ab", "abc"] == [*["a", "ab"], last.text]
    assert [out.delta for out in seen] == ["a", "b", "c"]
    assert [len(out.token_times) for out in seen] == [1, 2, 3]
    assert (seen[1].token_ids[-1], seen[1].token_ids[:5], list(seen[0].token_ids)) == (
        98,
        [97, 98],
        [97],
    )
    assert (last.token_ids, last.finish_reason) == ([97, 98, 99], "abort")
    with pytest.raises(IndexError):
        seen[0].token_ids[1]


def test_the_scheduler_serves_in_order_and_preempts_the_last():
    blocks = BlockManager(4)
    scheduler = Scheduler(blocks, max_batch_size=3, max_batched_tokens=100)
    a, b, c = (Sequence(name, [0] * 63) for name in "abc")
    for sequence in (a, b, c):
        scheduler.add(sequence)

    def names(work):
        return [scheduler.batch.names[place] for place in work.places]

    first = scheduler.schedule()
    assert (names(first), first.counts.tolist()) == (["a", "b"], [63, 37])
    scheduler.advance(first)
    second = scheduler.schedule()
    assert (names(second)[-1], second.counts[-1]) == ("c", 63)
    scheduler.advance(second)
    for sequence in (a, b, c):
        sequence.append(0, 0)  # each needs a second block; one is left
    assert names(scheduler.schedule()) == ["a", "b"]
    assert (c.computed, c.preemptions) == (0, 1)
    assert [s.name for s in scheduler.waiting] == ["c"]
    scheduler.remove(a)
    scheduler.remove(b)
    assert names(scheduler.schedule()) == ["c"]
    blocks.check()
