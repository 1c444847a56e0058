"""From the run of a model's code on shapes alone to its structure, or why it is refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from formats.errors import CheckpointError
from formats.families.block_layers import block_of
from formats.modeling.config import transformers_config
from formats.modeling.experts import Experts
from formats.modeling.load import FAULTS
from formats.modeling.model import built, named_modules, renamed_modules, take_apart, tied_names
from formats.modeling.states import cache_argument, find_mixers, narrow_linears
from formats.modeling.structure import AttentionSite, BlockStructure, Structure
from formats.modeling.trace import PROBE, Call, Key, Seen, all_zero, is_stack, key_of, run

NEUTRAL = frozenset(  # arguments that change no number, or whose meaning is kept elsewhere
    """dropout scaling sliding_window is_causal position_ids use_cache cache_position layer_idx
    output_attentions output_hidden_states output_router_logits logits_to_keep""".split()
)


FEW = 32  # inputs or outputs below which a layer stays in float: it weighs what others compute
WEIGHING = frozenset(
    {"per_layer_input_gate", "per_layer_projection", "linear_left", "linear_right"}
)
"""Layers of Gemma 4 and 3n through which a block's own embedding is added, and those of a learned
residual of low rank. They stay in float: they have a fortieth of a block's weights, and the first
reads the residual stream without a norm."""
TOKENWISE = frozenset({"mlp", "moe"})  # types of blocks that look at one token alone


def found_structure(values: Mapping[str, Any]) -> Structure:
    """The structure of config.json's model; errors as of `formats.modeling.layers.structure_of`."""
    kind = str(values.get("model_type"))
    if "auto_map" in values:
        raise _refused(kind, "it needs code of its own (auto_map), which is never run")
    config = transformers_config(values)
    if config.is_encoder_decoder:
        raise _refused(kind, "it is an encoder and a decoder; only decoders are run here")
    model = _model(kind, config)
    mixers = _mixers(kind, model)
    apart = take_apart(model)
    seen = _seen(kind, model, masked=not mixers)
    names = named_modules(model)
    mixers |= _without_convolution(model, seen, names, mixers)
    blocks = _calls_by_block(kind, model, seen, names, mixers)
    stored, tied = apart.stored, tied_names(model)
    renamed = {name: own for name, own in stored.items() if name != own}
    modules = _stored_modules(names, stored)
    return Structure(
        blocks=tuple(_blocks(model, blocks, seen, modules, mixers)),
        list=next(iter(blocks)).rpartition(".")[0],
        embedding=modules[model.get_input_embeddings()],
        norm=_last_norm(model, seen, modules),
        head=modules[model.get_output_embeddings()],
        stored=renamed,
        stacks=apart.stacks,
        listed=apart.listed,
        tied={stored.get(a, a): stored.get(b, b) for a, b in tied.items()},
    )


def _seen(kind: str, model: Any, *, masked: bool) -> Seen:
    """What a run of the code shows; on zeros where it, or one of its masks, looks at numbers."""
    try:
        seen = run(model, masked=masked)
        if all(call.mask is None or _allowed(call, seen, 0, 0) for call in seen.calls):
            return seen
    except FAULTS as error:
        if not isinstance(error, NotImplementedError) and "meta tensor" not in str(error):
            raise _refused(kind, _why_not_run(error)) from error
    all_zero(model)
    try:
        return run(model, masked=masked)
    except FAULTS as error:
        raise _refused(kind, _why_not_run(error)) from error


def _why_not_run(error: Exception) -> str:
    """Why code did not run without data, by what it raised."""
    reason = " ".join(str(error).split())[:200]
    return f"its code does not run on shapes alone ({type(error).__name__}: {reason})"


def _refused(kind: str, why: str) -> CheckpointError:
    return CheckpointError(f"config.json: model_type {kind!r} is not supported: {why}")


