"""What a backward pass shows of one block: gradients of its layers' outputs, of K and of V.

Kept of a tensor of gradients g_t, one for each token t, is little: the matrix G of the directions
that they take, and |g_t|^2. With the inputs x_t, seen in another pass, these give both factors
below. Layers with many outputs keep only blocks on the diagonal of G.

What an error of a layer's weight costs the whole model: Kronecker factors of the Fisher matrix.

To second order, an error E [out, in] of a linear layer's weight y = W x raises the KL divergence
between the model's predictions before and after by 1/2 vec(E)^T F vec(E), nats a token. F is the
Fisher information under the model's own predictions, which makes it the Hessian of that divergence
(`calibrate.backward`). With x_t the layer's input at token t and g_t the gradient drawn at its
output, F is taken as a Kronecker product (Martens and Grosse 2015, arXiv 1503.05671, with the
weights of tokens kept on the input's side as by Tseng et al. 2025, "YAQA", arXiv 2505.22988):

    A = sum_t |g_t|^2 x_t x_t^T / tokens        G = sum_t g_t g_t^T / sum_t |g_t|^2
    KL = 1/2 tr(E^T G E A)

Terms of different layers add up. On a wide layer G may be cut into blocks on its diagonal.

This takes the errors of different tokens for independent. They are not: what is wrong in K or V is
read by all later tokens, whose losses sum it up or cancel it. Of the layers that make K and V, two
more factors are known, of the gradients D_s = sum_t g_t x_t^T of the weight over whole sequences s:

    A' = sum_s D_s^T D_s / tokens                G' = sum_s D_s D_s^T / sum_s |D_s|^2

They tell what an error costs, far better there (rounding V of the default model to int4: 0.039 nats
measured, 0.028 with these, 0.012 without); their sums of few sequences are too noisy to round by.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from calibrate.statistics import Key
from formats.errors import RecipeError

OUTPUT = "output"  # role of a linear layer's output
STATES = "states"  # role of a block's output, the hidden states after it
LEAST = 256  # outputs in a block of G, where the layer has so many


@dataclass
class Gradients:
    """Of one linear layer's output, or of K or of V.

    Attributes:
        outputs: G = sum_t g_t g_t^T / sum_t |g_t|^2, fp32. Of a layer: its diagonal blocks
            [blocks, size, size], the last one filled up with zeros, of trace 1 together (before
            what is outside of the blocks is left out as after). Of K and V: [kv heads, D, D], of
            trace 1 each. Zero where nothing depends on it.
        mean: Of |g_t|^2 over all tokens: fp32, one element, or [kv heads].
        weights: |g_t|^2 of each sample, in the order of the samples: fp32 [tokens] of a layer,
            [tokens, kv heads] of K and V. Zero for the tokens that do not come to an expert. The
            samples may be fewer than those of the run, the first of them; none once it has ended.
        sequences: (A', G'), of layers that make K or V.
    """

    outputs: Tensor
    mean: Tensor
    weights: list[Tensor] = field(default_factory=list)
    sequences: tuple[Tensor, Tensor] | None = None

    def weights_of(self, sample: int, tokens: int) -> Tensor:
        """|g_t|^2 of a sample; their mean for each token of one that was not run backward.

        Args:
            sample: Its index among the run's samples.
            tokens: Its length.
        """
        if sample < len(self.weights):
            return self.weights[sample]
        return self.mean.expand(tokens, *self.mean.shape)


@dataclass
class BlockGradients:
    """Of a block's linear layers, as `(full name, "output")`, of its cache, as `(attention's full
    name, "k_cache" or "v_cache")`, and of what the block hands over, as `(full name, "states")`;
    all of the original block.
    """

    of: dict[Key, Gradients] = field(default_factory=dict)

    def output(self, layer: str) -> Gradients:
        """Those of a linear layer's output, by its full name."""
        return self.of[layer, OUTPUT]

    def rows(self, layer: str, start: int, stop: int) -> BlockGradients:
        """Those of some of a layer's outputs alone, whose traces are a part of 1.

        Args:
            layer: Full name.
            start: First of the outputs, where a block of G starts.
            stop: After the last of them, where one ends or the layer does.
        """
        whole = self.output(layer)
        size = whole.outputs.shape[1]
        assert start % size == 0
        part = whole.outputs[start // size : -(-stop // size)]
        return BlockGradients({(layer, OUTPUT): replace(whole, outputs=part)})

    def state(self, *, weights: bool = True) -> dict[str, Tensor]:
        """Tensors to save: `<module>/<role>/outputs`, `.../mean`, `.../weights`, `.../lengths`.

        And `.../sequence_inputs`, in bf16, as it only tells costs, and `.../sequence_outputs`.

        Args:
            weights: Whether to save `weights` and `lengths`, which only a run with samples can use.
        """
        state: dict[str, Tensor] = {}
        for (module, role), found in self.of.items():
            key = f"{module}/{role}"
            state |= {f"{key}/outputs": found.outputs.contiguous(), f"{key}/mean": found.mean}
            if found.sequences is not None:
                a, g = found.sequences
                state |= {f"{key}/sequence_inputs": a.bfloat16(), f"{key}/sequence_outputs": g}
            if weights:
                state[f"{key}/weights"] = torch.cat(found.weights)
                state[f"{key}/lengths"] = torch.tensor([len(w) for w in found.weights])
        return state

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> BlockGradients:
        """Inverse of `state`.

        Raises:
            KeyError: a tensor is missing.
            ValueError: a name is none that `state` gives.
        """
        keys = dict.fromkeys(name.rpartition("/")[0] for name in state)
        found: dict[Key, Gradients] = {}
        for key in keys:
            module, role = key.split("/")
            found[module, role] = Gradients(state[f"{key}/outputs"], state[f"{key}/mean"])
            if f"{key}/sequence_inputs" in state:
                a, g = (state[f"{key}/sequence_{side}"] for side in ("inputs", "outputs"))
                found[module, role].sequences = (a.float(), g)
            if f"{key}/weights" in state:
                lengths = state[f"{key}/lengths"].tolist()
                found[module, role].weights = list(state[f"{key}/weights"].split(lengths))
        return cls(found)


class GradientSums:
    """Gathers the gradients of one tensor, sample by sample, where they are.

    Args:
        size: Most outputs in a block of G, of a layer; 0 for K and V, whose heads are the blocks.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._sums: Tensor | None = None
        self._weights: dict[int, Tensor] = {}
        self._sequences: tuple[Tensor, Tensor] | None = None

    def observe(
        self,
        sample: int,
        g: Tensor,
        tokens: Tensor | None = None,
        count: int = 0,
        x: Tensor | None = None,
    ) -> None:
        """Add a sample.

        Args:
            g: [tokens, out] of a layer, [tokens, kv heads, D] of K and V.
            tokens: Places of the rows among the sample's tokens, int64 [rows], where the layer
                got only some.
            count: Tokens of the sample, with `tokens`.
            x: The layer's input [tokens, in], where factors of whole sequences are wanted.
        """
        g = g.float()
        blocks = g if self._size == 0 else in_blocks(g, self._size)
        by_block = blocks.transpose(0, 1)  # [blocks, rows, size]
        if self._sums is None:
            self._sums = g.new_zeros(len(by_block), blocks.shape[2], blocks.shape[2])
        self._sums.baddbmm_(by_block.transpose(1, 2), by_block)
        weights = torch.linalg.vector_norm(g, dim=-1).square_()
        if tokens is not None:
            weights = weights.new_zeros(count).index_copy(0, tokens, weights)
        self._weights[sample] = weights
        if x is not None:
            d = g.T @ x.float()  # gradient of the weight [out, in]
            if self._sequences is None:
                self._sequences = (d.new_zeros(d.shape[1], d.shape[1]), d.new_zeros(len(d), len(d)))
            self._sequences[0].addmm_(d.T, d)
            self._sequences[1].addmm_(d, d.T)

    def merge(self, other: GradientSums) -> None:
        """Add what other samples have shown, on this one's device."""
        self._weights |= other._weights
        if self._sums is None or other._sums is None:
            self._sums = other._sums if self._sums is None else self._sums
        else:
            self._sums.add_(other._sums.to(self._sums.device))
        if self._sequences is None or other._sequences is None:
            own, others = self._sequences, other._sequences
            self._sequences = others if own is None else own
        else:
            for total, part in zip(self._sequences, other._sequences, strict=True):
                total.add_(part.to(total.device))

    def gradients(self, name: str, width: int, lengths: Sequence[int]) -> Gradients:
        """What was seen, in the host's memory.

        Args:
            name: Module, for the error's text.
            width: Outputs of the layer, of which nothing may have been seen.
            lengths: Tokens of each sample.

        Raises:
            RecipeError: a gradient was not finite.
        """
        if self._sums is None:
            self.observe(0, torch.zeros(lengths[0], width))
        assert self._sums is not None
        heads = next(iter(self._weights.values())).shape[1:]
        weights = [
            self._weights[i].cpu() if i in self._weights else torch.zeros(length, *heads)
            for i, length in enumerate(lengths)
        ]
        total = torch.cat(weights).double().sum(dim=0)
        if not bool(total.isfinite().all()):
            raise RecipeError(
                f"{name}: its gradients hold NaN or infinity. Check the model's weights, and that "
                "it runs in float on this data"
            )
        sums = self._sums.cpu()
        traces = sums.diagonal(dim1=1, dim2=2).sum(dim=1)  # of coarser products than the weights'
        traces = traces if self._size == 0 else traces.sum()
        scale = torch.where(traces > 0, 1 / traces, 0.0).view(-1, 1, 1)
        mean = (total / sum(lengths)).float()
        found = Gradients(sums * scale, mean, weights)
        if self._sequences is not None:
            a, g = (total.cpu() for total in self._sequences)
            found.sequences = (a / sum(lengths), (g / g.trace().clamp(min=1e-30))[None])
        return found


def in_blocks(g: Tensor, size: int) -> Tensor:
    """[rows, out] as [rows, blocks, size], filled up with zeros."""
    width = g.shape[-1]
    size = min(size, width)
    count = -(-width // size)
    return torch.nn.functional.pad(g, (0, count * size - width)).unflatten(-1, (count, size))


def diagonal_blocks(whole: Tensor, size: int) -> Tensor:
    """Of a matrix [out, out]: [blocks, size, size], the last one filled up with zeros."""
    rest = -len(whole) % size
    parts = torch.nn.functional.pad(whole, (0, rest, 0, rest)).unflatten(0, (-1, size))
    return parts.unflatten(2, (-1, size)).diagonal(dim1=0, dim2=2).movedim(-1, 0)


def block_size(widths: Iterable[int], most: int) -> int:
    """Most outputs in a block of G, so that the G of all layers take at most some bytes.

    The largest width where whole ones do, else a power of two, `LEAST` at the least.

    Args:
        widths: Outputs of each layer of the model.
        most: Bytes.
    """
    layers = list(widths)
    size = max(layers, default=LEAST)
    if gradient_bytes(layers, size) <= most:
        return size
    size = 1 << (size.bit_length() - 1)
    while size > LEAST and gradient_bytes(layers, size) > most:
        size //= 2
    return max(size, LEAST)


def gradient_bytes(widths: Iterable[int], size: int) -> int:
    """Bytes of G, fp32, of layers with so many outputs, in blocks of at most `size`."""
    return sum(4 * -(-n // min(n, size)) * min(n, size) ** 2 for n in widths)


@dataclass(frozen=True)
class FisherFactors:
    """Both factors of one linear layer.

    Attributes:
        inputs: A, fp32 [in, in].
        outputs: G, whose trace is 1: its diagonal blocks, fp32 [blocks, size, size]; a whole G is
            one block. `blocks * size` is the layer's number of outputs, or more where the last
            block is filled up with zeros.
        sequences: The same of whole sequences, where known: (A', G'), with G' [1, out, out].
    """

    inputs: Tensor
    outputs: Tensor
    sequences: tuple[Tensor, Tensor] | None = None

    @property
    def telling(self) -> tuple[Tensor, Tensor]:
        """(A, G) that tell best what an error costs: of whole sequences, where these are known."""
        return self.sequences or (self.inputs, self.outputs)

    def kl(self, error: Tensor) -> Tensor:
        """Nats a token that an error of the weight [out, in] costs: fp64, one element."""
        inputs, outputs = self.telling
        count, size, _ = outputs.shape
        rows = torch.nn.functional.pad(error.double(), (0, 0, 0, count * size - len(error)))
        blocks = rows.unflatten(0, (count, size))
        spread = outputs.double() @ blocks @ inputs.double()
        return 0.5 * (spread * blocks).sum()
