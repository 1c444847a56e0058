"""K smoothing: evens out the channels of the cached keys, so that one scale for a head fits all.

Lin et al., "QServe: W4A8KV4 Quantization and System Co-design for Efficient LLM Serving", MLSys
2025 (arXiv 2405.04532), section 4.2, SmoothAttention. A few channels of K are far larger than the
others, in every token; Q has no such outliers. With one factor for each channel of a KV head,

    Z = (Q Lambda) (K Lambda^-1)^T,    lambda_j = max(max|K_j|, max|K_{j + D/2}|)^alpha

K is cached after rotary embedding, which turns the channels j and j + D/2 (D the head's size) into
each other: it commutes with Lambda where the two have one factor. Families that turn neighbouring
channels, or only the first ones of a head, or none in some layers, pair them otherwise
(`formats.families.sizes`); a channel that does not turn has a factor of its own. So Lambda folds
into the rows of k_proj (divided) and of q_proj (multiplied, in all query heads that read the KV
head), with their biases. Where q and k pass through norms after their projections (Qwen3), whatever
a projection multiplies is normed away, and Lambda goes into the weights of the norms, which all
heads share.

Factors are divided by their geometric mean, as only ratios matter. Where they go into tensors that
are stored in floating point (biases, norms, projections that are not quantized) they are rounded to
powers of two, which cost such a tensor nothing; rows of quantized projections, which have scales of
their own, take any factor. So do norms that multiply by 1 + w: what is stored of (1 + w) lambda - 1
is rounded whatever the factor. alpha is fixed, or searched by the squared error of the hidden
states after attention with K passed through the quantized cache and all else in float; where no
strength beats leaving K alone, it is left alone.

Where the cache turns K by a Hadamard matrix (`rotate_keys`), no channel stands out any more, and
rounding brings noise of one power to all of them: that of a token is proportional to
sum_j (K_j / lambda_j)^2, and a query reads sum_j (Q_j lambda_j)^2 of it. By Cauchy and Schwarz
their product is least where lambda_j^2 is proportional to the root mean square of K_j over that of
Q_j. The factors are then

    lambda_j = (rms(K_j, K_{j + D/2}) / rms(Q_j, Q_{j + D/2}))^(alpha / 2)

of K less its mean where the cache centres it, Q of all heads that read the KV head. Where keys are
rounded with feedback (`compensate_keys`), their errors follow what Q does not see, whatever the
factors, and more of them serves K: lambda_j = (rms(K)^3 / rms(Q))^(alpha / 4). What alpha trades
there is trust in these few samples; largest magnitudes alone would even out what turning
evens out for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from formats.families.block_layers import role_of
from formats.families.family import LatentAttention
from formats.namespace import later
from formats.scheme import LayerScheme, Scheme
from ptq.methods.common.block import BlockWork, exact_sum, loss_against, power_of, set_parameter
from ptq.methods.common.method import Method
from ptq.methods.common.migration import Choice, best_of, smoothing_row
from ptq.methods.common.spec import Alpha, MethodSpec, PlannedLayer, Stage, fixed_alpha

if TYPE_CHECKING:
    from torch import Tensor

    from calibrate.replay import Replay
with later():
    import torch
    from torch import nn

    import kernels.packed_cache as packed_cache
    from calibrate import replay
    from ptq.methods.common import cache


class SmoothKSpec(MethodSpec):
    """K smoothing: equalizes the channels of the cached K, at the cost of Q, which is not cached.

    YAML::

        smooth_k:
          alpha: search           # or one number from 0 to 1 for all blocks
          alphas: [0.5, 0.7, 0.85, 1.0] # what a search tries, beside leaving K alone
          search_samples: 4       # calibration sequences that a search measures its error on

    It needs a scheme that quantizes the cache, and works alone where nothing else is quantized. A
    model whose family nothing declares, and latent attention, are left as they are; so are keys
    that the cache turns where there are no samples to see queries with.
    """

    stage: ClassVar = Stage.SMOOTH_CACHE
    fits_cache_alone: ClassVar[bool] = True
    name: Literal["smooth_k"] = "smooth_k"
    alpha: Literal["search"] | Alpha = "search"
    """Strength from 0 to 1 for all blocks, or `search` for each."""
    alphas: Annotated[tuple[Alpha, ...], Field(min_length=1)] = (0.5, 0.7, 0.85, 1.0)
    """Strengths that a search tries, in addition to no smoothing."""
    search_samples: Annotated[int, Field(ge=1)] = 4
    """Calibration sequences that the search measures its error on; time and memory grow in
    proportion.
    """

    def misfit(self, scheme: Scheme, layers: Sequence[LayerScheme]) -> str | None:
        """It needs a quantized cache."""
        if scheme.kv_cache is not None:
            return None
        return (
            f"found smooth_k, but the scheme {scheme.wac} leaves the cache in floating point; "
            "remove it or quantize the cache"
        )

    def algorithm(self) -> SmoothK:
        """Smooths K of a block."""
        return SmoothK(self)

    def without_samples(self, strengths: Sequence[float]) -> tuple[str, str] | None:
        """One alpha for all blocks: the middle of those that were found."""
        return fixed_alpha(strengths)

    def explain(self, layer: PlannedLayer) -> Iterator[str]:
        """The projections that take its factors."""
        if role_of(layer.name) in ("q", "k"):
            yield "smooth_k: its rows, or the norm after it, take factors that even out K"


def key_factors(
    k_absmax: Tensor, alpha: float, pairs: Sequence[int], *, exact: bool = False
) -> Tensor:
    """The factors above, for the largest magnitudes of K after rotary embedding.

    Args:
        k_absmax: [kv heads, D].
        alpha: Strength; at 1 all pairs of channels get the same largest magnitude.
        pairs: A number for each channel of a head, from 0 on; those with one number share a factor.
        exact: Whether to round to powers of two.

    Returns:
        lambda [kv heads, D] fp64; 1 where a channel is dead.
    """
    pair = torch.tensor(pairs)
    peaks = k_absmax.new_zeros(len(k_absmax), max(pairs) + 1).double()
    peaks.scatter_reduce_(1, pair.expand_as(k_absmax), k_absmax.double(), "amax")
    alive = peaks > 0
    logs = torch.where(alive, peaks, torch.ones_like(peaks)).log2() * alpha
    mean = logs.sum(dim=-1, keepdim=True) / alive.sum(dim=-1, keepdim=True).clamp(min=1)
    logs = torch.where(alive, logs - mean, torch.zeros_like(logs))
    return torch.exp2(logs.round() if exact else logs)[:, pair]


class SmoothK(Method):
    """Smooths the cached K of every block; see the module's docstring."""

    folds = True
    rescales = True
    keeps = "factors"

    def __init__(self, spec: SmoothKSpec) -> None:
        self.spec, self.key = spec, ""
        self.factors: Tensor | None = None
        self.needs = "samples" if spec.alpha == "search" else "statistics"

    def prepare(self, work: BlockWork) -> None:
        """Find what makes K; where no projection makes it alone, say so."""
        self.key, self.factors = "", None
        stages = _stages(work) if _has_keys(work) else ()
        kept = [name for name in stages if name in work.settings.kept]
        if stages and not kept:
            self.key = stages[0]
            return
        if work.block.attention is None:  # it caches no keys
            return
        message = "not smoothed: one layer makes the latent and the keys that are cached with it"
        if work.block.family is None:
            message = "not smoothed: no family declares what makes queries and keys"
        if kept:
            message = f"not smoothed: {kept[0]} is kept as it is stored"
        work.report(work.block.attended, "smoothing_skipped", message)

    def solve(self, work: BlockWork) -> None:
        """Try no factors and every strength on the first samples; without any, take the one."""
        if not self.key:
            return
        k, q = _stages(work)
        absmax = work.observed(work.block.attended, "k_cache").channel_absmax  # [kv heads, D]
        alphas = self.spec.alphas if self.spec.alpha == "search" else (self.spec.alpha,)
        exact = any(not _takes_any_factor(work, name) for name in (k, q))
        own = work.block.begins(self.spec.search_samples)
        runs = replay.Replay(own, (), work.feed_forward_norm)
        reference, basis = self._reference(work, runs, q, absmax)
        factors_of_k = len(work.module(k).get_parameter("weight"))
        if factors_of_k == work.settings.head_dim:  # all heads have one norm
            basis = basis.amax(dim=0, keepdim=True).expand_as(basis)
        factors: dict[float | None, Tensor] = {None: torch.ones_like(absmax).double()}
        pairs = work.settings.pairs
        factors |= {alpha: key_factors(basis, alpha, pairs, exact=exact) for alpha in alphas}
        losses = [loss_against(y, work.block.sinks) for y in reference]
        power = power_of(reference, work.block.sinks)
        errors: dict[float | None, float] = {}
        if reference:
            errors = {a: _error(work, runs, absmax, f, losses) for a, f in factors.items()}
            choice = best_of(errors, factors)
        else:
            alpha = alphas[0] if bool((basis > 0).any()) else None  # no sample has shown queries
            choice = Choice((alpha,), factors[alpha], error=None)
        work.tell(smoothing_row(self.spec.name, (k, (q,)), choice, errors, power))
        self.factors = None if choice.alphas == (None,) else choice.scale

    def _reference(
        self, work: BlockWork, runs: Replay, q: str, absmax: Tensor
    ) -> tuple[list[Tensor], Tensor]:
        """What samples give with K as it is, and what a strength of 1 takes for factors."""
        samples, spec = range(len(runs.block.inputs)), work.scheme.kv_cache
        if spec is None or not spec.rotate_keys:
            return [runs.run(sample, lambda k, v: (k, v)) for sample in samples], absmax
        power = _Power(work, q, absmax)
        with power.watching():
            reference = [runs.run(sample, power.observe) for sample in samples]
        return reference, power.basis()

    def found(self) -> dict[str, Tensor]:
        """Factors that K is divided by [kv heads, D] fp64, by the name of what makes it."""
        return {} if self.factors is None else {self.key: self.factors}

    def recall(self, work: BlockWork, found: Mapping[str, Tensor]) -> None:
        """Take the factors of K, if it has any."""
        self.factors = found.get(self.key)

    def commit(self, work: BlockWork) -> None:
        """Divide what makes K and multiply what makes Q, in the block's float weights."""
        if self.factors is not None:
            k, q = _stages(work)
            _multiply(work, k, 1 / self.factors)
            _multiply(work, q, self.factors)
            work.divide(work.block.attended, "k_cache", self.factors)
        self.factors = None


