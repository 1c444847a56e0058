"""Smoothing groups of models that no family declares: found by a check on their blocks.

What may be a source and who reads it is a guess from what the block's code does on shapes
(`formats.modeling`): a norm and the layers that read it, V's layer and the one that reads what
attention gives, a layer and the next one of its module. Each guess is folded into a block with
random factors, the block runs on a few random tokens before and after, and only where the two
outputs agree the group is one. Blocks of the same build are checked once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from calibrate.block import DecoderBlock
from calibrate.stream import BlockStream
from formats.families.block_layers import SmoothingGroup, SmoothingKind, any_expert, expert_of
from formats.modeling.structure import BlockStructure, Structure
from ptq.methods.common.float_model import FloatModel
from ptq.methods.common.folding import source_channel

TOKENS = 24
SAME = 1e-5  # relative difference of outputs in fp32
FORMS: tuple[float, ...] = (0.0, 1.0)  # of norms: what is added to the weight where it is used


def checked_groups(
    source: FloatModel,
    config: PretrainedConfig,
    structure: Structure,
    kinds: Sequence[SmoothingKind],
) -> tuple[tuple[SmoothingGroup, ...], tuple[str, ...]]:
    """The groups of a found model that are of the wanted kinds.

    Args:
        source: The model; the embedding is read, and a block of each build.
        kinds: What is wanted; without any, nothing is read.

    Returns:
        (those that may be smoothed, block by block; of each build of blocks, what was tried and is
        left alone, for a person).

    Raises:
        CheckpointError: the model cannot be read or run.
    """
    stream = BlockStream(config, source.tensor)
    seeded = torch.Generator().manual_seed(0)
    stream.start([torch.randint(config.get_text_config().vocab_size, (TOKENS,), generator=seeded)])
    known: dict[object, tuple[list[SmoothingGroup], list[str]]] = {}
    groups: list[SmoothingGroup] = []
    for index, block in enumerate(structure.blocks):
        build = _build(block)
        if build not in known:
            loaded = stream.load(index)
            lent = torch.randn(TOKENS, loaded.handed.rows.lent, generator=seeded)
            loaded.inputs = [torch.cat((hidden, lent), dim=1) for hidden in stream.inputs]
            known[build] = _checked(block, loaded, kinds)
        first = known[build][0]
        groups += [_moved(group, first[0].block, block.name) for group in first]
    left = dict.fromkeys(line for _, lines in known.values() for line in lines)
    return tuple(groups), tuple(left)


def _build(block: BlockStructure) -> object:
    """What blocks of the same code and sizes have in common."""
    place, site = len(block.name), block.attention
    attention = site and replace(
        site, module="", value=None, output=None, window=None, lender=site.lender and ""
    )
    reads = [(name[place:], read[place:]) for name, read in block.inputs.items()]
    return tuple(reads), attention, block.lends


def _moved(group: SmoothingGroup, here: str, there: str) -> SmoothingGroup:
    """A block's group as that of another one of the same build."""

    def name(full: str) -> str:
        return there + full.removeprefix(here)

    return group.model_copy(
        update={
            "block": there,
            "source": name(group.source),
            "consumers": tuple(map(name, group.consumers)),
            "routers": tuple(map(name, group.routers)),
            "tied": None if group.tied is None else name(group.tied),
        }
    )


def _checked(
    block: BlockStructure, loaded: DecoderBlock, kinds: Sequence[SmoothingKind]
) -> tuple[list[SmoothingGroup], list[str]]:
    """The groups of one block that pass, and what is left alone."""
    found: dict[str, list[SmoothingGroup]] = {}
    tried: dict[str, str] = {}
    wanted = loaded.run(0)
    for together in _candidates(block, loaded):
        kind, readers = together[0].kind, ", ".join(together[0].consumers)
        if kind not in kinds or readers in found:
            continue
        head = 1 if block.attention is None else block.attention.value_size
        fits = (form for form in FORMS if _agrees(together, form, loaded, head, wanted))
        passed = next(fits, None)
        if passed is not None:
            found[readers] = [g.model_copy(update={"offset": passed}) for g in together]
            tried.pop(readers, None)
        else:
            tried[readers] = f"{_short(together[0].consumers, block)}: {kind}"
    all_of_them = [group for own in found.values() for group in own]
    ordered = [group for kind in kinds for group in all_of_them if group.kind == kind]
    return ordered, [f"{text} (no factor moves into it)" for text in tried.values()]


