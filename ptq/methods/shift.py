"""Shift: centres the channels of V, so that a symmetric scale spends nothing on one side of zero.

Wei et al., "Outlier Suppression+: Accurate quantization of large language models by equivalent and
effective shifting and scaling", EMNLP 2023 (arXiv 2304.09145), section 4.1:

    z_j = (max X_j + min X_j) / 2,     W (X - z) + (b + W z) = W X + b                   (Eq. 3, 4)

Here X is V. Attention weights sum to 1, so attention over V - z gives its output less z: z goes
into v_proj's bias and W z into o_proj's, and both the cached V and the input of o_proj are centred.
A KV channel is shared by the query heads of its group. Half of a range is never more than the
largest magnitude in it: no scale becomes coarser, and there is nothing to search. Where the cache
scales each token, what counts is its size, not the largest of all tokens, and z is the mean.

Attention with sinks (gpt-oss) gives a part of its weight to no value: its weights sum to less than
1, and it is left alone. Both projections need a bias. Families whose configuration knows
`attention_bias` get one (`ptq.methods.common.float_model`); where there can be none, the block is
left alone and an event says so. The inputs of q, k, v, gate, up and down cannot be shifted: RMSNorm
has no bias to take z, and up's output is multiplied before down reads it.

v_proj's bias is stored in the checkpoint's type. The shift that counts is therefore what rounding
made of it, and o_proj's bias follows that one: its own rounding is all that is lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from formats.families.block_layers import role_of
from formats.families.family import LatentAttention
from formats.families.registry import find_family
from formats.namespace import later
from formats.scheme import LayerScheme, Scheme
from ptq.methods.common.block import BlockWork
from ptq.methods.common.float_model import BiasedCheckpoint, FloatModel
from ptq.methods.common.folding import source_channel
from ptq.methods.common.method import Method
from ptq.methods.common.spec import MethodSpec, PlannedLayer, Stage

if TYPE_CHECKING:
    from torch import Tensor

    from formats.families.family import Family
with later():
    import torch
    import torch.nn.functional as functional


class ShiftSpec(MethodSpec):
    """Shift: centres each channel of V, and with it the cached V and the input of o_proj.

    YAML: ``shift: {}``

    Families with `attention_bias` (llama, qwen3) get biases in attention for it. With a `gain`
    above 1 none are added: a model whose v and o have no biases is left as it is.
    """

    stage: ClassVar = Stage.SHIFT
    needs_declaration: ClassVar[bool] = True
    fits_cache_alone: ClassVar[bool] = True
    unmovable: ClassVar = "the method shift centred its values, which is in the biases of o_proj"
    name: Literal["shift"] = "shift"
    gain: Annotated[float, Field(ge=1.0, allow_inf_nan=False)] = 1.0
    """Least factor by which the sum of the channels' largest magnitudes must shrink in a block."""

    def misfit(self, scheme: Scheme, layers: Sequence[LayerScheme]) -> str | None:
        """It needs a quantized input or a quantized cache."""
        if scheme.kv_cache or any(layer.activations for layer in layers):
            return None
        return (
            f"found shift, but the scheme {scheme.wac} leaves activations and the cache in "
            "floating point; remove it or quantize one of them"
        )

    def knows(self, family: Family | None) -> bool:
        """With a gain, what is not declared is left alone."""
        return family is not None or self.gain > 1

    def idle(self, model: FloatModel) -> str | None:
        """With a gain, what it cannot centre without further biases, or at all."""
        if self.gain == 1:
            return None
        family = find_family(model.config)
        if family is None:
            return "nothing declares which layers make V and read it"
        if isinstance(family.attention, LatentAttention) or family.attention.sinks is not None:
            return "attention has no V of its own, or weights that sum to less than 1"
        biased = {name.split(".")[-2] for name in model.names() if name.endswith(".bias")}
        bare = [n for n in (family.attention.v, family.attention.o) if n not in biased]
        return f"there is no bias of {' and '.join(bare)}" if bare else None

    def view(self, model: FloatModel) -> FloatModel:
        """The model with biases to fold shifts into, where its family can have them."""
        return model if self.gain > 1 else BiasedCheckpoint(model)

    def algorithm(self) -> Shift:
        """Centres V of a block."""
        return Shift(self)

    def explain(self, layer: PlannedLayer) -> Iterator[str]:
        """The projections whose biases take the shift."""
        if role_of(layer.name) in ("v", "o"):
            yield "shift: its bias takes what centres V, where it has one"


