"""Second moments: half of the product is all of it; and what is measured with them."""

import pytest
import torch

from formats.scheme import PRESETS
from ptq.methods.common.moments import Moments
from ptq.methods.common.rounding import round_to_nearest
from ptq.methods.gptq import GPTQ, GPTQSpec
from ptq.pipeline import measure as measuring
from ptq.pipeline.measure import measure
from ptq.pipeline.passes import observe
from tests.ptq.quantizing import make_plan, observed_work


@pytest.mark.parametrize("width", [40, 128, 200, 384, 1100])
def test_half_of_the_product_is_all_of_it(width):
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(90, width, generator=generator)
    moments = Moments({"a": "a", "b": "a"}, ["b"], full=True)
    moments.add("a", x[:50])
    first = moments.of("b")
    moments.add("a", x[50:])
    for found, seen in ((first, x[:50]), (moments.of("b"), x)):
        expected = seen.double().T @ seen.double() / len(seen)
        assert torch.allclose(found.double(), expected, atol=1e-6)
        assert torch.equal(found, found.T)


def test_moments_tell_what_all_samples_would(tiny_llama, tmp_path, monkeypatch):
    work = observed_work(make_plan(tiny_llama, tmp_path, PRESETS["w4"], methods=(GPTQSpec(),)))
    observe(work, [GPTQ(GPTQSpec())])
    layers = round_to_nearest(work)
    told = measure(work, layers)
    work.seen.moments = None
    monkeypatch.setattr(measuring, "COMPARED", len(work.block.inputs))
    ran = measure(work, layers)
    assert set(told) == set(ran) == set(work.targets)
    for name, ratios in ran.items():
        assert ratios.output is not None
        assert told[name].output == pytest.approx(ratios.output, abs=1e-3)
        assert told[name] == ratios._replace(output=told[name].output)


def test_rounded_inputs_are_measured_on_samples(tiny_llama, tmp_path):
    """Moments of the float inputs know nothing of their rounding."""
    plan = make_plan(tiny_llama, tmp_path, PRESETS["a8w8_dynamic"], methods=(GPTQSpec(),))
    work = observed_work(plan)
    observe(work, [GPTQ(GPTQSpec())])
    found = measure(work, round_to_nearest(work))
    work.seen.moments = None
    assert found == measure(work, round_to_nearest(work))
    assert all(ratios.input is not None for ratios in found.values())
