"""Moving difficulty between channels: factors divided out of a source and into its consumers.

With a factor s_j for each channel j that a source hands to its consumers,
Y = (X diag(s)^-1) (diag(s) W^T) is the same function. diag(s)^-1 is folded into the source
(`ptq.methods.common.folding`), so that nothing remains to be done when the model runs. Sources and
consumers here:

    norm -> q, k, v        norm -> gate, up        v -> o        up -> down

v -> o holds as attention mixes tokens, not channels; a KV channel is shared by the query heads of
its group. up -> down holds as down reads act(gate) * up, which is linear in up: this is where the
massive activations of SwiGLU sit.

The best factors are those of the least squared error of the hidden states after attention or after
the block, whichever the group is in, with the inputs and weights of the group's consumers
fake-quantized (and V, where the cache is quantized and v is the source) and all else in float.
Where no candidate beats leaving the group alone, it is left alone.

One scale for all tokens must hold the largest of them. Where tokens differ much in an input, as at
down in most blocks, ordinary tokens are left few steps, and no factor helps. With `by_token` set,
an input whose best static error is more than so many times what rounding its weights costs is tried
once more with a scale for each token, factors searched anew, and takes that where it is so many
times better. It costs one more look at a row when the model runs, and an exchange between ranks.

The groups up -> down of a mixture's experts get one strength together, each with factors of its
own: a search for every expert would run the block hundreds of times.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from formats.families.block_layers import SmoothingGroup
from formats.namespace import later
from formats.scheme import ActivationSpec
from ptq.methods.common.block import BlockWork
from ptq.methods.common.events import Candidate, SmoothingRow
from ptq.methods.common.folding import Folding, SmoothedGroup, Trials, smooths_v
from ptq.methods.common.method import Method, Part, first_names

if TYPE_CHECKING:
    from torch import Tensor

    from calibrate.block import DecoderBlock
with later():
    import torch

BY_TOKEN = ActivationSpec(granularity="per_token")
SCALED = "by_token/"  # before the names of layers, among what is found


@dataclass(frozen=True)
class Choice:
    """What was chosen for a group: the strengths of its pieces, one for all without pieces.

    Attributes:
        alphas: None is no smoothing.
        scale: Factors [channels] fp64.
        error: Squared error of the hidden states with them; None where it was not measured.
    """

    alphas: tuple[float | None, ...]
    scale: Tensor
    error: float | None


def best_of(errors: Mapping[float | None, float], scales: Mapping[float | None, Tensor]) -> Choice:
    """The strength of least error, the earlier one of equals."""
    best = min(errors, key=lambda alpha: errors[alpha])
    return Choice((best,), scales[best], errors[best])


def smoothing_row(
    method: str,
    members: tuple[str, tuple[str, ...]],
    choice: Choice,
    errors: Mapping[float | None, float],
    power: float,
) -> SmoothingRow:
    """What the record tells of a choice.

    Args:
        members: Names of what is divided and of what is multiplied.
        errors: Squared error of the hidden states by strength; None is no smoothing.
        power: Sum of the hidden states' squares.
    """
    strengths = [alpha for alpha in choice.alphas if alpha is not None]
    return SmoothingRow(
        method=method,
        source=members[0],
        consumers=members[1],
        alpha=max(strengths, default=None),
        pieces=choice.alphas if len(choice.alphas) > 1 else (),
        error=None if choice.error is None else choice.error / power,
        scale_min=choice.scale.min().item(),
        scale_max=choice.scale.max().item(),
        candidates=tuple(Candidate(alpha=a, error=e / power) for a, e in errors.items()),
    )


class Migration(Method):
    """Searches the factors of every group of a block that can be folded.

    A subclass gives the candidates of a group.
    """

    folds = True
    rescales = True
    keeps = "factors"
    name: str  # of the method
    search_samples: int
    targets: tuple[str, ...]
    by_token: float | None = None

    def __init__(self) -> None:
        self.groups: list[SmoothingGroup] = []
        self.solved: list[tuple[SmoothedGroup, Folding]] = []
        self.scaled: set[str] = set()  # layers whose inputs are to be scaled by token

    @abstractmethod
    def candidates(self, group: SmoothedGroup) -> Mapping[float, Tensor]:
        """Factors [channels] fp64 to try, by their strength alpha."""

    def prepare(self, work: BlockWork) -> None:
        """Keep the groups whose consumers, and source if it is linear, are all quantized.

        With them V of a quantized cache whose v and o both stay in float, but not as stored.
        """
        self.groups = []
        found = {group.kind for group in work.groups}
        for kind in (kind for kind in self.targets if kind not in found):
            message = f"not smoothed: {kind}, before which nothing can be divided in this family"
            work.report(work.block.name, "smoothing_skipped", message)
        for group in work.groups:
            if group.kind not in self.targets:
                continue
            if group.routers and group.offset:
                message = "not smoothed: routers read a norm of 1 + w, which takes no power of two"
                work.report(group.source, "smoothing_skipped", message)
                continue
            linear_source = group.source in work.block.linears
            members = (*group.consumers, *((group.source,) if linear_source else ()))
            kept = [name for name in members if name not in work.targets]
            cached = smooths_v(work, group) and len(kept) == len(members)
            cached = cached and self.moments == "none"  # which only quantized layers have
            if cached:
                kept = [name for name in members if name in work.settings.kept]
            if not kept:
                self.groups.append(group)
            elif len(kept) < len(members) or cached:
                why = "kept as it is stored" if cached else "not quantized here"
                message = f"not smoothed: {first_names(kept)} is {why}"
                work.report(group.source, "smoothing_skipped", message)

    def solve(self, work: BlockWork) -> None:
        """Choose the factors of each group on the first `search_samples` samples."""
        self.solved, self.scaled = [], set()
        block = work.block.begins(self.search_samples)
        reference = [block.run(index) for index in range(len(block.inputs))]
        for name, groups in self._tied().items():
            each = [SmoothedGroup(work, group) for group in groups]
            self.solved += self._solve_groups(name, each, reference, block)

    def _tied(self) -> dict[str, list[SmoothingGroup]]:
        """Groups that get one strength, by what stands for them."""
        tied: dict[str, list[SmoothingGroup]] = {}
        for group in self.groups:
            tied.setdefault(group.tied or group.source, []).append(group)
        return tied

    def _solve_groups(
        self,
        name: str,
        groups: list[SmoothedGroup],
        reference: list[Tensor],
        block: DecoderBlock,
    ) -> list[tuple[SmoothedGroup, Folding]]:
        """Try no factors and every candidate; keep the best, the earlier one of equals.

        Args:
            name: The source, or what stands for those of groups that get one strength.
            groups: One, or those that get one strength.
            reference: The float block's output for each input; none where nothing can be tried,
                and the one candidate is taken.
        """
        foldings: dict[float | None, list[Folding]] = {}
        if reference:
            foldings[None] = [group.fold(None) for group in groups]
        for group in groups:
            for alpha, scale in self.candidates(group).items():
                foldings.setdefault(alpha, []).append(group.fold(group.protected(scale)))
        scales = {alpha: torch.cat([f.scale for f in own]) for alpha, own in foldings.items()}
        if not reference:
            choice, errors, power = Choice(tuple(foldings), *scales.values(), error=None), {}, 1.0
            chosen = foldings[choice.alphas[0]]
        else:
            trials = Trials(groups, reference, block)
            power = trials.power
            errors = {alpha: trials.error(own) for alpha, own in foldings.items()}
            choice = best_of(errors, scales)
            other = self._scaled_by_token(trials, foldings, choice)
            if other is not None:
                errors, choice = other, best_of(other, scales)
            chosen = foldings[choice.alphas[0]]
            if len(groups) == 1:
                choice = self.refined(choice, trials, scales)
                if len(choice.alphas) > 1:
                    smoothed = any(alpha is not None for alpha in choice.alphas)
                    chosen = [groups[0].fold(choice.scale if smoothed else None)]
        consumers = tuple(dict.fromkeys(c for g in groups for c in g.group.consumers))
        row = smoothing_row(self.name, (name, consumers), choice, errors, power)
        groups[0].work.tell(row)
        return list(zip(groups, chosen, strict=True))

    def _scaled_by_token(
        self, trials: Trials, foldings: Mapping[float | None, Sequence[Folding]], static: Choice
    ) -> dict[float | None, float] | None:
        """Errors of each strength with inputs scaled by token, where that pays; else None."""
        names = [name for group in trials.groups for name in group.group.consumers]
        work, error = trials.groups[0].work, static.error
        if self.by_token is None or error is None or not all(_is_static(work, n) for n in names):
            return None
        with _inputs(work, names, None):
            if error <= self.by_token * trials.error(foldings[None]):
                return None
        with _inputs(work, names, BY_TOKEN):
            found = {alpha: trials.error(own) for alpha, own in foldings.items()}
        if error <= self.by_token * min(found.values()):
            return None
        self.scaled.update(names)
        return found

    def refined(
        self, choice: Choice, trials: Trials, scales: Mapping[float | None, Tensor]
    ) -> Choice:
        """Improve on the best strength for all channels; here it is left as it is."""
        return choice

    def found(self) -> dict[str, Tensor]:
        """Factors that each group's source is divided by [channels] fp64, by its full name."""
        factors = {group.group.source: folding.scale for group, folding in self.solved}
        return factors | {f"{SCALED}{name}": torch.ones(1) for name in self.scaled}

    def recall(self, work: BlockWork, found: Mapping[str, Tensor]) -> None:
        """Take the factors of each group."""
        self.solved = []
        self.scaled = {n.removeprefix(SCALED) for n in found if n.startswith(SCALED)}
        for group in (SmoothedGroup(work, group) for group in self.groups):
            scale = found[group.group.source]
            left_alone = bool((scale == 1).all())
            self.solved.append((group, group.fold(None if left_alone else scale)))

    def parts(self, work: BlockWork, most: int) -> list[Part]:
        """Groups that get one strength."""
        return [Part(name, 1.0, groups=tuple(own)) for name, own in self._tied().items()]

    def part(self, work: BlockWork) -> Self:
        """A copy for some of the groups."""
        own = super().part(work)
        own.groups = [group for group in self.groups if group in work.groups]
        return own

    def gather(self, work: BlockWork, parts: Sequence[Self]) -> None:
        """Take the factors of all groups."""
        self.recall(work, {name: s for part in parts for name, s in part.found().items()})

    def commit(self, work: BlockWork) -> None:
        """Fold the chosen factors into the block's float weights."""
        for group, folding in self.solved:
            group.commit(folding)
        for name in sorted(name for name in self.scaled if _is_static(work, name)):
            own = work.scheme_of(name).model_copy(update={"activations": BY_TOKEN})
            work.schemes = {**work.schemes, name: own}
            message = "its input is scaled by token: one static scale would cost too much"
            work.report(name, "scaled_by_token", message)
        self.groups, self.solved, self.scaled = [], [], set()


def _is_static(work: BlockWork, name: str) -> bool:
    """Whether a layer's input has a static scale that scales by token could replace."""
    return name in work.targets and work.scheme_of(name).activations == ActivationSpec()


@contextmanager
def _inputs(
    work: BlockWork, names: Sequence[str], activations: ActivationSpec | None
) -> Iterator[None]:
    """Let inputs of layers be quantized otherwise for a while; None for not at all."""
    schemes = work.schemes
    own = {n: work.scheme_of(n).model_copy(update={"activations": activations}) for n in names}
    work.schemes = {**schemes, **own}
    try:
        yield
    finally:
        work.schemes = schemes
