"""Statistics of one tensor of activations, exact and mergeable.

What is kept of a tensor is its largest magnitudes, by channel and by sample, and a histogram of
|x| over the 32,768 values of bf16's exponent and mantissa: an integer count for each, with nothing
to configure and no range to guess; so are the tokens' own largest magnitudes. Maxima and integer
sums do not depend on batch size, order or number of ranks, so neither does anything derived from
them. A bin is at most 2^-7 wide relative to its value: magnitudes are known to about one per cent,
those of bf16 data exactly. The largest magnitudes are kept apart, exact.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from formats.errors import RecipeError
from formats.namespace import later

with later():
    from kernels.triton.calibration import magnitudes  # where there is a GPU

BINS = 1 << 15


class TensorStatistics:
    """What was seen of one tensor.

    Attributes:
        channel_absmax: Largest magnitude of each channel: fp32 [K], or [H, D] for cached heads.
        sample_absmax: Largest magnitude of each sample, by head: fp32 [samples, H] ([samples, 1]
            for an input), rows in ascending order.
        channel_sum: Sum of each channel, fp64 of the shape of `channel_absmax`, where a mean is
            wanted; else None.
        query_moments: Of keys: sum of q q^T over the queries that read a head, fp64 [H, D, D],
            where that is wanted; else None.
        peak_positions: Where in its sample the token with the largest magnitude of a head stood,
            the first such place: int64 [H]; -1 where that is not known.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        """Start with nothing seen of tokens of `shape`: (K,) for an input, (H, D) for heads."""
        self.tokens = 0
        self.channel_absmax = torch.zeros(shape)
        self.sample_absmax = torch.zeros(0, self.heads)
        self.channel_sum: Tensor | None = None
        self.query_moments: Tensor | None = None
        self.peak_positions = torch.full((self.heads,), -1)
        self._token_bins = torch.empty(0, dtype=torch.int64)  # as `_bins`, of tokens' own maxima
        self._token_counts = torch.empty(0, dtype=torch.int64)
        self._bins = torch.empty(0, dtype=torch.int64)  # head * BINS + bin, sorted
        self._counts = torch.empty(0, dtype=torch.int64)

    @property
    def heads(self) -> int:
        """Heads that are kept apart; 1 for the input of a linear layer."""
        return self.channel_absmax.shape[0] if self.channel_absmax.dim() == 2 else 1

    @property
    def counted(self) -> bool:
        """Whether magnitudes were counted, not only the largest kept."""
        return len(self._counts) > 0

    @property
    def absmax(self) -> float:
        """Largest magnitude, exact."""
        return self.channel_absmax.max().item()

    @property
    def token_median(self) -> float | None:
        """Median over tokens of the largest magnitude of each (of each head's), to about one per
        cent; None if unknown.
        """
        if not len(self._token_counts):
            return None
        bins, order = (self._token_bins % BINS).sort()
        cumulative = self._token_counts[order].cumsum(0)
        middle = torch.searchsorted(cumulative, (cumulative[-1] + 1) // 2)
        return bin_edge(bins[middle]).item()

    @property
    def peak_position(self) -> int:
        """Where in its sample the token with the largest magnitude stood; -1 if unknown."""
        return int(self.peak_positions[self._head_absmax().argmax()].item())

    def _head_absmax(self) -> Tensor:
        """Largest magnitude of each head."""
        return self.channel_absmax.reshape(self.heads, -1).amax(dim=1)

    def merge(self, other: TensorStatistics) -> None:
        """Add what another has seen of the same tensor."""
        if other.channel_absmax.shape != self.channel_absmax.shape:
            raise ValueError(
                f"cannot merge statistics of shapes {tuple(other.channel_absmax.shape)} and "
                f"{tuple(self.channel_absmax.shape)}"
            )
        for name, added in other._sums().items():
            own = getattr(self, name)
            setattr(self, name, added if own is None else own + added)
        self._merge_tokens(other)
        counts = other._dense() if other.counted else None
        self._add(other.tokens, other.channel_absmax, other.sample_absmax, counts)

    def _merge_tokens(self, other: TensorStatistics) -> None:
        """Add another's largest magnitudes of tokens, before its maxima are added."""
        mine, theirs = self._head_absmax(), other._head_absmax()
        own, others = self.peak_positions, other.peak_positions
        first = torch.where(own < 0, others, torch.where(others < 0, own, own.minimum(others)))
        self.peak_positions = torch.where(
            theirs > mine, others, torch.where(theirs < mine, own, first)
        )
        both = torch.cat((self._token_bins, other._token_bins))
        self._token_bins, place = both.unique(return_inverse=True)
        counts = torch.cat((self._token_counts, other._token_counts))
        self._token_counts = torch.zeros_like(self._token_bins).index_add_(0, place, counts)

    def divided(self, factor: Tensor) -> TensorStatistics:
        """Statistics of x / factor, of which only the channels' largest magnitudes and sums follow.

        Args:
            factor: Positive, of the shape of `channel_absmax`.
        """
        part = TensorStatistics(tuple(self.channel_absmax.shape))
        part.tokens = self.tokens
        part.channel_absmax = (self.channel_absmax.double() / factor).float()
        if self.channel_sum is not None:
            part.channel_sum = self.channel_sum / factor
        if self.query_moments is not None:
            part.query_moments = self.query_moments * (factor[:, :, None] * factor[:, None])
        return part

    def head(self, index: int) -> TensorStatistics:
        """Statistics of one head alone, with `channel_absmax` [D]."""
        part = TensorStatistics(tuple(self.channel_absmax.shape[-1:]))
        samples, counts = self.sample_absmax[:, index, None], self._dense().view(-1, BINS)[index]
        part._add(self.tokens, self.channel_absmax[index], samples, counts)
        own = self._token_bins // BINS == index
        part._token_bins, part._token_counts = self._token_bins[own] % BINS, self._token_counts[own]
        part.peak_positions = self.peak_positions[index, None]
        return part

    def histogram(self) -> tuple[Tensor, Tensor]:
        """Occupied bins, all heads together: (lower edges fp64, counts fp64), ascending."""
        counts = self._dense().view(self.heads, BINS).sum(dim=0)
        bins = counts.nonzero().flatten()
        return bin_edge(bins), counts[bins].double()

    def state(self) -> dict[str, Tensor]:
        """Tensors to save; `from_state` restores them."""
        return self._sums() | {
            "channel_absmax": self.channel_absmax,
            "sample_absmax": self.sample_absmax,
            "bins": self._bins.to(torch.int32),
            "counts": self._counts,
            "token_bins": self._token_bins.to(torch.int32),
            "token_counts": self._token_counts,
            "peak_positions": self.peak_positions,
            "tokens": torch.tensor([self.tokens]),
        }

    def _sums(self) -> dict[str, Tensor]:
        """Sums that are kept where they are wanted, by their names."""
        both = {"channel_sum": self.channel_sum, "query_moments": self.query_moments}
        return {name: own for name, own in both.items() if own is not None}

    @classmethod
    def from_state(cls, state: dict[str, Tensor]) -> TensorStatistics:
        """Inverse of `state`.

        Raises:
            ValueError: the tensors cannot be those of a `state`.
        """
        state = dict(state)
        sums, moments = state.pop("channel_sum", None), state.pop("query_moments", None)
        kinds = {key: (tensor.dtype, tensor.dim()) for key, tensor in state.items()}
        channels = state["channel_absmax"].dim() if "channel_absmax" in state else 0
        if channels not in (1, 2) or kinds != {
            "channel_absmax": (torch.float32, channels),
            "sample_absmax": (torch.float32, 2),
            "bins": (torch.int32, 1),
            "counts": (torch.int64, 1),
            "token_bins": (torch.int32, 1),
            "token_counts": (torch.int64, 1),
            "peak_positions": (torch.int64, 1),
            "tokens": (torch.int64, 1),
        }:
            raise ValueError(f"arrays {kinds} are not those of statistics")
        restored = cls(tuple(state["channel_absmax"].shape))
        (restored.tokens,) = state["tokens"].tolist()
        restored.peak_positions = state["peak_positions"]
        restored.channel_absmax = state["channel_absmax"]
        restored.sample_absmax = state["sample_absmax"]
        restored._bins, restored._counts = state["bins"].long(), state["counts"]
        restored._token_bins = state["token_bins"].long()
        restored._token_counts = state["token_counts"]
        restored.channel_sum, restored.query_moments = sums, moments
        restored._check()
        return restored

    def _check(self) -> None:
        """Refuse numbers that no observation leaves behind."""
        bins, counts, peaks = self._bins, self._counts, self.channel_absmax
        seen = self.tokens * peaks.numel()
        samples, largest = self.sample_absmax, peaks.reshape(self.heads, -1).amax(dim=1)
        if not (
            self.tokens >= 0
            and bool((peaks.isfinite() & (peaks >= 0)).all())
            and samples.shape[1] == self.heads
            and torch.equal(samples.amax(dim=0) if len(samples) else largest * 0, largest)
            and len(bins) == len(counts)
            and bool((bins.diff() > 0).all() & (counts > 0).all())
            and bool(((bins >= 0) & (bins < self.heads * BINS)).all())
            and int(counts.sum().item()) in (0, seen)  # none are counted without histograms
            and len(self._token_bins) == len(self._token_counts)
            and bool((self._token_bins.diff() > 0).all() & (self._token_counts > 0).all())
            and int(self._token_counts.sum().item()) in (0, self.tokens * self.heads)
            and self.peak_positions.shape == (self.heads,)
            and bool((self.peak_positions >= -1).all())
            and _is_sum(self.channel_sum, peaks.shape)
            and _is_sum(self.query_moments, (*peaks.shape, *peaks.shape[1:]))
        ):
            raise ValueError("the numbers contradict each other")

    def __eq__(self, other: object) -> bool:
        """Whether both saw the same, bit for bit."""
        if not isinstance(other, TensorStatistics):
            return NotImplemented
        a, b = self.state(), other.state()
        return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)

    __hash__ = None  # pyright: ignore[reportAssignmentType]  # mutable

    def _dense(self) -> Tensor:
        dense = torch.zeros(self.heads * BINS, dtype=torch.int64)
        dense[self._bins] = self._counts
        return dense

    def _add(
        self, tokens: int, channel_absmax: Tensor, sample_absmax: Tensor, counts: Tensor | None
    ) -> None:
        """Add tokens; without counts only their maxima."""
        if counts is not None:
            counts = counts + self._dense()
            self._bins = counts.nonzero().flatten()
            self._counts = counts[self._bins]
        self.channel_absmax = torch.maximum(self.channel_absmax, channel_absmax)
        samples = torch.cat((self.sample_absmax, sample_absmax))
        rows, times = samples.unique(dim=0, return_counts=True)  # ascending, whatever the order
        self.sample_absmax = rows.repeat_interleave(times, dim=0)
        self.tokens += tokens