class _Power:
    """Sums of squares of K and Q over samples, for keys that the cache turns.

    Args:
        q: Name of the last module that Q passes before rotary embedding.
        absmax: Largest magnitudes of K [kv heads, D].
    """

    def __init__(self, work: BlockWork, q: str, absmax: Tensor) -> None:
        self.work, self.q = work, work.module(q)
        self.keys = torch.zeros_like(absmax).double()
        self.queries = torch.zeros(len(self.q.get_parameter("weight")), dtype=torch.float64)
        self.centre = _centre(work)
        spec = work.scheme.kv_cache
        self.compensates = spec is not None and spec.compensate_keys

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Add up queries of what runs meanwhile."""

        def add(_: nn.Module, __: tuple[Tensor, ...], out: Tensor) -> None:
            self.queries += out.reshape(-1, len(self.queries)).double().square().sum(dim=0).cpu()

        with self.q.register_forward_hook(add):
            yield

    def observe(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add up keys [tokens, kv heads, D], those of sink tokens left out; a `Cache`."""
        ordinary = (k - self.centre)[..., self.work.block.sinks :, :, :]
        self.keys += ordinary.double().flatten(0, -3).square().sum(dim=0).cpu()
        return k, v

    def basis(self) -> Tensor:
        """What a strength of 1 takes for factors [kv heads, D]; 0 where K or Q are.

        Of a pair of channels that turn together both have one number.
        """
        heads, dim = self.keys.shape
        queries = self.queries.view(-1, dim)
        if len(queries) < heads:  # one norm for all heads
            queries = queries.expand(heads, dim)
        queries = queries.reshape(heads, -1, dim).sum(dim=1)
        pair = torch.tensor(self.work.settings.pairs).expand(heads, dim)
        sums = [
            torch.zeros(heads, dim, dtype=torch.float64).scatter_add_(1, pair, x).gather(1, pair)
            for x in (self.keys, queries)
        ]
        ratio = sums[0] / sums[1]
        found = ratio**0.125 * sums[0] ** 0.25 if self.compensates else ratio**0.25
        return torch.where((sums[0] > 0) & (sums[1] > 0), found, torch.zeros_like(found))


