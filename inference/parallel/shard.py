"""Which part of a decoder a rank holds (Shoeybi et al. 2019, "Megatron-LM", arXiv 1909.08053).

    q, k, v     column-parallel: the outputs of its heads; with fewer KV heads than ranks, several
                ranks hold the same one
    gate, up    column-parallel: an equal share of their outputs
    o, down     row-parallel: the inputs that these outputs are; an all-reduce adds the results
    embedding   vocabulary-parallel: rows of some tokens
    head        outputs of the same tokens

A cut never separates weights or inputs that share a scale. Where the inputs of an o or down layer
cannot be cut so (groups that cross the cut, groups in another order), the layer has a share of its
*outputs* instead and reads the inputs of all ranks, by an all-gather (`Shard.gathered`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from math import lcm

from formats.checkpoint.part import ALL, Cut, Span, entry_units
from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError
from formats.families.block_layers import EMBEDDING, HEAD, is_router, role_of
from formats.families.family import LatentAttention
from formats.families.registry import block_names
from formats.scheme import LayerScheme
from inference.models.config import ModelConfig

EVEN = (128, 64, 32, 16, 8, 4, 2, 1)  # outputs of a share are a multiple of the first that can be


@dataclass(frozen=True)
class Shard:
    """A rank's part of a decoder.

    Attributes:
        config: The shape of the part: its own heads, the vocabulary of all ranks.
        heads: Heads of K and V that it holds, of all.
        cuts: What it takes of each linear layer and of the embedding, by full name.
        vectors: Entries that it takes of tensors of one dimension.
        gathered: o and down layers that read the inputs of all ranks, by full name, with each
            rank's share of inputs and of outputs.
        vocabulary: Each rank's tokens.
        rank: Which one it is.
    """

    config: ModelConfig
    heads: Span
    cuts: Mapping[str, Cut]
    vectors: Mapping[str, Span]
    gathered: Mapping[str, tuple[tuple[Span, ...], tuple[Span, ...]]]
    vocabulary: tuple[Span, ...]
    rank: int


def shard_of(checkpoint: Checkpoint, config: ModelConfig, rank: int, ranks: int) -> Shard:
    """The part of a decoder that a rank holds.

    Args:
        checkpoint: Where it will be read from.
        ranks: How many there are.

    Raises:
        CheckpointError: the decoder cannot be cut in so many parts; what stands against it is
            named.
    """
    check_parts(config, ranks)
    queries = tuple(Span(*(config.heads * i // ranks for i in (r, r + 1))) for r in range(ranks))
    each = config.heads // config.kv_heads
    held = tuple(Span(own.first // each, -(-own.end // each)) for own in queries)
    planner = _Planner(checkpoint, config, rank, queries, held)
    names = config.family.attention
    assert not isinstance(names, LatentAttention)
    attentions = [f"{block}.{names.module}" for block in block_names(checkpoint.config)]
    vocabulary = planner.vocabulary()
    planner.cut_layers()
    tokens = Cut(rows=vocabulary[rank])
    sinks = {f"{a}.{names.sinks}": queries[rank] for a in attentions} if names.sinks else {}
    own = replace(config, heads=queries[rank].count, kv_heads=held[rank].count)
    return Shard(
        config=own,
        heads=held[rank],
        cuts=planner.cuts | {EMBEDDING: tokens, HEAD: tokens},
        vectors=sinks,
        gathered=planner.gathered,
        vocabulary=vocabulary,
        rank=rank,
    )


def check_parts(config: ModelConfig, ranks: int) -> None:
    """Refuse a decoder that is not cut in so many parts, by its shape alone.

    Raises:
        CheckpointError: it has latent attention, or norms over all heads, or its heads do not
            divide.
    """
    size = f"tensor_parallel {ranks}"
    if config.latent is not None:
        raise CheckpointError(
            f"{size}: the model caches a latent that all heads share (MLA), which is not cut among "
            "ranks. Run it with tensor_parallel 1"
        )
    if config.qk_norm == "projection":
        raise CheckpointError(
            f"{size}: the model norms q and k over all of their heads, which no rank has. Run it "
            "with tensor_parallel 1"
        )
    heads, own = config.heads, config.kv_heads
    if heads % ranks or (own % ranks and ranks % own):
        counts = range(2, heads + 1)
        allowed = [n for n in counts if heads % n == 0 and (own % n == 0 or n % own == 0)]
        raise CheckpointError(
            f"{size}: found {heads} heads of q and {own} of K and V, which do not divide among "
            f"{ranks} ranks. Allowed are {', '.join(map(str, [1, *allowed]))}"
        )


def shares(total: int, ranks: int, unit: int = 1) -> tuple[Span, ...]:
    """Equal runs of something that is cut in whole units; the first ranks have a unit more.

    The last unit may be shorter. Where there are fewer units than ranks, the last ranks have none.
    """
    units = -(-total // unit)
    edges = [min(total, (units * r + ranks - 1) // ranks * unit) for r in range(ranks + 1)]
    return tuple(Span(a, b) for a, b in pairwise(edges))


def even_shares(total: int, ranks: int, unit: int) -> tuple[Span, ...] | None:
    """Runs of a multiple of `unit`, all alike where that can be; None where a rank would have
    none."""
    for more in EVEN:
        step = lcm(unit, more)
        if total % (step * ranks) == 0:
            return shares(total, ranks, step)
    found = shares(total, ranks, unit)
    return None if any(span.count == 0 for span in found) else found


class _Planner:
    """Cuts the layers of a decoder.

    Args:
        checkpoint: Where they will be read from.
        rank: Whose cuts are made.
        queries: Each rank's heads of q.
        held: Each rank's heads of K and V.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: ModelConfig,
        rank: int,
        queries: tuple[Span, ...],
        held: tuple[Span, ...],
    ) -> None:
        self._checkpoint, self._config, self._rank = checkpoint, config, rank
        self._queries, self._held, self._ranks = queries, held, len(queries)
        self.cuts: dict[str, Cut] = {}
        self.gathered: dict[str, tuple[tuple[Span, ...], tuple[Span, ...]]] = {}

    def vocabulary(self) -> tuple[Span, ...]:
        """Each rank's tokens.

        Raises:
            CheckpointError: there are fewer than ranks, or than ranks of blocks of the head.
        """
        size, unit = self._config.vocab_size, _row_unit(self._checkpoint.scheme_of(HEAD))
        found = even_shares(size, self._ranks, lcm(unit, 64)) or even_shares(
            size, self._ranks, unit
        )
        if found is None:
            raise CheckpointError(self._too_many(HEAD, "outputs", size, unit))
        return found

    def cut_layers(self) -> None:
        """Cut all layers of blocks.

        Raises:
            CheckpointError: one has too few outputs or inputs.
        """
        linears: dict[str, dict[str, str]] = {}  # by their role, in the module they are parts of
        names = (name.rpartition(".") for name in self._checkpoint.names())
        plain = {module for module, _, leaf in names if leaf == "weight"}
        for module in sorted(plain | set(self._checkpoint.quantized_modules)):
            role = role_of(module)
            if role is not None and not is_router(module):
                linears.setdefault(module.rpartition(".")[0], {})[role] = module
        for roles in linears.values():
            for role in ("q", "k", "v"):
                if role in roles:
                    self._cut_heads(roles[role], self._queries if role == "q" else self._held)
            if "o" in roles:
                self._cut_o(roles["o"])
            if "down" in roles:
                self._cut_feed_forward(roles)

    def _rows_of(self, heads: tuple[Span, ...]) -> tuple[Span, ...]:
        size = self._config.head_dim
        return tuple(Span(own.first * size, own.end * size) for own in heads)

    def _cut_heads(self, module: str, heads: tuple[Span, ...]) -> None:
        spans = self._rows_of(heads)
        unit = _row_unit(self._checkpoint.scheme_of(module))
        if not _fit(spans, unit):
            raise CheckpointError(
                f"tensor_parallel {self._ranks}: {module} has scales for every {unit} outputs, and "
                f"a rank's heads are {spans[0].count} of them. Take fewer ranks"
            )
        self.cuts[module] = Cut(rows=spans[self._rank])

    def _cut_o(self, module: str) -> None:
        spans, checkpoint = self._rows_of(self._queries), self._checkpoint
        unit = _column_unit(checkpoint.scheme_of(module))
        if not checkpoint.reorders_inputs(module) and _fit(spans, unit):
            self.cuts[module] = Cut(columns=spans[self._rank])
        else:
            self._gather(module, spans)

    def _cut_feed_forward(self, roles: Mapping[str, str]) -> None:
        down, checkpoint = roles["down"], self._checkpoint
        size, own = checkpoint.weight_shape(down)[1], _column_unit(checkpoint.scheme_of(down))
        readers = [roles[role] for role in ("gate", "up") if role in roles]
        rows = lcm(*(_row_unit(checkpoint.scheme_of(module)) for module in readers))
        spans = even_shares(size, self._ranks, lcm(rows, own))
        if spans is not None and not checkpoint.reorders_inputs(down):
            self.cuts[down] = Cut(columns=spans[self._rank])
        else:
            spans = even_shares(size, self._ranks, rows)
            if spans is None:
                raise CheckpointError(self._too_many(readers[0], "outputs", size, rows))
            self._gather(down, spans)
        self.cuts |= dict.fromkeys(readers, Cut(rows=spans[self._rank]))

    def _gather(self, module: str, inputs: tuple[Span, ...]) -> None:
        """Cut the outputs of a layer that has to read all inputs."""
        rows = self._checkpoint.weight_shape(module)[0]
        unit = _row_unit(self._checkpoint.scheme_of(module))
        outputs = even_shares(rows, self._ranks, unit)
        if outputs is None:
            raise CheckpointError(self._too_many(module, "outputs", rows, unit))
        self.gathered[module] = inputs, outputs
        self.cuts[module] = Cut(rows=outputs[self._rank])

    def _too_many(self, module: str, what: str, size: int, unit: int) -> str:
        apart = "" if unit == 1 else f", which are cut in runs of {unit}"
        return (
            f"tensor_parallel {self._ranks}: {module} has {size} {what}{apart}: too few for so "
            "many ranks. Take fewer ranks"
        )


def _row_unit(scheme: LayerScheme) -> int:
    """Outputs of a layer that cannot be cut apart."""
    return _unit(scheme, 0)


def _column_unit(scheme: LayerScheme) -> int:
    """Inputs of a layer that cannot be cut apart; those that share a scale when they arrive, too,
    unless all of a row do."""
    inputs = scheme.activations
    group = 1 if inputs is None or inputs.group == -1 else inputs.group
    return lcm(_unit(scheme, 1), group)


def _unit(scheme: LayerScheme, dim: int) -> int:
    spec = scheme.weights
    if spec is None:
        return 1
    leaves = ["weight_scale", "weight_packed"]
    if not spec.symmetric:
        leaves.append("weight_zero_point")
    units = (entry_units(leaf, spec)[dim] for leaf in leaves)
    return lcm(*(unit for unit in units if unit != ALL))


def _fit(spans: tuple[Span, ...], unit: int) -> bool:
    """Whether runs begin and end with whole units."""
    return all(span.first % unit == 0 and span.end % unit == 0 for span in spans)
