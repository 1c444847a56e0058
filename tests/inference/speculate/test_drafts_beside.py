"""Drafts beside what else an engine does: windows, mixtures, beams, memory that runs out."""

from collections.abc import Callable

import pytest

from formats.errors import RequestError
from inference.beam_search import BeamParams, BeamSearch
from inference.config import SpeculateConfig
from inference.requests.request import SamplingParams
from inference.scheduling.batch import Ints, RunningBatch
from tests.inference.engines import engine_of, finish, tokens_of
from tests.inference.speculate.test_traps import KINDS, drafted, told
from tests.tiny_families import DEEPSEEK, TINY

SOME = {"max_tokens": 70, "ignore_eos": True}
FAMILIES: dict[str, tuple[str, dict]] = {
    "one window": ("mistral", {"sliding_window": 20}),
    "windows of some blocks": ("gemma3_text", TINY["gemma3_text"]),
    "softcaps": ("gemma2", TINY["gemma2"]),
    "mixture and latent": DEEPSEEK["v3"],
    "blocks that do not rotate": ("smollm3", TINY["smollm3"]),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_behind_drafts_is_that_of_a_step_of_its_own(make_model, family):
    """Each sees as many tokens before it as it may; they cross the ends of blocks and windows."""
    name, overrides = FAMILIES[family]
    folder = make_model(name, **overrides)
    prompts = [[5 + 7 * i, 9, 30 - i] * (3 + 7 * i) for i in range(len(KINDS))]
    params = [SamplingParams(**KINDS[kind], **SOME) for kind in KINDS]
    wanted = [told(output) for output in engine_of(folder).generate(prompts, params)]
    texts = [[*p, *w[0]] for p, w in zip(prompts, wanted, strict=True)]
    for chance in (1.0, 0.7):
        runner = engine_of(folder, max_batched_tokens=40)
        drafted(runner, texts, chance, depth=6)
        assert [told(output) for output in runner.generate(prompts, params)] == wanted
        runner.check_integrity()
        assert runner.speculation.accepted.sum() > 100


def refusing_beams(propose: Callable[..., Ints]) -> Callable[..., Ints]:
    def asked(batch: RunningBatch, places: Ints, most: Ints) -> Ints:
        assert not batch.held_by_client[places].any()
        return propose(batch, places, most)

    return asked


@pytest.mark.parametrize("method", ["ngram", "known"])
def test_beams_are_the_same_beside_requests_with_drafts(tiny_llama, method):
    """They themselves get none: their client chooses their tokens."""
    beams = BeamParams(beam_width=4, n=4, max_tokens=50, ignore_eos=True)
    prompts = [[5, 6 + i, 7] * 18 for i in range(3)]
    params = SamplingParams(**SOME)
    found = []
    for speculates in (False, True):
        own = SpeculateConfig(method="ngram", depth=5) if speculates else None
        sizes = {"max_batch_size": 8, "kv_blocks": 24, "max_model_len": 192}
        runner = engine_of(tiny_llama, speculate=own if method == "ngram" else None, **sizes)
        if speculates and method == "known":
            texts = [[*p, *t] for p, t in zip(prompts, found[0][1], strict=True)]
            drafted(runner, texts, 0.8)
        if runner.speculation is not None:
            proposer = runner.speculation.proposer
            proposer.propose = refusing_beams(proposer.propose)
        searches = [BeamSearch(runner, prompt, beams) for prompt in prompts[:1]]
        names = [runner.add_request(prompt, params) for prompt in prompts]
        ended = finish(runner, *searches)
        tokens = [list(ended[name].token_ids) for name in names]
        found.append(([s.hypotheses for s in searches], tokens))
    assert runner.speculation.accepted.sum() > 50
    assert found[1] == found[0]


@pytest.mark.parametrize("most", [3, 9, 21])
def test_a_step_of_drafts_for_which_memory_is_too_small_is_done_again(tiny_llama, most):
    """In smaller steps, down to those in which there is room for no draft; nobody is lost."""
    prompts = [[40 + i, *range(60, 80 + i)] for i in range(3)]
    params = SamplingParams(**SOME, temperature=1.0, seed=3, logprobs=1)
    sizes = {"max_batch_size": 3, "max_batched_tokens": 64}
    wanted = engine_of(tiny_llama, **sizes).generate(prompts, params)
    runner = engine_of(tiny_llama, **sizes)
    forward, refused = runner.loop.forward, []

    def limited(batch):
        if len(batch.rows) > most:  # of prompts one each is wanted
            refused.append(len(batch.rows))
            raise MemoryError
        return forward(batch)

    runner.loop.forward = limited
    drafted(runner, [tokens_of(o) for o in wanted], 0.9)
    assert [told(o) for o in runner.generate(prompts, params)] == [told(o) for o in wanted]
    runner.check_integrity()
    assert refused
    assert (runner.speculation.accepted.sum() > 0) == (most > 3)


def test_a_reference_may_be_longer_than_all_else_or_end_within_drafts(tiny_llama):
    """Its tokens are the model's, or the request is refused."""
    sizes = {"max_model_len": 128, "kv_blocks": 2, "max_batch_size": 1}
    params, prompt = SamplingParams(max_tokens=300, ignore_eos=True), [*range(20, 40)]
    (wanted,) = engine_of(tiny_llama, **sizes).generate([prompt], params)
    own = SpeculateConfig(method="ngram", depth=8)
    runner = engine_of(tiny_llama, speculate=own, **sizes)
    reference = (*prompt[-4:], *wanted.token_ids, *[7, 8, 9] * 500)
    short = (*prompt[-4:], *wanted.token_ids[:13])
    for text in (reference, short, (7,) * 2000):
        values = {"max_tokens": 300, "ignore_eos": True, "reference": text}
        (found,) = runner.generate([prompt], SamplingParams(**values))
        assert told(found) == told(wanted)
        runner.check_integrity()
    assert runner.speculation.accepted.sum() > 80
    with pytest.raises(RequestError, match="reference.*384"):
        runner.generate([prompt], SamplingParams(reference=(5, 384)))
