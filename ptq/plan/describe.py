"""A plan as `ptq check` shows it: what a run would do to each layer, and what it would take.

`ptq explain` shows what a recipe does to each module, step by step.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from calibrate.data import TokenSet
from formats.cache_scheme import KVCacheSpec
from formats.errors import RequestError
from formats.families.block_layers import any_expert, expert_of, split_name
from formats.memory import rss_bytes
from formats.published import is_turned
from ptq.methods.common.spec import PlannedLayer
from ptq.output import is_taken
from ptq.plan.modules import HEAD_STAGES, ModulePlan
from ptq.plan.plan import Plan
from ptq.text import duration_text, matches, size_text

PHASES = 4  # that are named, the longest
LOOSE = 0.05  # of all parameters in other parts of blocks, such as stacks of experts: worth a line


def describe_plan(plan: Plan, data: Mapping[str, TokenSet]) -> Iterator[str]:
    """What a run would do, line by line."""
    recipe, model, scheme = plan.recipe, plan.model, plan.recipe.scheme
    yield (
        f"model        {recipe.model.path}: {model.model_type}, {model.blocks} blocks, "
        f"{model.parameters / 1e6:.1f} M parameters, {model.dtype}, {size_text(model.nbytes)}"
    )
    yield f"scheme       {scheme.wac}{_other_layers(plan)}"
    for row in group_modules(plan):
        yield f"  {row}"
    if model.loose > LOOSE * model.parameters:
        share = f"{model.loose / model.parameters:.0%}"
        yield f"  {share} of the parameters are of no linear layer of a block, and stay in float"
    yield from (f"  {line}" for line in plan.groups)
    if plan.shared is not None:
        yield f"  {plan.head} is the embedding, too: one tensor for both, which runs here alone"
    counts = Counter(recipe.cache_of(block) for block in plan.blocks)
    for kv, count in counts.items():
        if kv is not None:
            kind = "dynamic" if kv.dynamic else "static"
            yield f"  K and V of {count} blocks: {kv.text}, {kind}"
    if scheme.states is not None:
        yield f"  recurrent states: {scheme.states.text}; running ones in float"
    yield f"methods      {', '.join(method.name for method in recipe.methods) or 'none'}"
    if recipe.budget is not None:
        chosen = (
            "a run chooses the weights of each group of layers; told is the recipe's own scheme"
        )
        yield f"budget       {recipe.budget.text} for {recipe.budget.target}: {chosen}"
    yield from (f"  {transform}" for transform in plan.transforms)
    if any(is_turned({"model_type": model.model_type}, name) for name in plan.quantized):
        yield "  the checkpoint opens here alone: to transformers its layers are not linear ones"
    if plan.smoothing:
        yield f"  smoothed inputs: {', '.join(dict.fromkeys(g.kind for g in plan.smoothing))}"
        if any(scheme.static_input for scheme in plan.schemes.values()):
            yield from (
                f"  {method.static_inputs_note}"
                for method in recipe.methods
                if method.static_inputs_note
            )
    if plan.family is None and (plan.smoothing or plan.left):
        yield from (f"  found on the blocks: {line}" for line in _found_groups(plan))
        yield from (f"  left alone: {line}" for line in plan.left)
    also = data["evaluation"].also if data else None
    for split, tokens in (*data.items(), *([("also", also)] if also is not None else [])):
        yield (
            f"{split:<13}{tokens.source}: {len(tokens.ids)} sequences, {tokens.tokens} tokens, "
            f"fingerprint {tokens.fingerprint[:12]}"
        )
        yield from (f"  {note}" for note in tokens.notes)
        if tokens.warning:
            yield f"  careful: {tokens.warning}"
    yield from describe_prediction(plan)
    taken = " (exists: run with --force)" if is_taken(recipe.output.path) else ""
    yield f"output       {recipe.output.path}{taken}"


def _found_groups(plan: Plan) -> Iterator[str]:
    """Where nothing is declared: sources and consumers of smoothing groups, of all blocks."""
    kinds: dict[str, None] = {}
    for group in plan.smoothing:
        consumers = ", ".join(name.removeprefix(f"{group.block}.") for name in group.consumers[:4])
        more = f" and {len(group.consumers) - 4} more" if len(group.consumers) > 4 else ""
        source = group.source.removeprefix(f"{group.block}.")
        kinds[any_expert(f"{source} -> {consumers}{more}")] = None
    yield from kinds


def describe_prediction(plan: Plan) -> Iterator[str]:
    """What a run would hold: room on the disk, and memory."""
    predicted, process = plan.prediction, rss_bytes()
    host = size_text(process + predicted.memory_bytes)
    memory = f"memory about {host}, {size_text(process)} of it the process itself"
    if predicted.device_bytes:
        memory += f"; GPU memory about {size_text(predicted.device_bytes)}"
        chosen = plan.recipe.device
        if not isinstance(chosen, str) and (chosen.gpus or 1) > 1:
            memory += f", of each of {chosen.gpus} at most"
    yield (
        f"predicted    checkpoint {size_text(predicted.checkpoint_bytes)} "
        f"(original {size_text(plan.model.nbytes)}), "
        f"on the disk about {size_text(predicted.disk_bytes)} at most"
    )
    yield f"  {memory}"


def describe_seconds(seconds: Mapping[str, float]) -> str:
    """How long quantization is predicted to take, by phase and in `total`."""
    phases = sorted(((s, phase) for phase, s in seconds.items() if phase != "total"), reverse=True)
    parts = ", ".join(f"{phase} {duration_text(s)}" for s, phase in phases[:PHASES])
    total = duration_text(seconds["total"])
    return f"time         about {total} are predicted ({parts}), data and report aside"


def _other_layers(plan: Plan) -> str:
    """How many layers have a scheme of their own, if any."""
    main = plan.recipe.scheme.of_layers
    count = sum(scheme != main for scheme in plan.schemes.values())
    return f", but for {count} of {len(plan.quantized)} quantized layers" if count else ""


def group_modules(plan: Plan) -> Iterator[str]:
    """Linear layers with the same fate in one row, whatever their block and their expert."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for module in plan.modules:
        name = re.sub(r"\.\d+(?=\.)", ".*", module.name)
        shape = "x".join(map(str, module.shape))
        groups.setdefault((name, shape, module.action, module.reason), []).append(module.name)
    width = max(len(name) for name, *_ in groups)
    for (name, shape, action, reason), names in groups.items():
        split = filter(None, map(split_name, names))
        blocks = _indices((int(index) for index, _, _ in split), "blocks")
        experts = _indices(map(expert_of, names), ", experts")
        where = f"{blocks}{experts}"
        yield f"{name:<{width}}  {shape:>11}  {where:<14}  {action:<8}  {reason}".rstrip()


