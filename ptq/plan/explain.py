"""What a recipe does to each module, step by step: the lines of `ptq explain`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from formats.cache_scheme import KVCacheSpec
from formats.errors import RequestError
from formats.families.names import any_expert
from ptq.plan.head import HEAD_STAGES
from ptq.plan.modules import ModulePlan
from ptq.plan.plan import Plan
from ptq.text import matches


def explain(plan: Plan, pattern: str | None = None) -> Iterator[str]:
    """Lines for every module of a plan: its fate, and each step on the way.

    Args:
        plan: Of a recipe.
        pattern: Only modules whose name contains it, or matches it where it has `*` or `?`.

    Raises:
        RequestError: the pattern matches no module.
    """
    attentions = list(plan.attentions)
    known = [module.name for module in plan.modules] + attentions
    if pattern is not None and not any(matches(name, pattern) for name in known):
        raise RequestError(
            f"--module {pattern!r} matches none of {len(known)} modules, such as {known[0]}"
        )
    chosen = [m for m in plan.modules if pattern is None or matches(m.name, pattern)]
    for experts in _alike(chosen):
        first, several = experts[0], len(experts) > 1
        name, count = (_starred(first.name), f", {len(experts)} times") if several else ("", "")
        yield f"{name or first.name}  {first.shape[0]} x {first.shape[1]}{count}"
        for i, step in enumerate(steps(plan, first), 1):
            yield f"  {i}. {_starred(step) if several else step}"
    for block, attention in zip(plan.blocks, attentions, strict=True):
        cache = plan.recipe.cache_of(block)
        if cache is not None and (pattern is None or matches(attention, pattern)):
            yield f"{attention}  cache"
            yield f"  1. {cache_step(plan, cache)}"


def _alike(modules: Iterable[ModulePlan]) -> Iterable[list[ModulePlan]]:
    """The same layer of all experts of a block that share their fate, and every other one alone."""
    groups: dict[tuple[object, ...], list[ModulePlan]] = {}
    for module in modules:
        key = (_starred(module.name), module.shape, module.action, module.reason)
        groups.setdefault(key, []).append(module)
    return groups.values()


def _starred(text: str) -> str:
    return any_expert(text)


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
    recipe, scheme = plan.recipe, plan.recipe.scheme_of(module.name)
    for method in recipe.methods:
        if module.name == plan.head and method.stage not in HEAD_STAGES:
            continue
        yield from method.explain(module.name, scheme, plan.smoothing)
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
    if spec.dynamic:
        how = "each head of each token scaled when it is cached"
        return f"K and V: {kinds}, {how}{turned}{centred}"
    method = plan.recipe.observers.kv_cache.method
    static = f"{kinds} {spec.granularity}, static scales by {method}"
    return f"K (after RoPE) and V: {static}{turned}{centred}"
