"""What the tests of mixtures of experts share: tiny models of each family, and other forms of them."""

import re
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from formats.families.registry import find_family
from formats.modeling.experts import split_experts
from tests.ptq.quantizing import edit_model

SIZES = {"num_experts_per_tok": 2, "moe_intermediate_size": 128}
MOE = {  # overrides of `make_model` by family; one has a dense block, two normalize
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 128},
    "qwen2_moe": {"num_experts": 4, "shared_expert_intermediate_size": 256} | SIZES,
    "qwen3_moe": {"num_experts": 8, "norm_topk_prob": True, "mlp_only_layers": [1]} | SIZES,
}
FORMS = {  # an expert's layers in the order gate, up, down
    "mixtral": ("block_sparse_moe", ("w1", "w3", "w2")),
    "qwen2_moe": ("mlp", ("gate_proj", "up_proj", "down_proj")),
    "qwen3_moe": ("mlp", ("gate_proj", "up_proj", "down_proj")),
}


def stack_experts(source: Path, target: Path, family: str) -> Path:
    """The same model with its experts in 3-D parameters, named as transformers does in memory."""
    layer, (gate, up, down) = FORMS[family]

    def change(tensors: dict[str, torch.Tensor]) -> None:
        moes = {m[0] for name in tensors if (m := re.match(rf".*\.{layer}(?=\.experts\.)", name))}
        for moe in moes:
            count = sum(
                re.match(rf"{moe}\.experts\.\d+\.{up}\.", name) is not None for name in tensors
            )
            parts = {
                leaf: [tensors.pop(f"{moe}.experts.{i}.{leaf}.weight") for i in range(count)]
                for leaf in (gate, up, down)
            }
            experts = f"{moe.removesuffix(layer)}mlp.experts"
            both = [torch.cat(pair) for pair in zip(parts[gate], parts[up], strict=True)]
            tensors[f"{experts}.gate_up_proj"] = torch.stack(both)
            tensors[f"{experts}.down_proj"] = torch.stack(parts[down])
            router = tensors.pop(f"{moe}.gate.weight")
            tensors[f"{moe.removesuffix(layer)}mlp.gate.weight"] = router

    return edit_model(source, target, change)


def split_model(folder: Path, state: dict[str, torch.Tensor]) -> torch.nn.Module:
    """transformers' model in fp32 with experts as linear layers, and these tensors, by their names."""
    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(config)
    mixture = find_family(config.to_dict()).mixture
    for block in model.model.layers:
        split_experts(block, mixture)
    state = {name: tensor.float() for name, tensor in state.items()}
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, assign=True)
    return model.eval()