def _indices(numbers: Iterable[int | None], title: str) -> str:
    """Which blocks or experts layers belong to; empty for those that belong to none."""
    found = {number for number in numbers if number is not None}
    return f"{title} {_ranges(sorted(found))}" if found else ""


def _ranges(numbers: Iterable[int]) -> str:
    """Ascending numbers as ranges, such as `0-3, 5`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def explain(plan: Plan, pattern: str | None = None) -> Iterator[str]:
    """Lines for every module of a plan: its fate, and each step on the way.

    Args:
        pattern: Only modules whose name contains it, or matches it where it has `*` or `?`.

    Raises:
        RequestError: the pattern matches no module.
    """
    known = [module.name for module in plan.modules]
    known += [name for name in plan.attentions if name is not None]
    if pattern is not None and not any(matches(name, pattern) for name in known):
        raise RequestError(
            f"--module {pattern!r} matches none of {len(known)} modules, such as {known[0]}"
        )
    chosen = [m for m in plan.modules if pattern is None or matches(m.name, pattern)]
    for experts in _alike(chosen):
        first, several = experts[0], len(experts) > 1
        name, count = (any_expert(first.name), f", {len(experts)} times") if several else ("", "")
        yield f"{name or first.name}  {first.shape[0]} x {first.shape[1]}{count}"
        for i, step in enumerate(steps(plan, first), 1):
            yield f"  {i}. {any_expert(step) if several else step}"
    for block, attention in zip(plan.blocks, plan.attentions, strict=True):
        cache = plan.recipe.cache_of(block)
        if attention is None or cache is None:
            continue
        if pattern is None or matches(attention, pattern):
            yield f"{attention}  cache"
            yield f"  1. {cache_step(plan, cache)}"


def _alike(modules: Iterable[ModulePlan]) -> Iterable[list[ModulePlan]]:
    """The same layer of all experts of a block that share their fate, and every other one alone."""
    groups: dict[tuple[object, ...], list[ModulePlan]] = {}
    for module in modules:
        key = (any_expert(module.name), module.shape, module.action, module.reason)
        groups.setdefault(key, []).append(module)
    return groups.values()


def steps(plan: Plan, module: ModulePlan) -> Iterator[str]:
    """What happens to a linear layer, in order."""
    if module.action != "quantize":
        yield f"stays as it is: {module.reason}"
        groups = [group for group in plan.smoothing if module.name in group.routers]
        quantized = set(plan.quantized) if groups else set()
        folded = (group.source for group in groups if quantized.issuperset(group.consumers))
        for source in dict.fromkeys(folded):
            yield f"but for powers of two in its columns, by which {source} is divided"
        return
    if module.name in plan.predicting:
        yield f"stored as {module.reason}"
        return
    recipe, scheme = plan.recipe, plan.recipe.scheme_of(module.name)
    for method in recipe.methods:
        if module.name == plan.head and method.stage not in HEAD_STAGES:
            continue
        yield from method.explain(PlannedLayer(module.name, scheme, plan.smoothing))
    if scheme.static_input:
        shared = f", shared by {module.fused_group}" if module.fused_group else ""
        yield f"input scale by {recipe.observers.input.method} of what it sees{shared}"
    both = f", once for {plan.shared}" if module.name == plan.head and plan.shared else ""
    chosen = f", or as {recipe.budget.text} has it chosen" if recipe.budget else ""
    yield f"stored as {module.reason}{both}{chosen}"


def cache_step(plan: Plan, spec: KVCacheSpec) -> str:
    """How K and V of a block are cached."""
    kinds = f"{spec.dtype}, V {spec.value_dtype}" if spec.value_dtype else spec.dtype
    turned = ", K turned head by head" if spec.rotate_keys else ""
    centred = ", K less its channels' means" if spec.center_keys else ""
    fed = ", its errors shaped by queries" if spec.compensate_keys else ""
    if spec.dynamic:
        how = "each head of each token scaled when it is cached"
        return f"K and V: {kinds}, {how}{turned}{centred}{fed}"
    method = plan.recipe.observers.kv_cache.method
    static = f"{kinds} {spec.granularity}, static scales by {method}"
    return f"K (after RoPE) and V: {static}{turned}{centred}"