def _has_keys(work: BlockWork) -> bool:
    """Whether it is declared which projection makes keys, and that no other makes them with it."""
    family = work.block.family
    return family is not None and not isinstance(family.attention, LatentAttention)


def _stages(work: BlockWork) -> tuple[str, str]:
    """Names of the last modules that K and Q pass before rotary embedding, and that can scale."""
    attention, names = work.block.attended, work.block.declared.attention
    assert not isinstance(names, LatentAttention)  # `prepare` has skipped it
    normed = any(name == names.k_norm for name, _ in work.module(attention).named_children())
    k, q = (names.k_norm, names.q_norm) if normed else (names.k, names.q)
    return f"{attention}.{k}", f"{attention}.{q}"


def _takes_any_factor(work: BlockWork, name: str) -> bool:
    """Whether powers of two cost less than other factors in nothing that is stored of a module."""
    module = work.module(name)
    if not isinstance(module, nn.Linear):
        return work.block.declared.norms.offset != 0
    return name in work.targets and module.bias is None


def _multiply(work: BlockWork, name: str, factors: Tensor) -> None:
    """Multiply a module's outputs by factors [kv heads, D] that all query heads of a group share.

    A norm's weight is [D], and all rows of the factors are one then.
    """
    module = work.module(name)
    offset = 0.0 if isinstance(module, nn.Linear) else work.block.declared.norms.offset
    for leaf, parameter in list(module.named_parameters()):
        heads = parameter.shape[0] // factors.shape[1]
        repeated = factors.repeat_interleave(max(1, heads // len(factors)), dim=0)
        by_row = repeated.flatten()[: len(parameter)].to(parameter.device)
        if leaf == "weight" and isinstance(module, nn.Linear):
            work.divide(name, "output", 1 / by_row.cpu())
        by_row = by_row.view(-1, *(1,) * (parameter.dim() - 1))
        moved = (parameter.double() + offset) * by_row - offset
        if leaf == "bias" or name not in work.targets:
            work.store(f"{name}.{leaf}", moved)
        else:
            set_parameter(module, leaf, moved.float())


def _error(
    work: BlockWork,
    runs: Replay,
    absmax: Tensor,
    factors: Tensor,
    losses: Sequence[Callable[[Tensor], Tensor]],
) -> float:
    """Squared error of the hidden states after attention with K / factors in the cache."""
    spec = work.scheme.kv_cache
    assert spec is not None
    seen, divisor = absmax.double() / factors, factors.float().to(work.block.device)
    centre, feedback = _centre(work), None
    if spec.compensate_keys:
        moments = cache.query_moments(work) * (factors[:, :, None] * factors[:, None])
        size = packed_cache.turn_size(work.settings.head_dim) if spec.rotate_keys else 0
        feedback = packed_cache.feedback_of(moments, size).to(work.block.device)

    def cached(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        moved = (k - centre) / divisor
        held = cache.through_cache(moved, seen, spec, "k_cache", work.block.sinks, feedback)
        return held * divisor + centre, v

    return exact_sum(loss(runs.run(i, cached)) for i, loss in enumerate(losses))


def _centre(work: BlockWork) -> Tensor:
    """What the cache subtracts from K, fp32 [kv heads, D]; a zero [1] where it does not."""
    spec = work.scheme.kv_cache
    centred = spec is not None and spec.center_keys
    mean = cache.key_mean(work).float() if centred else torch.zeros(1)
    return mean.to(work.block.device)
