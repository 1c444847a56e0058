"""What a name alone tells of a module or tensor."""

from __future__ import annotations

from formats.families.names import (
    any_expert,
    block_of,
    by_block,
    expert_of,
    is_projection,
    is_router,
    is_shared_expert,
    split_name,
)


def test_names_tell_projections_from_routers():
    block = "model.layers.3"
    for name in ("block_sparse_moe.experts.7.w2", "mlp.experts.11.up_proj", "mlp.gate_proj"):
        assert is_projection(f"{block}.{name}")
        assert not is_router(f"{block}.{name}")
    for name in ("block_sparse_moe.gate", "mlp.gate", "mlp.shared_expert_gate"):
        assert is_router(f"{block}.{name}")
        assert not is_projection(f"{block}.{name}")


def test_names_tell_block_and_expert():
    name = "model.layers.12.mlp.experts.7.up_proj"
    assert (block_of(name), expert_of(name)) == ("model.layers.12", 7)
    assert split_name(name) == ("12", "mlp.experts.7", "up_proj")
    assert split_name("model.layers.3.input_layernorm") == ("3", "", "input_layernorm")
    assert any_expert(name) == "model.layers.12.mlp.experts.*.up_proj"
    assert (block_of("lm_head.weight"), split_name("lm_head")) == (None, None)
    shared = "model.layers.0.mlp.shared_expert.up_proj"
    assert (expert_of(shared), is_shared_expert(shared)) == (None, True)
    assert by_block([name, "lm_head"]) == {"model.layers.12": [name], "": ["lm_head"]}
