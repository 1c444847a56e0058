"""Shift: centres the channels of V, so that a symmetric scale spends nothing on one side of zero.

Wei et al., "Outlier Suppression+: Accurate quantization of large language models by equivalent and
effective shifting and scaling", EMNLP 2023 (arXiv 2304.09145), section 4.1:

    z_j = (max X_j + min X_j) / 2,     W (X - z) + (b + W z) = W X + b                   (Eq. 3, 4)

Here X is V. Attention weights sum to 1, so attention over V - z gives its output less z: z goes
into v_proj's bias and W z into o_proj's, and both the cached V and the input of o_proj are centred.
A KV channel is shared by the query heads of its group. Half of a range is never more than the
largest magnitude in it: no scale becomes coarser, and there is nothing to search.

Both projections need a bias. Families whose configuration knows `attention_bias` get one
(`ptq.methods.biased`); where there can be none, the block is left alone and an event says so. The
inputs of q, k, v, gate, up and down cannot be shifted: RMSNorm has no bias to take z, and up's
output is multiplied before down reads it.

v_proj's bias is stored in the checkpoint's type. The shift that counts is therefore what rounding
made of it, and o_proj's bias follows that one: its own rounding is all that is lost.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ptq.methods.base import BlockWork, Method, set_parameter
from ptq.methods.migration import source_channel
from ptq.methods.specs import ShiftSpec
from ptq.result import Event


class Shift(Method):
    """Centres V in every block whose v_proj and o_proj have biases; see the module's docstring."""

    folds = True

    def __init__(self, spec: ShiftSpec) -> None:
        self.spec = spec
        self.value, self.output = "", ""
        self._weight: Tensor | None = None
        self._bias: Tensor | None = None
        self._low: Tensor | None = None
        self._high: Tensor | None = None
        self.z: Tensor | None = None

    def prepare(self, work: BlockWork) -> None:
        """Find the two layers; where one has no bias, say so."""
        self.value = f"{work.block.attention}.v_proj"
        self.output = f"{work.block.attention}.o_proj"
        self._weight = self._bias = self._low = self._high = self.z = None
        bare = [n for n in (self.value, self.output) if work.block.linears[n].bias is None]
        if bare:
            names = " and ".join(name.rpartition(".")[2] for name in bare)
            message = f"not shifted: {names} of this family cannot have a bias"
            work.events.append(Event(module=self.value, kind="smoothing_skipped", message=message))
            return
        self._weight = work.block.linears[self.value].weight
        self._bias = work.block.linears[self.value].bias

    def observe(self, name: str, x: Tensor) -> None:
        """Keep the least and the largest value of each channel of V."""
        if name != self.value or self._weight is None:
            return
        low, high = F.linear(x, self._weight, self._bias).aminmax(dim=0)
        self._low = low if self._low is None else torch.minimum(self._low, low)
        self._high = high if self._high is None else torch.maximum(self._high, high)

    def solve(self, work: BlockWork) -> None:
        """Equation 3, as v_proj's bias can hold it: z [kv heads * D] fp64."""
        if self._low is None or self._high is None or self._bias is None:
            return
        bias, z = self._bias.double(), (self._high.double() + self._low.double()) / 2
        stored = (bias - z).to(work.dtype_of(f"{self.value}.bias"))
        self.z = bias - stored.double()

    def commit(self, work: BlockWork) -> None:
        """Equation 4: take z from v_proj's bias and add what o_proj makes of it to its own."""
        if self.z is None:
            return
        value, output = work.block.linears[self.value], work.block.linears[self.output]
        channel = source_channel(len(self.z), output.in_features, work.head_dim)
        moved = output.weight.double() @ self.z[channel.to(self.z.device)]  # [hidden]
        _store(work, self.value, value.bias.double() - self.z)
        _store(work, self.output, output.bias.double() + moved)
        self.z = None


def _store(work: BlockWork, name: str, bias: Tensor) -> None:
    """Give a layer a new bias, rounded to the checkpoint's type."""
    stored = bias.to(work.dtype_of(f"{name}.bias"))
    set_parameter(work.block.linears[name], "bias", stored.float())
    work.folded[f"{name}.bias"] = stored.cpu()