def _model(kind: str, config: PretrainedConfig) -> Any:
    """The model with the attention that writes down."""
    try:
        return built(config, PROBE).eval()
    except KeyError as error:
        if error.args == (PROBE,):
            why = "its attention does not go through transformers' attention interface"
            raise _refused(kind, why) from error
        raise _refused(kind, f"transformers cannot build it (KeyError: {error})") from error
    except FAULTS as error:
        reason = " ".join(str(error).split())
        raise _refused(kind, f"transformers cannot build a causal LM of it: {reason}") from error


def _mixers(kind: str, model: nn.Module) -> dict[str, nn.Module]:
    """What keeps a state beside K and V, by names in the code; other states are refused."""
    try:
        return find_mixers(model)
    except LookupError as error:
        why = (
            f"its blocks keep another state than K and V ({error}), and its code does not take it "
            "from a cache"
        )
        raise _refused(kind, why) from error


def _without_convolution(
    model: nn.Module, seen: Seen, names: Mapping[nn.Module, str], mixers: Mapping[str, nn.Module]
) -> dict[str, nn.Module]:
    """Modules that take a cache in blocks without attention and convolutions, by names in the
    code: what they keep there is a state, or they are refused where it is looked for."""
    calling = {block_of(f"{names[call.module]}.q") for call in seen.calls}
    known = calling | {block_of(f"{name}.q") for name in mixers}
    found = dict[str, nn.Module]()
    for parent in {block.rpartition(".")[0] for block in calling if block is not None}:
        for index, block in model.get_submodule(parent).named_children():
            name = f"{parent}.{index}"
            parts = () if name in known else block.named_modules(prefix=name)
            takers = {own: part for own, part in parts if own != name and cache_argument(part)}
            found |= dict(list(takers.items())[-1:])
    return found


def _calls_by_block(
    kind: str,
    model: nn.Module,
    seen: Seen,
    names: Mapping[nn.Module, str],
    mixers: Mapping[str, nn.Module],
) -> dict[str, Call | None]:
    """The attention of each block, by the block's name in the code, in their order.

    Raises:
        CheckpointError: attention is called nowhere, outside of blocks, or more than once in one;
            or a block mixes tokens otherwise than by attention and by mixers.
    """
    if not seen.calls and not mixers:
        why = "its attention does not go through transformers' attention interface"
        raise _refused(kind, why)
    found: dict[str, Call] = {}
    inside = {part for mixer in mixers.values() for part in mixer.modules()}
    for call in seen.calls:
        block = block_of(f"{names[call.module]}.q")
        if block is None:
            raise _refused(kind, f"{names[call.module]} calls attention outside of blocks")
        if block in found:
            raise _refused(kind, _why_not_twice(found[block], call, names))
        if call.module in inside:
            raise _refused(kind, "its attention keeps a state of its own beside K and V")
        found[block] = call
    stateful = {block_of(f"{name}.q") for name in mixers}
    parents = {str(block).rpartition(".")[0] for block in found.keys() | stateful}
    if len(parents) > 1:
        raise _refused(kind, f"its blocks lie in several lists: {', '.join(sorted(parents))}")
    parent = parents.pop()
    every = [f"{parent}.{name}" for name, _ in model.get_submodule(parent).named_children()]
    layers = getattr(getattr(model, "config", None), "layer_types", None) or ()
    kinds = dict(zip(every, map(str, layers), strict=False))
    others = [name for name in every if name not in found and name not in stateful]
    unknown = {kinds.get(name, "nothing of config.json") for name in others} - TOKENWISE
    if unknown:
        why = f"{len(others)} of {len(every)} blocks have neither attention nor a known state: "
        raise _refused(kind, why + ", ".join(sorted(unknown)))
    for call in found.values():
        if _sees_later_tokens(call, seen):
            raise _refused(kind, "its tokens see later ones: it is an encoder")
    return {name: found.get(name) for name in every}