def _short(names: Sequence[str], block: BlockStructure) -> str:
    return ", ".join(any_expert(name.removeprefix(f"{block.name}.")) for name in names[:3])


def _candidates(block: BlockStructure, loaded: DecoderBlock) -> Iterator[list[SmoothingGroup]]:
    """Guesses; those of all experts of a block in one list."""
    site = block.attention
    for norm in block.norms:
        readers = [name for name, read in block.inputs.items() if read == norm]
        linears = tuple(name for name in readers if name in block.linears)
        inside = site is not None and any(
            name.startswith(f"{site.module}.") or name == site.value for name in linears
        )
        yield [
            SmoothingGroup(
                kind="attention_input" if inside else "mlp_input",
                block=block.name,
                source=norm,
                consumers=linears,
                routers=tuple(name for name in readers if name in block.routers),
            )
        ]
    if site is not None and site.value is not None and site.output is not None:
        group = SmoothingGroup(
            kind="attention_output", block=block.name, source=site.value, consumers=(site.output,)
        )
        yield [group]
    yield from _inner(block, loaded)


def _inner(block: BlockStructure, loaded: DecoderBlock) -> Iterator[list[SmoothingGroup]]:
    """A layer and the next one of its module, for every pair whose sizes fit."""
    output = None if block.attention is None else block.attention.output
    alone = [n for n in block.linears if block.inputs[n] == n and n != output]
    pairs: dict[tuple[str, str], list[SmoothingGroup]] = {}
    for down in alone:
        module = down.rpartition(".")[0]
        for up in block.linears:
            beside = up != down and up.rpartition(".")[0] == module
            if beside and loaded.linears[up].out_features == loaded.linears[down].in_features:
                tied = any_expert(up) if expert_of(up) is not None else None
                group = SmoothingGroup(
                    kind="mlp_output", block=block.name, source=up, consumers=(down,), tied=tied
                )
                pairs.setdefault((any_expert(up), any_expert(down)), []).append(group)
    yield from pairs.values()


def _agrees(
    groups: Sequence[SmoothingGroup], form: float, loaded: DecoderBlock, head: int, wanted: Tensor
) -> bool:
    """Whether a block with its groups folded by random factors gives what it gave."""
    linear = isinstance(loaded.submodule(groups[0].source), nn.Linear)
    if not groups[0].consumers or (form and linear):
        return False
    with _folded(groups, form, loaded, head):
        found = loaded.run(0)
    return bool((found - wanted).norm() <= SAME * wanted.norm())


@contextmanager
def _folded(
    groups: Sequence[SmoothingGroup], form: float, loaded: DecoderBlock, head: int
) -> Iterator[None]:
    """Fold groups by random factors between 1/2 and 2, for a while."""
    seeded, kept = torch.Generator().manual_seed(1), dict[nn.Parameter, Tensor]()

    def put(parameter: nn.Parameter, value: Tensor) -> None:
        kept.setdefault(parameter, parameter.data)
        parameter.data = value

    for group in groups:
        source = loaded.submodule(group.source)
        weight = source.get_parameter("weight")
        scale = torch.exp2(2 * torch.rand(len(weight), generator=seeded) - 1).to(weight.device)
        rows = scale.view(-1, *(1 for _ in weight.shape[1:]))
        put(weight, (weight + form) / rows - form)
        if isinstance(bias := getattr(source, "bias", None), nn.Parameter):
            put(bias, bias / scale)
        for name in (*group.consumers, *group.routers):
            reader = loaded.submodule(name).get_parameter("weight")
            channel = source_channel(len(weight), reader.shape[1], head)
            put(reader, reader * scale[channel.to(scale.device)])
    try:
        yield
    finally:
        for parameter, data in kept.items():
            parameter.data = data
