"""A replayed run gives the bits of a whole one, and computes only what the change can reach."""

from __future__ import annotations

import pytest
import torch

from calibrate.replay import Replay
from tests.calibrate.test_stream import open_stream
from tests.experts import FORMS, MOE
from tests.ptq.quantizing import random_tokens

DENSE = {"llama": {}, "gemma2": {"head_dim": 32}, "glm": {"head_dim": 32}, "qwen2": {}}
UNDECLARED = {"gpt2": {"n_inner": 256}}  # whose blocks change hidden states in place


def load_block(folder):
    return open_stream(folder, random_tokens().sequences()[:2]).load(1)


@pytest.mark.parametrize("kind", [*DENSE, *MOE, *UNDECLARED])
def test_any_layer_may_change(make_model, kind):
    block = load_block(make_model(kind, **(DENSE | MOE | UNDECLARED)[kind]))
    generator = torch.Generator().manual_seed(0)
    for name, linear in block.linears.items():
        runs = Replay(block, [linear])
        assert torch.equal(runs.run(0), block.run(0)), name
        for _ in range(2):
            with torch.no_grad():
                linear.weight *= 1 + 0.1 * torch.randn(linear.weight.shape, generator=generator)
            for sample in range(2):
                assert torch.equal(runs.run(sample), block.run(sample)), name
    assert not any("forward" in vars(module) for module in block.module.modules())


def test_what_hooks_make_of_inputs_and_outputs_counts(make_model):
    block = load_block(make_model("llama"))
    v, o = (block.linears[f"{block.attention}.{name}"] for name in ("v_proj", "o_proj"))
    runs = Replay(block, [v, o])
    first = runs.run(0)
    handles = [
        v.register_forward_hook(lambda _, __, out: out.round(decimals=1)),
        o.register_forward_pre_hook(lambda _, args: (args[0].round(decimals=1),)),
    ]
    changed = runs.run(0)
    assert torch.equal(changed, block.run(0))
    assert not torch.equal(changed, first)
    for handle in handles:
        handle.remove()


def test_layers_before_the_changed_ones_are_not_computed_again(make_model):
    block = load_block(make_model("llama"))
    computed = []
    for name, linear in block.linears.items():
        linear.register_forward_pre_hook(lambda *_, name=name: computed.append(name))
    runs = Replay(block, [block.linears[f"{block.name}.mlp.down_proj"]])
    runs.run(0)
    assert len(computed) == 7
    computed.clear()
    runs.run(0)
    # attention as a whole is taken; hooks of gate and up still run, their products do not
    assert not any("self_attn" in name for name in computed)


def test_experts_are_replayed_up_to_the_first_that_changes(make_model):
    family = next(iter(MOE))
    block = load_block(make_model(family, **MOE[family]))
    leaf = FORMS[family][1][2]
    down = [linear for name, linear in block.linears.items() if name.endswith(f".{leaf}")]
    runs = Replay(block, down)
    for _ in range(2):
        with torch.no_grad():
            for linear in down:
                linear.weight *= 1.1
        assert torch.equal(runs.run(1), block.run(1))


def test_a_run_ends_where_the_feed_forward_layer_reads(make_model):
    block = load_block(make_model("llama"))
    norm = block.submodule(f"{block.name}.post_attention_layernorm")
    read, products = [], []
    norm.register_forward_pre_hook(lambda _, args: read.append(args[0][0].clone()))
    block.linears[f"{block.name}.mlp.up_proj"].register_forward_hook(lambda *_: products.append(1))
    runs = Replay(block, [block.linears[f"{block.attention}.o_proj"]], norm)
    assert torch.equal(runs.run(0), read[0])
    assert torch.equal(runs.run(0), read[0])
    assert not products
    before = Replay(block, [block.linears[f"{block.name}.mlp.up_proj"]], norm)
    assert torch.equal(before.run(0), block.run(0))  # the norm came before: there is nothing to end
    assert torch.equal(before.run(0), block.run(0))


def test_a_cache_counts_as_a_changed_module(make_model):
    block = load_block(make_model("llama"))
    runs = Replay(block, ())

    def rounded(k, v):
        return k.round(decimals=1), v

    assert torch.equal(runs.run(0, lambda k, v: (k, v)), block.run(0))
    changed = runs.run(0, rounded)
    assert torch.equal(changed, block.run(0, cache=rounded))
    assert not torch.equal(changed, block.run(0))
