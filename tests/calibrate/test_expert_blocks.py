"""Experts as linear layers: the function is transformers', and every layer sees every token."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from calibrate.statistics import Statistics
from tests.calibrate.test_stream import open_stream, samples
from tests.experts import FORMS, MOE


@pytest.mark.parametrize("family", MOE)
def test_blocks_and_routing_are_those_of_transformers(make_model, family):
    """Observed or not; and what is told of the routing is what transformers' routers chose."""
    folder, sequences = make_model(family, **MOE[family]), samples(2)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).model
    outputs, chosen = [], {}
    for i, layer in enumerate(model.layers):
        layer.register_forward_hook(lambda _, __, out: outputs.append(out.flatten(0, -2)))
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.register_forward_hook(
                lambda _, __, out, i=i: chosen.setdefault(i, []).append(out[2])
            )
    with torch.no_grad():
        for ids in sequences:
            model(ids[None])
    stream = open_stream(folder, sequences)
    for index in range(2):
        block, told = stream.load(index), []
        for sample in range(2):
            want = outputs[2 * sample + index]
            torch.testing.assert_close(block.run(sample), want, atol=1e-5, rtol=1e-5)
            seen = block.run(
                sample,
                on_input=lambda name, x: None,
                on_route=lambda name, counts, told=told: told.append((name, counts)),
            )
            torch.testing.assert_close(seen, want, atol=1e-5, rtol=1e-5)
        layer = FORMS[family][0]
        assert [name for name, _ in told] == [f"{block.name}.{layer}.experts"] * (
            2 * (index in chosen)
        )
        for (_, counts), experts in zip(told, chosen.get(index, []), strict=True):
            assert counts.tolist() == [int((experts == e).sum()) for e in range(len(counts))]
        stream.advance(block)


@pytest.mark.parametrize("family", MOE)
def test_every_layer_of_every_expert_sees_every_token(make_model, family):
    folder, (ids,) = make_model(family, **MOE[family]), samples(1)
    block, seen = open_stream(folder, [ids]).load(0), {}
    block.run(0, on_input=seen.__setitem__)
    layer, (gate, up, down) = FORMS[family]
    experts = f"{block.name}.{layer}.experts"
    assert {len(x) for x in seen.values()} == {len(ids)}
    assert set(seen) == set(block.linears)
    assert sum(name.startswith(experts) for name in seen) == 3 * (8 if family == "qwen3_moe" else 4)
    x = seen[f"{experts}.0.{gate}"]
    for i in (0, 3):
        assert torch.equal(seen[f"{experts}.{i}.{up}"], x)
        weights = [block.linears[f"{experts}.{i}.{leaf}"].weight for leaf in (gate, up)]
        a, b = (x @ w.T for w in weights)
        want = torch.nn.functional.silu(a) * b
        torch.testing.assert_close(seen[f"{experts}.{i}.{down}"], want, atol=1e-5, rtol=1e-5)


def test_unobserved_experts_compute_chosen_tokens_only(make_model):
    folder, (ids,) = make_model("mixtral", **MOE["mixtral"]), samples(1)
    block, rows = open_stream(folder, [ids]).load(0), []
    for name, linear in block.linears.items():
        if name.endswith("w2"):
            linear.register_forward_hook(lambda _, x, __: rows.append(len(x[0])))
    block.run(0, on_input=lambda name, x: None)
    assert rows == [len(ids)] * 4
    rows.clear()
    block.forward(block.inputs[0], 0)
    assert sum(rows) == 2 * len(ids)


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
def test_statistics_do_not_depend_on_order_or_batches(make_model, family):
    folder, sequences = make_model(family, **MOE[family]), samples(4)

    def collect(parts: list[torch.Tensor]) -> Statistics:
        stream, statistics = open_stream(folder, parts), Statistics()
        for index in range(2):
            block = stream.load(index)
            outputs = block.outputs(on_input=lambda name, x: statistics.observe(name, "input", x))
            stream.advance(block, outputs)
        return statistics

    whole, merged = collect(sequences), Statistics()
    assert len(whole) > 2 * (4 + 4 * 3 - 1)
    assert collect(sequences[::-1]) == whole
    for part in (sequences[2:], sequences[:2]):
        merged.merge(collect(part))
    assert merged == whole