class Shift(Method):
    """Centres V in every block whose v_proj and o_proj have biases; see the module's docstring."""

    folds = True
    keeps = "factors"

    def __init__(self, spec: ShiftSpec) -> None:
        self.spec = spec
        self.value, self.output = "", ""
        self._weight: Tensor | None = None
        self._bias: Tensor | None = None
        self._seen: dict[int, tuple[Tensor, ...]] = {}  # of each sample
        self.z: Tensor | None = None

    def prepare(self, work: BlockWork) -> None:
        """Find the two layers; where one has no bias, say so."""
        self._seen, self._weight, self._bias, self.z = {}, None, None, None
        self.value = self.output = ""
        names = work.block.declared.attention
        if isinstance(names, LatentAttention):
            message = "not shifted: heads of latent attention share one latent in the place of V"
            work.report(work.block.attended, "smoothing_skipped", message)
            return
        self.value = f"{work.block.attention}.{names.v}"
        self.output = f"{work.block.attention}.{names.o}"
        if names.sinks is not None:
            message = "not shifted: attention's sinks take a part of its weights, which sum to less"
            work.report(self.value, "smoothing_skipped", f"{message} than 1")
            return
        bare = [n for n in (self.value, self.output) if work.block.linears[n].bias is None]
        if bare:
            leaves = " and ".join(name.rpartition(".")[2] for name in bare)
            message = f"not shifted: {leaves} of this family cannot have a bias"
            work.report(self.value, "smoothing_skipped", message)
            return
        self._weight = work.block.linears[self.value].weight
        self._bias = work.block.linears[self.value].bias

    def observe(self, name: str, x: Tensor, sample: int) -> None:
        """Keep the least and the largest value of each channel of V, their sum and their number."""
        if name != self.value or self._weight is None or self._bias is None:
            return
        weight, bias = self._weight.to(x.device), self._bias.to(x.device)
        v = functional.linear(x, weight, bias)
        seen = (*v.aminmax(dim=0), v.sum(dim=0, dtype=torch.float64), torch.tensor(len(v)))
        self._seen[sample] = tuple(each.to(self._bias.device) for each in seen)

    def solve(self, work: BlockWork) -> None:
        """Equation 3, as v_proj's bias can hold it: z [kv heads * D] fp64."""
        if not self._seen or self._bias is None:
            return
        seen, cache = (self._seen[i] for i in sorted(self._seen)), work.scheme.kv_cache
        lows, highs, sums, counts = (torch.stack(each) for each in zip(*seen, strict=True))
        low, high = lows.amin(dim=0).double(), highs.amax(dim=0).double()
        by_token = cache is not None and cache.dynamic
        z = sums.sum(dim=0) / counts.sum() if by_token else (high + low) / 2
        plain, centred = (torch.maximum(high - c, c - low).sum() for c in (0 * z, z))
        if plain < self.spec.gain * centred:
            return
        bias = self._bias.double()
        stored = (bias - z).to(work.dtype_of(f"{self.value}.bias"))
        self.z = bias - stored.double()

    def found(self) -> dict[str, Tensor]:
        """z [kv heads * D] fp64, by the name of v_proj; nothing where it was left alone."""
        return {} if self.z is None else {self.value: self.z}

    def recall(self, work: BlockWork, found: Mapping[str, Tensor]) -> None:
        """Take z, if V was centred."""
        z = found.get(self.value)
        self.z = None if z is None else z.to(work.block.device)

    def commit(self, work: BlockWork) -> None:
        """Equation 4: take z from v_proj's bias and add what o_proj makes of it to its own."""
        if self.z is None:
            return
        value, output = work.block.linears[self.value], work.block.linears[self.output]
        channel = source_channel(len(self.z), output.in_features, work.settings.head_dim)
        moved = output.weight.double() @ self.z[channel.to(self.z.device)]  # [hidden]
        work.store(f"{self.value}.bias", value.bias.double() - self.z)
        work.store(f"{self.output}.bias", output.bias.double() + moved)
        self.z = None
