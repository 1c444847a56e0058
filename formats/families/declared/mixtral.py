"""Mixtral (Jiang et al. 2024, arXiv 2401.04088): Mistral with experts in every block."""

from formats.families.family import Family, GatedMLP, Mixture

FAMILY = Family(
    model_types=("mixtral",),
    mixture=Mixture(
        module="block_sparse_moe",
        expert=GatedMLP(gate="w1", up="w3", down="w2", merged="w13"),
        count="num_local_experts",
        normalized=True,
    ),
)
