"""Drafts that are not what comes: nothing of them is taken, counted, found again or passed on."""

from collections.abc import Sequence

import pytest
import torch

from inference.requests.request import SamplingParams
from kernels.op_inputs import KV_BLOCK
from tests.inference.engines import engine_of, tokens_of
from tests.inference.speculate.requests import Proposing
from tests.inference.speculate.test_traps import DEPTH, KINDS, PROMPT, answer, drafted, ended_at

LONG: dict = {"max_tokens": 60, "ignore_eos": True}


class InPlaceOf(Proposing):
    """Drafts of a known text whose first token is each time another one.

    Args:
        text: The prompt and what comes after it.
        others: By how many tokens are known, what is drafted in place of the one that comes next;
            no drafts where it is missing.
        follows: Whether what comes after that one is drafted after it; else it is repeated.
    """

    def __init__(
        self, text: Sequence[int], others: dict[int, int], *, follows: bool = True
    ) -> None:
        super().__init__()
        self._text, self._others, self._follows = list(text), others, follows

    def after(self, text: list[int], most: int) -> list[int]:
        known = len(text)
        if known not in self._others:
            return []
        assert text == self._text[:known]
        other = self._others[known]
        return ([other, *self._text[known + 1 :]] if self._follows else [other] * most)[:most]


@pytest.mark.parametrize("follows", [True, False])
@pytest.mark.parametrize("kind", [*KINDS, "of few"])
def test_likely_tokens_that_were_not_chosen_are_not_taken(tiny_llama, kind, follows):
    """Some systems take a draft that is among the likely tokens, or the second of them where those
    behind it are the likeliest; nor does a penalty count it."""
    own = KINDS.get(kind, {"temperature": 1.0, "seed": 4, "top_k": 20, "top_p": 0.9})
    params, runner = SamplingParams(**LONG, **own), engine_of(tiny_llama)
    wanted = answer(runner, params)
    told = SamplingParams(**LONG, **(own | {"logprobs": 2}))
    tokens, _, _, found = answer(runner, told)
    assert tokens == wanted[0]
    assert found is not None
    others = {
        len(PROMPT) + i: next(t for t in likely if t != token)
        for i, (token, likely) in enumerate(zip(tokens, found, strict=True))
    }
    proposer = InPlaceOf([*PROMPT, *tokens], others, follows=follows)
    runner.speculate_by(proposer, 4)
    assert answer(runner, params) == wanted
    assert proposer.proposed > 4 * 50
    assert runner.speculation.accepted.sum() == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_text_that_a_draft_would_complete_is_not_found(tiny_llama, kind):
    """The text is that of a token that came and of the draft that did not come behind it."""
    runner = engine_of(tiny_llama)
    decode = runner.tokenizer.decode
    letters = [token for token in range(384) if decode([token]).isalpha()]
    values = KINDS[kind] | LONG | {"logit_bias": dict.fromkeys(letters, 50)}
    whole, text, *_ = answer(runner, SamplingParams(**values))
    at = ended_at(whole)
    other = next(
        token for token in letters if decode([whole[at], token]) not in text and token != whole[at]
    )
    params = SamplingParams(**values, stop=(decode([whole[at], other]),))
    wanted = answer(runner, params)
    assert wanted[:3] == (whole, text, "length")
    others = {len(PROMPT) + i: other for i in range(1, 60) if whole[i] != other}
    proposer = InPlaceOf([*PROMPT, *whole], others, follows=False)
    runner.speculate_by(proposer, 3)
    assert answer(runner, params) == wanted
    assert proposer.proposed > 150


@pytest.mark.parametrize(
    ("chance", "gained", "found"),
    [(None, 95, 192), (1.0, 95, 192), (0.0, 90, 128), (0.0, 92, 128), (0.0, 93, 192)],
)
def test_of_an_aborted_request_its_own_tokens_are_found_again(tiny_llama, chance, gained, found):
    """Wrong drafts reach over a block's end, which its own tokens may not; the last one of these
    is not computed."""
    prompt, params = [*range(30, 130)], SamplingParams(max_tokens=200, ignore_eos=True)
    runner, other = engine_of(tiny_llama), engine_of(tiny_llama)
    text, *_ = answer(other, params, prompt)
    replay = None if chance is None else drafted(runner, [[*prompt, *text]], chance)
    name, count = runner.add_request(prompt, params), 0
    while count < gained:
        names = runner.advance().names
        assert chance != 0 or names == [name]
        count += names.count(name)
        runner.check_integrity()
    assert chance != 0 or (replay and replay.reached_behind(192))
    output = runner.abort(name)
    assert output.token_ids == text[:count]
    runner.check_integrity()
    again = [*prompt, *text[:150]]
    assert answer(runner, params, again) == answer(engine_of(tiny_llama), params, again)
    assert runner.stats().hit_tokens == found


def test_requests_hold_no_more_blocks_behind_wrong_drafts_than_a_draft_can_need(tiny_llama):
    """Drafts of each step reach 16 tokens ahead: into one block more, and that is all."""
    prompts = [[5, 6 + i, 7] * 15 for i in range(4)]
    params = SamplingParams(max_tokens=120, ignore_eos=True)
    runner = engine_of(tiny_llama)
    wanted = runner.generate(prompts, params)
    drafted(runner, [tokens_of(o) for o in wanted], 0.0, depth=16)
    before = runner.stats()
    names = [runner.add_request(prompt, params) for prompt in prompts]
    gained, ended = 0, {}
    while runner.has_unfinished:
        result = runner.advance()
        gained += names[0] in result.names
        ended |= {output.request_id: output.token_ids for output in result.finished}
        runner.check_integrity()
        if not result.finished:
            assert runner.stats().used <= 4 * -(-(45 + gained + 16) // 64)
    assert [ended[name] for name in names] == [output.token_ids for output in wanted]
    after = runner.stats()
    assert (after.used, after.free + after.cached) == (0, before.free + before.cached)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("held", [False, True])
def test_logits_that_are_not_finite_behind_a_wrong_draft_end_nothing(tiny_llama, kind, held):
    """One token makes NaN of logits, and where it is `held`, of its K and V in the cache. The text
    has it never, and drafts have it all the time."""
    poison, values = 300, KINDS[kind] | LONG | {"logit_bias": {300: -100}}
    params = SamplingParams(**values)
    wanted = answer(engine_of(tiny_llama), params)
    assert poison not in wanted[0]
    runner = engine_of(tiny_llama)
    forward = runner.loop.forward

    def poisoned(batch):
        logits, those = forward(batch), batch.ids == poison
        if held:
            for pool in runner.pools:
                block, place = batch.slots[those] // KV_BLOCK, batch.slots[those] % KV_BLOCK
                pool.k[block, :, place] = pool.v[block, :, place] = torch.nan
        logits[those[batch.rows]] = torch.nan
        return logits

    runner.loop.forward = poisoned
    others = dict.fromkeys(range(len(PROMPT) + 1, len(PROMPT) + 60), poison)
    proposer = InPlaceOf([*PROMPT, *wanted[0]], others, follows=False)
    runner.speculate_by(proposer, DEPTH)
    assert answer(runner, params) == wanted
    assert proposer.proposed > 400