def _why_not_twice(first: Call, second: Call, names: Mapping[nn.Module, str]) -> str:
    """Why a block that calls attention twice is not run, as its calls show it."""
    here, there = names[first.module], names[second.module]
    if first.module is not second.module:
        why = f"a block attends more than once ({here}, {there})"
    elif key_of(first.key) == key_of(second.key):
        why = f"{here} attends twice with the same keys and other values (differential attention)"
    else:
        why = f"its blocks run several times on each token, and so attends {here}"
    return f"{why}, and a block has one cache of K and V here"


def _allowed(call: Call, seen: Seen, query: int, key: int) -> bool | None:
    """Whether a query may see a key, by positions; None where the mask is none that is known."""
    rule = None if call.mask is None else seen.masks.get(key_of(call.mask)[0])
    if rule is None:
        return None
    try:
        return bool(rule(*map(torch.tensor, (0, 0, query, key))))
    except (RuntimeError, IndexError):  # it asks for a tensor's data
        return None


def _sees_later_tokens(call: Call, seen: Seen) -> bool:
    causal = call.arguments.get("is_causal")
    causal = getattr(call.module, "is_causal", True) if causal is None else causal
    seen_later = _allowed(call, seen, 0, 1)
    return not causal if seen_later is None else seen_later


def _stored_modules(
    names: Mapping[nn.Module, str], stored: Mapping[str, str]
) -> dict[nn.Module, str]:
    """Names of modules as the names of their tensors in the files have them."""
    renamed = renamed_modules(stored)
    return {module: renamed.get(name, name) for module, name in names.items()}


def _last_norm(model: Any, seen: Seen, modules: Mapping[nn.Module, str]) -> str | None:
    """What made the input of the head, if it is a norm."""
    read = seen.reads.get(model.get_output_embeddings())
    maker = None if read is None else seen.maker(read)
    return modules[maker] if maker is not None and is_norm(maker) else None


def is_norm(module: nn.Module) -> bool:
    """Whether a module without others has a weight for each channel."""
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.dim() == 1


def _blocks(
    model: nn.Module,
    calls: Mapping[str, Call | None],
    seen: Seen,
    modules: Mapping[nn.Module, str],
    mixers: Mapping[str, nn.Module],
) -> Iterator[BlockStructure]:
    narrow = {part for mixer in mixers.values() for part in narrow_linears(mixer)}
    narrow |= {part for part in model.modules() if is_linear(part) and min(_shape(part)) < FEW}
    narrow |= {part for part in seen.reads if modules[part].rpartition(".")[2] in WEIGHING}
    for name, call in calls.items():
        block = model.get_submodule(name)
        routers = {part for part in _routers(block) if part in seen.reads}
        every = [
            part
            for part in block.modules()
            if is_linear(part) and part in seen.reads and part not in routers | seen.weighed
        ]
        linears = [part for part in every if part not in narrow]
        readers = [part for part in block.modules() if part in routers or part in set(every)]
        inputs, norms = _inputs(readers, seen, modules)
        yield BlockStructure(
            name=modules[block],
            attention=None if call is None else _site(call, linears, seen, modules),
            linears=tuple(modules[part] for part in linears),
            routers=tuple(modules[part] for part in readers if part in routers),
            inputs=inputs,
            norms=norms,
            weighed=tuple(modules[part] for part in block.modules() if part in seen.weighed),
            mixers=tuple(own for own in mixers if own.startswith(f"{name}.")),
            narrow=tuple(modules[part] for part in every if part in narrow),
            whole=tuple(modules[part] for part in block.modules() if is_stack(part)),
            outputs=seen.tuples.get(block),
            lends=None if call is None or seen.owner(call) is not call else seen.lent_as(call),
        )


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer and computes as one."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def _routers(block: nn.Module) -> Iterator[nn.Module]:
    """Modules beside experts that give each of them, or a shared one, its weight."""
    for module in block.modules():
        stacks = [part for part in module.children() if isinstance(part, Experts) or is_stack(part)]
        for stack in stacks:
            count = len(stack) if isinstance(stack, Experts) else _experts(stack)
            inside = set(stack.modules())
            for part in set(module.modules()) - inside:
                if _shape(part)[:-1] in ((1,), (count,)):
                    yield part


