"""Whether a checkpoint's tensors have the shapes that its config.json describes.

Kernels multiply what they are given: a head too many would be read from after a tensor's end.
"""

from __future__ import annotations

from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError
from formats.families.attention import LatentAttention
from formats.families.names import EMBEDDING, FINAL_NORM, HEAD, role_of, split_name
from formats.families.sizes import LatentSizes
from inference.models.config import ModelConfig

Shape = tuple[int, ...]


def check_shapes(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Compare the shapes of a decoder's weights, norms and biases with its configuration.

    Raises:
        CheckpointError: one differs; it is named. Missing tensors are named by who reads them.
    """
    names = (name.rpartition(".") for name in checkpoint.names())
    for module in sorted({m for m, _, leaf in names if leaf in ("weight", "weight_packed")}):
        found = checkpoint.weight_shape(module)
        wanted = _wanted(checkpoint, config, module)
        if wanted is not None and found != wanted:
            raise _mismatch(f"{module}.weight", found, wanted)
        bias = f"{module}.bias"
        if bias in checkpoint and checkpoint.shape(bias) != found[:1]:
            raise _mismatch(bias, checkpoint.shape(bias), found[:1])


def _wanted(checkpoint: Checkpoint, config: ModelConfig, module: str) -> Shape | None:
    """Shape of a module's weight; None where the configuration does not say it."""
    hidden, queries = config.hidden_size, config.heads * config.head_dim
    keys = config.kv_heads * config.head_dim
    if module in (EMBEDDING, HEAD):
        return config.vocab_size, hidden
    if module == FINAL_NORM:
        return (hidden,)
    parts = split_name(module)
    if parts is None:
        return None
    attention, norms = config.family.attention, config.family.norms
    leaf = parts[2]
    if leaf in (*norms.before, *norms.after):
        return (hidden,)
    if isinstance(attention, LatentAttention):
        assert config.latent is not None
        own = _of_latent(attention, config.latent, hidden).get(leaf)
        return own or _of_feed_forward(checkpoint, config, module)
    if leaf in (attention.q_norm, attention.k_norm) and config.qk_norm != "none":
        whole = queries if leaf == attention.q_norm else keys
        return (config.head_dim if config.qk_norm == "head" else whole,)
    rows = {"q": queries, "k": keys, "v": keys}
    match role_of(module):
        case "q" | "k" | "v" as role:
            return rows[role], hidden
        case "o":
            return hidden, queries
    return _of_feed_forward(checkpoint, config, module)


def _of_latent(names: LatentAttention, sizes: LatentSizes, hidden: int) -> dict[str, Shape]:
    """Shapes of the weights of latent attention, by the names of its parts."""
    queries, rank = sizes.heads * (sizes.plain + sizes.rotated), sizes.query_rank or 0
    return {
        names.q: (queries, hidden),
        names.q_a: (rank, hidden),
        names.q_norm: (rank,),
        names.q_b: (queries, rank),
        names.kv_a: (sizes.rank + sizes.rotated, hidden),
        names.kv_norm: (sizes.rank,),
        names.kv_b: (sizes.heads * (sizes.plain + sizes.value), sizes.rank),
        names.o: (hidden, sizes.heads * sizes.value),
    }


def _of_feed_forward(checkpoint: Checkpoint, config: ModelConfig, module: str) -> Shape | None:
    match role_of(module):
        case "gate" | "up":
            return *checkpoint.weight_shape(module)[:1], config.hidden_size
        case "down":
            return config.hidden_size, *_gate_rows(checkpoint, config, module)
    return None


def _gate_rows(checkpoint: Checkpoint, config: ModelConfig, down: str) -> Shape:
    """Outputs of the gate and up projections whose product a down projection reads."""
    parent, _, leaf = down.rpartition(".")
    kind = next(kind for kind in config.family.feed_forwards if kind.down == leaf)
    gate, up = (checkpoint.weight_shape(f"{parent}.{name}") for name in kind.gate_up)
    if gate != up:
        raise _mismatch(f"{parent}.{kind.up}.weight", up, gate)
    return gate[:1]


def _mismatch(name: str, found: Shape, wanted: Shape) -> CheckpointError:
    return CheckpointError(
        f"{name} has shape {list(found)}; by config.json it is {list(wanted)}. The checkpoint and "
        "its config.json do not belong together; copy both again"
    )
