"""Networks that draft on a GPU, interpreted: they draft what they draft on a CPU."""

import pytest
import torch

from inference.config import SpeculateConfig
from inference.requests.request import SamplingParams
from tests.inference.gpu.test_gpu import checkpoint_of, engine_of, prompt
from tests.inference.speculate.methods.test_eagle import Reference
from tests.inference.speculate.predicting import KINDS, with_layer
from tests.inference.speculate.predicting import Reference as PredictingReference
from tests.inference.speculate.requests import spied
from tests.kernels.triton_lab import interpreted

PROMPTS = [prompt(n, n) for n in (3, 58, 60)]


def drafting(path: str, method: str, network: str | None, *, triton: bool = True, **config):
    own = SpeculateConfig(method=method, path=network, depth=3)
    return engine_of(path, triton=triton, speculate=own, **config)


@interpreted
def test_a_model_that_drafts_for_itself_is_right(tmp_path):
    """Greedy and sampled; prompts that are found, cut and computed again. Where its logits are not
    finite it drafts nothing, and goes on as before when they are."""
    path = checkpoint_of(tmp_path, "a8w8c8")
    params = [
        SamplingParams(max_tokens=9, ignore_eos=True, temperature=0.8 * (i > 1), seed=i)
        for i in range(3)
    ]
    wanted = engine_of(path).generate(PROMPTS, params)
    runner = drafting(path, "draft", path, max_batched_tokens=48, kv_blocks=3)
    for _ in range(2):
        found = runner.generate(PROMPTS, params)
        assert [o.token_ids for o in found] == [o.token_ids for o in wanted]
    own = runner.speculation
    proposed = own.proposed.sum()
    assert own.accepted.sum() > 0.95 * proposed > 20
    runner.check_integrity()
    network = own.proposer._chain._network
    forward = network._forward
    network._forward = lambda batch: forward(batch).fill_(torch.nan)
    assert runner.generate(PROMPTS[:1], params[:1])[0].token_ids == wanted[0].token_ids
    assert own.proposed.sum() == proposed
    network._forward = forward
    runner.generate(PROMPTS[:1], params[:1])
    assert own.accepted.sum() > 0.9 * own.proposed.sum() > 0.9 * proposed + 4


@pytest.mark.parametrize("family", KINDS)
@interpreted
def test_a_predicting_layer_drafts_what_it_does_on_a_cpu(make_model, tmp_path, family):
    """Mixtures of experts the first two, of latent attention the first; the last reads no norm.

    Of a prompt and its first answers: experts are slow where they are interpreted.
    """
    plain = make_model(family, **KINDS[family])
    path = str(with_layer(plain, tmp_path / "model", PredictingReference(plain).tensors))
    params, told = SamplingParams(max_tokens=5, ignore_eos=True), []
    for triton in (True, False):
        runner = drafting(path, "mtp", None, triton=triton)
        seen = spied(runner)
        told.append([o.token_ids for o in runner.generate(PROMPTS[:1], params)])
        told.append(seen)
    assert told[0] == told[2]
    assert told[1] == told[3]
    assert sum(len(drafts) for _, drafts in told[1]) > 4


@interpreted
def test_a_head_drafts_what_it_does_on_a_cpu(tmp_path):
    """After prompts, after answers, and after a sequence gave way."""
    path, head = checkpoint_of(tmp_path, "float", num_hidden_layers=2), tmp_path / "head"
    Reference(path, head)
    params, drafts = SamplingParams(max_tokens=9, ignore_eos=True), []
    wanted = engine_of(path).generate(PROMPTS, params)
    for triton in (True, False):
        runner = drafting(path, "eagle", str(head), triton=triton, max_batch_size=3, kv_blocks=3)
        seen = spied(runner)
        found = runner.generate(PROMPTS, params)
        if triton:
            assert [o.token_ids for o in found] == [o.token_ids for o in wanted]
            assert runner.stats().preemptions > 0, runner.stats()
        drafts.append({tuple(text): tuple(own) for text, own in seen})
    both = drafts[0].keys() & drafts[1].keys()
    same = [drafts[0][text] == drafts[1][text] for text in both]
    assert sum(same) > 0.9 * len(same) > 9, (sum(same), len(same), [len(d) for d in drafts])