def _shape(module: nn.Module) -> tuple[int, ...]:
    """That of a module's weight; empty without one."""
    weight = getattr(module, "weight", None)
    return tuple(weight.shape) if isinstance(weight, Tensor) else ()


def _experts(stack: nn.Module) -> int:
    return stack.get_parameter("down_proj").shape[0]


def _inputs(
    readers: Sequence[nn.Module], seen: Seen, modules: Mapping[nn.Module, str]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """A name for what each layer reads, and which of these names are norms'."""
    first: dict[Key, str] = {}
    norms: dict[str, None] = {}
    for part in readers:
        read = seen.reads[part]
        maker = seen.maker(read)
        if maker is not None and is_norm(maker):
            norms[modules[maker]] = None
            first.setdefault(key_of(read), modules[maker])
        first.setdefault(key_of(read), modules[part])
    return {modules[part]: first[key_of(seen.reads[part])] for part in readers}, tuple(norms)


def _site(
    call: Call, linears: Sequence[nn.Module], seen: Seen, modules: Mapping[nn.Module, str]
) -> AttentionSite:
    outputs = {key_of(seen.reads[part]): part for part in linears}
    value, output = seen.maker(call.value), outputs.get(key_of(call.out))
    window, reach, other = _window(call, seen)
    owner = seen.owner(call)
    arguments = [
        name
        for name, given in call.arguments.items()
        if name not in NEUTRAL and given is not None and given is not False
    ]
    return AttentionSite(
        module=modules[call.module],
        query_heads=call.query.shape[1],
        kv_heads=call.key.shape[1],
        key_size=call.key.shape[-1],
        value_size=call.value.shape[-1],
        window=window,
        reach=reach,
        arguments=tuple(arguments + other),
        value=modules[value] if value is not None and value in linears else None,
        output=modules[output] if output is not None else None,
        lender=None if owner is call else modules[owner.module],
    )


def _window(call: Call, seen: Seen) -> tuple[int | None, int | None, list[str]]:
    """`window` and `reach` of a site; and ["mask"] where a mask says something else."""
    size = call.arguments.get("sliding_window")
    far = 1 << 24
    sees_first = _allowed(call, seen, far, 0)
    if call.mask is not None and sees_first is None:
        return size, None, ["mask"]
    if call.mask is None or sees_first:
        return size, None, []
    if size is None:
        chunk = _chunk(call, seen, far)
        if chunk is not None:
            return None, chunk, []
        size = _reach(call, seen, far)
    seen_whole = _allowed(call, seen, far, far - size + 1)
    fits = seen_whole and not _allowed(call, seen, far, far - size)
    return size, None, [] if fits else ["mask"]


def _chunk(call: Call, seen: Seen, far: int) -> int | None:
    """Tokens of a chunk, where a query sees all before it in its own alone; None elsewhere."""
    size, high = 1, far  # of so many first tokens the last one sees the first
    while size < high:
        middle = (size + high + 1) // 2
        if _allowed(call, seen, middle - 1, 0):
            size = middle
        else:
            high = middle - 1
    ends = (size, 2 * size)
    fits = all(_allowed(call, seen, at - 1, at - size) for at in ends)
    return size if fits and not any(_allowed(call, seen, at, at - 1) for at in ends) else None


def _reach(call: Call, seen: Seen, far: int) -> int:
    """How many tokens a query at `far` sees, if it sees the last ones."""
    low, high = 1, far
    while low < high:
        middle = (low + high + 1) // 2
        if _allowed(call, seen, far, far - middle + 1):
            low = middle
        else:
            high = middle - 1
    return low
