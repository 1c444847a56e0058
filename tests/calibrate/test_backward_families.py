"""Mixtures, latent attention and models that no family declares run backward as transformers does."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from calibrate.backward import KeptInputs, backward, fisher_root, signs
from calibrate.gradients import OUTPUT, STATES, BlockGradients
from calibrate.stream import BlockStream
from formats.modeling.layers import block_names
from tests.calibrate.test_stream import open_stream
from tests.calibrate.test_undeclared_blocks import ODD
from tests.experts import MOE
from tests.families import distance

IDS = [torch.randint(1, 384, (n,), generator=torch.Generator().manual_seed(n)) for n in (24, 31)]
KINDS = {"qwen3_moe": MOE["qwen3_moe"], "deepseek_v3": ODD["deepseek_v3"], "gpt2": ODD["gpt2"]}


def run(folder) -> tuple[list[torch.Tensor], dict[str, BlockGradients], BlockStream]:
    stream = open_stream(folder)
    found: dict[str, BlockGradients] = {}
    keep = {"size": 10**6, "inputs": KeptInputs(), "found": found.__setitem__}
    return backward(stream, IDS, **keep), found, stream


def at_first_block(folder) -> list[torch.Tensor]:
    """Gradients at the first block's inputs, by transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.requires_grad_(False)
    seen: list[torch.Tensor] = []

    def enter(_, args, kwargs):
        hidden = args[0].detach().requires_grad_()
        hidden.register_hook(lambda g: seen.append(g[0]))
        return (hidden, *args[1:]), kwargs

    first = model.get_submodule(block_names(model.config.to_dict())[0])
    first.register_forward_pre_hook(enter, with_kwargs=True)
    for ids in IDS:
        logits = model(ids[None]).logits[0]
        logits.backward(fisher_root(logits.detach().softmax(-1), signs(ids, logits.shape[1])))
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_at_the_first_block_are_those_of_transformers(make_model, kind):
    folder = make_model(kind, **KINDS[kind])
    gradients, found, stream = run(folder)
    for one, wanted in zip(gradients, at_first_block(folder), strict=True):
        assert distance(one, wanted) < 1e-4
    for block in stream.blocks:
        seen = found[block].of
        assert {name for name, role in seen if role == OUTPUT} == set(stream.linears(block))
        assert {role for _, role in seen} == {OUTPUT, STATES, "k_cache", "v_cache"}
        for of in seen.values():
            assert [len(w) for w in of.weights] == [len(ids) for ids in IDS]


def test_tokens_weigh_nothing_for_experts_that_they_do_not_come_to(make_model):
    _, found, stream = run(make_model("qwen3_moe", **MOE["qwen3_moe"]))
    routed: dict[tuple[str, int], torch.Tensor] = {}
    stream.start(IDS)
    for index, name in enumerate(stream.blocks):
        block = stream.load(index)
        for sample in range(len(IDS)):
            block.run(
                sample, on_route=lambda of, n, sample=sample: routed.__setitem__((of, sample), n)
            )
        for (experts, sample), counts in routed.items():
            if experts.startswith(f"{name}."):
                for i, count in enumerate(counts.tolist()):
                    weights = found[name].output(f"{experts}.{i}.down_proj").weights[sample]
                    assert int((weights > 0).sum()) == count
        stream.advance(block)
    assert len(routed) == len(IDS)  # the other block is dense
