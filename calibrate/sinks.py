"""Sink tokens: the first tokens of a sequence, where they are unlike all others.

In most decoders the first token, whatever it is, takes the attention that other tokens have no use
for (Xiao et al., "Efficient Streaming Language Models with Attention Sinks", arXiv 2309.17453). Its
hidden state has a few channels hundreds of times larger than any other token's, from some early
block to one of the last (Sun et al., "Massive Activations in Large Language Models", arXiv
2402.17762): one static scale for all tokens would leave the others no steps. So tokens at the first
n positions are kept apart: out of the statistics of inputs, of losses that searches compare and of
Hessians, and, when the model runs, with static scales of their own and, on a CPU, with K and V in
float.

n is found as by Chen et al., "PrefixQuant" (arXiv 2410.05265, section 4): a token is an outlier
where its largest magnitude is more than 64 times the median of all tokens' in the input of some
layer. So it is if its value V is less than a third of the median in some layer, whatever its inputs
are: what takes attention and is to change nothing has small values (Guo et al., "Active-Dormant
Attention Heads", arXiv 2410.13835). A scale for all tokens leaves little of these, and a method
that counts such a token like any other spoils what all others read. Where inputs have static scales
and the cache is not quantized, values do not count: the token would have scales of its own, which
other runtimes do not read, for inputs that do not need them.
Positions count, not tokens: of a model that puts nothing in front of a text, any token can be the
first, and one put in front for the sake of quantization changes what the model says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from calibrate.stream import BlockStream
from calibrate.tensor_statistics import check_finite
from calibrate.workers import BlockWorkers, in_order_of_samples, samples_of

OUTLIER = 64.0  # times the median of tokens' largest magnitudes
SMALL = 1 / 3  # of the median of tokens' values; of no other than first tokens was it under 0.6
MOST = 4  # positions that are kept apart without being asked for
SAMPLES, TOKENS = 8, 128  # that are looked at


@dataclass(frozen=True)
class Peaks:
    """How far single tokens stand out.

    Attributes:
        ratios: Largest over all layers of a token's largest magnitude over the median of all
            tokens': fp32 [samples, tokens].
        layers: In which layer that was, by the full name: as many lists of names.
        values: Least over all layers of the norm of a token's V over the median of all tokens':
            fp32 [samples, tokens]; 1 where they do not count.
    """

    ratios: Tensor
    layers: list[list[str]]
    values: Tensor

    @property
    def sinks(self) -> int:
        """Positions from the first on at which tokens of at least half of the samples stand out."""
        share = ((self.ratios > OUTLIER) | (self.values < SMALL)).float().mean(dim=0)
        return int((share[:MOST] >= 0.5).cumprod(dim=0).sum())

    def others(self, sinks: int) -> dict[str, float]:
        """Layers in which tokens after the first `sinks` stand out, with the largest ratio."""
        found: dict[str, float] = {}
        places: list[list[int]] = (self.ratios > OUTLIER).nonzero().tolist()
        for sample, token in places:
            if token >= sinks:
                name, ratio = self.layers[sample][token], self.ratios[sample, token].item()
                found[name] = max(ratio, found.get(name, 0.0))
        return found


def find_peaks(
    stream: BlockStream,
    sequences: Sequence[Tensor],
    workers: BlockWorkers,
    *,
    by_values: bool,
    blocks: int | None = None,
    tick: Callable[[], object] = lambda: None,
) -> Peaks:
    """Run the beginnings of some samples through a model, and see which tokens stand out.

    Args:
        stream: Of the model; it is spent.
        sequences: Token ids of the samples: int64 [tokens].
        workers: Devices that take the samples between them.
        by_values: Whether small values tell a sink token, too.
        blocks: How many of the model's first blocks are run; all by default.
        tick: Called after each block.

    Raises:
        RecipeError: activations hold NaN or infinity.
        CheckpointError: the model is damaged.
    """
    length = min(TOKENS, min(map(len, sequences)))
    starts = [ids[:length] for ids in sequences[:SAMPLES]]
    stream.start(starts)
    largest = torch.zeros(len(starts), length)
    smallest = torch.ones(len(starts), length)
    layers = [[""] * length for _ in starts]
    for index in range(len(stream.blocks))[:blocks]:
        block = stream.load(index, index + 1)
        workers.take(block)
        peaks, values, outputs = _block_peaks(workers, len(starts), by_values=by_values)
        if values is not None:
            smallest = torch.minimum(smallest, values / values.median().clamp(min=1e-30))
        for name, own in peaks.items():
            ratios = own / own.median().clamp(min=1e-30)
            for sample, token in (ratios > largest).nonzero().tolist():
                layers[sample][token] = name
            largest = torch.maximum(largest, ratios)
        stream.advance(block, outputs)
        workers.leave()
        tick()
    return Peaks(largest, layers, smallest)


def _block_peaks(
    workers: BlockWorkers, count: int, *, by_values: bool
) -> tuple[dict[str, Tensor], Tensor | None, list[Tensor]]:
    """Largest magnitude of each token in each layer's input, fp32 [samples, tokens]; the norms of
    their values, likewise, None where they are not asked for or the block caches none; outputs.
    """
    seen: list[dict[str, dict[int, Tensor]]] = [{} for _ in workers.devices]
    norms: dict[int, Tensor] = {}

    def run(worker: int) -> list[Tensor]:
        now = list[int]()

        def begin(samples: Sequence[int]) -> None:
            now[:] = samples

        def on_input(name: str, x: Tensor) -> None:
            peak = x.abs().amax(dim=1).float()
            check_finite(peak, name)
            own = seen[worker].setdefault(name, {})
            own |= zip(now, peak.chunk(len(now)), strict=True)

        def on_kv(_: Tensor, v: Tensor) -> None:
            own = v.flatten(1).float().norm(dim=1)
            norms.update(zip(now, own.chunk(len(now)), strict=True))

        chosen = samples_of(worker, count, len(workers))
        block = workers.block(worker)
        show = on_kv if by_values else None
        return block.outputs(on_input=on_input, on_kv=show, samples=chosen, begin=begin)

    outputs = in_order_of_samples(workers.each("looking for sink tokens", run), count)
    names = {name for each in seen for name in each}
    peaks: dict[str, Tensor] = {}
    for name in sorted(names):
        own = {sample: peak for each in seen for sample, peak in each.get(name, {}).items()}
        peaks[name] = _in_order(own)
    return peaks, _in_order(norms) if norms else None, outputs


def _in_order(each: dict[int, Tensor]) -> Tensor:
    """What samples have, as one tensor in the host's memory, which waits for a device once."""
    device = each[0].device
    return torch.stack([each[sample].to(device) for sample in sorted(each)]).cpu()