def _is_sum(sums: Tensor | None, shape: tuple[int, ...]) -> bool:
    """Whether these can be sums of such a shape."""
    if sums is None:
        return True
    fits = sums.dtype == torch.float64 and sums.shape == shape
    return fits and bool(sums.isfinite().all())


class Accumulator:
    """Gathers what samples show of one tensor where they are, on a GPU without waiting for it.

    Args:
        shape: Of a token: (K,) for an input, (H, D) for heads.
        histogram: Whether to count magnitudes; the largest ones alone take a third of the time.
    """

    def __init__(self, shape: tuple[int, ...], *, histogram: bool = True) -> None:
        self._shape, self._histogram = shape, histogram
        self._heads = shape[0] if len(shape) == 2 else 1
        self._tokens = 0
        self._channels: Tensor | None = None
        self._tokens_of: list[Tensor] = []  # largest magnitudes [samples, tokens, heads]
        self._firsts: list[int] = []
        self._counts: Tensor | None = None
        self._on_gpu: magnitudes.Magnitudes | None = None

    def observe(self, x: Tensor, name: str, first: int = 0, samples: int = 1) -> None:
        """Add the tokens of one sample, or of some of one length.

        Args:
            x: [T, K] or [T, H, D], float; T of all samples, one after the other.
            name: Module, for the error's text.
            first: Position of the first of the tokens in its sample.
            samples: How many there are.

        Raises:
            RecipeError: `x` holds NaN or infinity; of tokens on a GPU `statistics` raises it.
        """
        if x.shape[0] == 0:
            return
        assert x.shape[1:] == self._shape
        self._tokens += x.shape[0]
        self._firsts.append(first)
        by_head = (samples, len(x) // samples, self._heads, -1)
        if x.is_cuda:
            heads = x.detach().reshape(by_head)
            self._tokens_of.append(torch.linalg.vector_norm(heads, torch.inf, 3))
            self._observe_on_gpu(x.detach())
            return
        magnitude = x.detach().float().abs()
        peak = magnitude.amax(dim=0)
        self._tokens_of.append(magnitude.reshape(by_head).amax(dim=3))
        check_finite(peak, name)
        self._channels = peak if self._channels is None else torch.maximum(self._channels, peak)
        if self._histogram:
            counts = self._count(magnitude)
            self._counts = counts if self._counts is None else self._counts.add_(counts)

    def _observe_on_gpu(self, x: Tensor) -> None:
        heads = x.view(len(x), self._heads, -1) if x.dim() == 2 else x
        if self._on_gpu is None:
            self._on_gpu = magnitudes.Magnitudes(
                self._heads, heads.shape[2], x.device, histogram=self._histogram
            )
        self._on_gpu.add(heads)

    def statistics(self, name: str) -> TensorStatistics:
        """What was seen so far, in the host's memory.

        Raises:
            RecipeError: it held NaN or infinity.
        """
        found = TensorStatistics(self._shape)
        if self._on_gpu is not None:
            channels = self._on_gpu.channel_absmax().view(self._shape).cpu()
            counts = self._on_gpu.counts()
        elif self._channels is not None:
            channels, counts = self._channels, self._counts
        else:
            return found
        check_finite(channels, name)
        samples = self._tell_tokens(found)
        found._add(self._tokens, channels, samples, None if counts is None else counts.cpu())
        return found

    def _tell_tokens(self, found: TensorStatistics) -> Tensor:
        """Largest magnitudes of tokens, and where the largest of all stood.

        Returns:
            Those of each sample: fp32 [samples, heads].
        """
        sizes = [x.shape[:2] for x in self._tokens_of]
        tokens = [x.flatten(0, 1) for x in self._tokens_of]
        peaks = torch.cat(tokens).float().cpu()  # [tokens, heads]
        parts = peaks.split([samples * length for samples, length in sizes])
        own = [part.unflatten(0, size) for part, size in zip(parts, sizes, strict=True)]
        each = zip(own, self._firsts, strict=True)
        places = torch.cat([(f + torch.arange(x.shape[1])).repeat(len(x)) for x, f in each])
        later = torch.where(peaks == peaks.amax(dim=0), places[:, None], places.max() + 1)
        found.peak_positions = later.amin(dim=0)
        bins = (peaks.view(torch.int32).long() >> 16) + torch.arange(self._heads) * BINS
        found._token_bins, found._token_counts = bins.unique(return_counts=True)
        return torch.cat([x.amax(dim=1) for x in own])

    def _count(self, magnitude: Tensor) -> Tensor:
        """Values in each bin of each head: int64 [heads * BINS]."""
        bins = magnitude.contiguous().view(torch.int32) >> 16
        if self._heads > 1:
            first = torch.arange(self._heads, dtype=torch.int32, device=bins.device) * BINS
            bins = bins + first[:, None]
        return torch.bincount(bins.flatten(), minlength=self._heads * BINS)


def check_finite(peak: Tensor, name: str) -> None:
    """Raise RecipeError where the largest magnitudes of a layer's input are not finite."""
    if not math.isfinite(peak.amax().item()):  # NaN wins over all that amax meets
        raise RecipeError(
            f"{name}: its activations hold NaN or infinity. Check the model's weights, and "
            "that it runs in float on this data"
        )


def bin_edge(bins: Tensor) -> Tensor:
    """Lower edge of histogram bins: the bf16 number whose bits are the bin's index, in fp64."""
    return (bins.to(torch.int32) << 16).view(torch.float32).double()
