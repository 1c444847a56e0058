"""Classes that compute attention in their modules give the same logits through the interface."""

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from calibrate.attention import ATTENTION
from formats.modeling.adapters import adapted_model, alibi_slopes
from formats.modeling.layers import structure_of
from tests.older_families import OLDER


@pytest.mark.parametrize("name", OLDER)
def test_logits_are_those_of_the_class(name):
    config = AutoConfig.for_model(**OLDER[name])
    ids = torch.randint(1, 384, (1, 50), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config)).eval()
    adapted = adapted_model(copy.deepcopy(config), ATTENTION)
    if adapted is None:  # the class calls the interface itself
        assert name in ("gpt2", "opt", "gpt_neox", "starcoder2")
        return
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3) if parameter.dim() > 1 else parameter.add_(0.1)
        adapted.eval().load_state_dict(model.state_dict())
        wanted = model(ids, use_cache=False).logits
        found = adapted(ids, position_ids=torch.arange(50)[None], use_cache=False).logits
    assert (found - wanted).norm() < 1e-5 * wanted.norm()


@pytest.mark.parametrize(
    ("name", "heads", "argument", "window"),
    [
        ("bloom", 4, ("alibi",), None),
        ("falcon_alibi", 1, ("alibi",), None),
        ("falcon", 2, (), None),
        ("gpt_neo", 4, (), 16),
    ],
)
def test_what_reaches_attention_is_found(name, heads, argument, window):
    """Heads of K are those that the model has, not those that its code repeats."""
    site = structure_of(OLDER[name]).blocks[1].attention
    assert (site.kv_heads, site.arguments, site.window) == (heads, argument, window)


def test_slopes_are_those_of_the_paper():
    assert torch.equal(alibi_slopes(8, "cpu"), 2.0 ** -torch.arange(1.0, 9.0))
    wanted = [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]
    assert alibi_slopes(6, "cpu").tolist() == wanted
