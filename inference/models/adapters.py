"""Adapters as a decoder runs them: what each adds to the layers that run as one, or to its cache.

    y = W x + B (A x)          LoRA, Hu et al. 2021, arXiv 2106.09685, Eq. 3

q, k and v read the same input and are one layer here, as gate and up are: an adapter has a part for
each of those that it changes. The channels of q and k lie as rotation wants them
(`inference.models.parts`), and so do the rows of their B, and the keys that an adapter of
prefix tuning gives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from torch import Tensor

from formats.adapters import Lora, LoraWeights
from formats.adapters.prefix import Prefix
from formats.errors import CheckpointError, EngineError
from formats.families.family import LatentAttention
from inference.models.config import ModelConfig
from inference.models.decoder import Decoder
from inference.models.layers import GatedMLP, L, X
from inference.models.parts import Layer, held_rows

AdaptedLayer = Literal["qkv", "o", "gate_up", "down"]
ADAPTED: tuple[AdaptedLayer, ...] = ("qkv", "o", "gate_up", "down")  # of each block, in this order
ROW_PARALLEL: tuple[AdaptedLayer, ...] = ("o", "down")  # whose inputs several ranks have parts of


@dataclass(frozen=True)
class AdapterPart:
    """What an adapter adds to one of the layers that run as one.

    Attributes:
        a: fp32 [r, K].
        b: fp32 [n, r], its factor multiplied in.
    """

    index: int
    a: Tensor
    b: Tensor


AdapterParts = Mapping[tuple[int, AdaptedLayer], Sequence[AdapterPart]]  # by block and layer


class AdapterStore(Protocol):
    """The adapters of a model on a device, by slot."""

    def put(self, slot: int, parts: AdapterParts) -> None:
        """Hold an adapter in a slot, in the place of what was there.

        Raises:
            EngineError: the device's memory is too small.
        """
        ...


def check_adaptable(model: Any) -> Decoder[Any, Any]:
    """The decoder of a model that adapters may run with.

    Raises:
        EngineError: it is run by other code, or has attention that they are not run with.
    """
    if not isinstance(model, Decoder):
        raise EngineError(
            "adapters run with models of declared families (`ptq families`), and this one runs by "
            "transformers' own code. Merge the adapter instead: `ptq quantize MODEL --adapter "
            "FOLDER`"
        )
    if isinstance(model.config.family.attention, LatentAttention):
        raise EngineError(
            "adapters do not run with latent attention here. Merge the adapter instead: `ptq "
            "quantize MODEL --adapter FOLDER`"
        )
    return model


def lay_out(model: Decoder[Any, Any], blocks: Sequence[str], lora: Lora) -> AdapterParts:
    """An adapter's parts by the layers that they are added to.

    Args:
        blocks: Full names of its blocks.

    Raises:
        CheckpointError: it changes layers that adapters are not run with.
    """
    left, found = dict(lora.modules), dict[tuple[int, AdaptedLayer], Sequence[AdapterPart]]()
    for i, block in enumerate(blocks):
        dense = isinstance(model.layers[i].feed_forward, GatedMLP)
        for layer, modules in modules_of(model.config, block, dense=dense).items():
            own = [(j, left.pop(name)) for j, name in enumerate(modules) if name in left]
            if own:
                turned = layer == "qkv"
                found[i, layer] = [_part(model.config, j, w, turned=turned) for j, w in own]
    if left:
        raise CheckpointError(
            f"{lora.path}: found an adapter of {next(iter(left))}; run are those of attention's "
            "projections and of dense feed-forward layers. Merge it instead: `ptq quantize MODEL "
            "--adapter FOLDER`"
        )
    return found


def number_of(block: int, layer: AdaptedLayer) -> int:
    """A layer's number among the `ADAPTED` ones of one block after another."""
    return block * len(ADAPTED) + ADAPTED.index(layer)


def linear_of(block: Layer[L, X], layer: AdaptedLayer) -> L:
    """A layer of a block, whose feed-forward layer is dense where one of that is asked for."""
    if layer == "qkv" or layer == "o":
        return block.qkv if layer == "qkv" else block.o
    own = block.feed_forward
    assert isinstance(own, GatedMLP)
    return own.gate_up if layer == "gate_up" else own.down


def outputs_of(config: ModelConfig, layer: AdaptedLayer, outputs: int) -> tuple[int, ...]:
    """Outputs of each of the layers that run as one.

    Args:
        outputs: Of one of them; those of qkv are known.
    """
    if layer == "qkv":
        return tuple(heads * config.head_dim for heads in (config.heads, *[config.kv_heads] * 2))
    return (outputs, outputs) if layer == "gate_up" else (outputs,)


def modules_of(
    config: ModelConfig, block: str, *, dense: bool
) -> dict[AdaptedLayer, tuple[str, ...]]:
    """Full names of the layers of a block that run as one.

    Args:
        block: Full name of the block.
        dense: Whether its feed-forward layer is no mixture.
    """
    names, mlp = config.family.attention, config.family.feed_forward
    assert not isinstance(names, LatentAttention)
    attention = f"{block}.{names.module}"
    found: dict[AdaptedLayer, tuple[str, ...]] = {
        "qkv": tuple(f"{attention}.{part}" for part in names.qkv),
        "o": (f"{attention}.{names.o}",),
    }
    if dense:
        found["gate_up"] = tuple(f"{block}.mlp.{part}" for part in mlp.gate_up)
        found["down"] = (f"{block}.mlp.{mlp.down}",)
    return found


def _part(config: ModelConfig, index: int, own: LoraWeights, *, turned: bool) -> AdapterPart:
    """A part; rows of q and k in the order in which they run."""
    b = held_rows(own.b, config.channels) if turned and index < 2 else own.b
    return AdapterPart(index, own.a.contiguous(), b.contiguous())


class CachedTokens(NamedTuple):
    """K and V of tokens that stand one after another, as `kernels.ops.write_kv` takes them.

    Attributes:
        keys: fp32 [blocks, T, Hkv, D], rotated.
        values: fp32 [blocks, T, Hkv, D].
        start: Position of the first token.
        slots: Of each token, block * 64 + offset.
    """

    keys: Tensor
    values: Tensor
    start: int
    slots: Sequence[int]


class CachedPrefix:
    """A prefix for a decoder: channels of K in the order in which rotation wants them."""

    def __init__(self, config: ModelConfig, prefix: Prefix) -> None:
        heads = (-1, config.head_dim)
        keys, self._values = prefix.keys.unflatten(2, heads), prefix.values.unflatten(2, heads)
        order = config.channels
        self._keys = keys if order is None else keys[..., list(order)].contiguous()

    def __len__(self) -> int:
        return self._keys.shape[1]

    def tokens(self, start: int, slots: Sequence[int]) -> CachedTokens:
        """As many of its tokens as there are slots, from `start` on."""
        own = slice(start, start + len(slots))
        return CachedTokens(self._keys[:, own], self._values[:, own], start, slots)
