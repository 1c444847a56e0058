"""One run of a model's code on the meta device: who calls attention, and who reads what.

The code runs on tensors without data, so a model of any size takes seconds. Code that looks at data
(which tokens an expert gets) runs on zeros: one of them stands for all of a weight (`all_zero`).
Attention is a function of ours that writes down what it gets; modules without others write down
what they read and give.
Two tensors are the same values if they share a storage from the same element on: all of them are
kept until the run ends, so that no storage is used twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import masking_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from formats.modeling.experts import Experts

PROBE = "ptq_probe"
TOKENS = 8
Key = tuple[Any, ...]  # storage, first element, elements


def key_of(x: Tensor) -> Key:
    """What two tensors share that hold the same values, whatever their shapes."""
    return x.untyped_storage()._cdata, x.storage_offset(), x.numel()


@dataclass
class Call:
    """One call of attention.

    Attributes:
        module: That calls it.
        query: [1, heads, tokens, head size].
        key: [1, KV heads, tokens, head size].
        value: [1, KV heads, tokens, head size of V].
        out: [1, tokens, heads, head size of V].
        mask: What `Seen.masks` knows by its storage; None where the module gives none.
        arguments: All others, by name.
    """

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    mask: Tensor | None
    arguments: dict[str, Any]

    @property
    def cached(self) -> tuple[Key, ...]:
        """What K and V share with those of another call that reads the same."""
        return key_of(self.key), key_of(self.value)


@dataclass
class Seen:
    """What the run has shown.

    Attributes:
        calls: Calls of attention, in their order.
        reads: What each module reads that has no others in it, or tensors of its own.
        makers: The module that made a tensor.
        tuples: How many values each module of a list gives, where it gives a tuple.
        lent: What the blocks have put into the mapping that each of them is handed, if there is
            one: K and V that later blocks read.
        weighed: Linear layers whose weight other code looks at, beside calling them.
        masks: Of each mask's storage, whether (batch, head, query, key) may be seen.
        kept: Tensors that must not be freed before the run ends.
    """

    calls: list[Call] = field(default_factory=list)
    reads: dict[nn.Module, Tensor] = field(default_factory=dict)
    makers: dict[Key, nn.Module] = field(default_factory=dict)
    tuples: dict[nn.Module, int] = field(default_factory=dict)
    lent: MutableMapping[str, Any] = field(default_factory=dict)
    weighed: set[nn.Module] = field(default_factory=set)
    masks: dict[int, Callable[..., Any]] = field(default_factory=dict)
    kept: list[Tensor] = field(default_factory=list)
    device: str = "meta"

    def maker(self, x: Tensor) -> nn.Module | None:
        """The module that made a tensor, or one of the same values."""
        return self.makers.get(key_of(x))

    def owner(self, call: Call) -> Call:
        """The first call of attention that read the same K and V; mostly the call itself."""
        return next(c for c in self.calls if c.cached == call.cached)

    def lent_as(self, call: Call) -> str | None:
        """The key under which later blocks find K and V of a call; None where they do not."""
        return next((key for key, kv in self.lent.items() if _keys(kv) == call.cached), None)


def handed_empty(given: Mapping[str, Any]) -> str | None:
    """Of what a block is handed by name, the mapping that blocks fill for later ones, if any."""
    return next((k for k, v in given.items() if isinstance(v, MutableMapping) and not v), None)


def _keys(tensors: Any) -> tuple[Key, ...]:
    return tuple(key_of(x) for x in tensors if isinstance(x, Tensor))


_SEEN: list[Seen] = []  # the run that is under way


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **given: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function, of shapes only."""
    batch, heads, tokens, _size = query.shape
    out = query.new_zeros(batch, tokens, heads, value.shape[-1])
    _SEEN[-1].calls.append(Call(module, query, key, value, out, attention_mask, given))
    return out, None


def _mask(
    batch_size: int, q_length: Any, kv_length: int, *_: Any, mask_function: Any, **__: Any
) -> Tensor:
    """transformers' mask function: a mask that means nothing, known by its storage."""
    tokens = q_length if isinstance(q_length, int) else len(q_length)
    shape = (batch_size, 1, tokens, kv_length)
    mask = torch.ones(shape, dtype=torch.bool, device=_SEEN[-1].device)
    _SEEN[-1].kept.append(mask)
    _SEEN[-1].masks[key_of(mask)[0]] = mask_function
    return mask


ALL_ATTENTION_FUNCTIONS.register(PROBE, _attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(PROBE, _mask)


def all_zero(model: nn.Module) -> None:
    """Give a model on the meta device data that take no memory: one zero for all of a tensor."""
    for part in model.modules():
        for name, own in (*part._parameters.items(), *part._buffers.items()):
            if own is None:
                continue
            zeros = torch.zeros((), dtype=own.dtype).expand(own.shape)
            if name in part._parameters:
                part._parameters[name] = nn.Parameter(zeros, requires_grad=False)
            else:
                part._buffers[name] = zeros


def run(model: Any, *, masked: bool = True) -> Seen:
    """Run a model that was built on the meta device with the attention `PROBE`.

    Args:
        masked: Whether to give it a mask of padding: code of mixers looks at its data.
    """
    seen, handles = Seen(device=next(model.parameters()).device.type), []

    def before(module: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor):
            seen.reads[module] = args[0]

    def after(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        if isinstance(out, Tensor):
            seen.kept.append(out)
            if not args or not isinstance(args[0], Tensor) or key_of(args[0]) != key_of(out):
                seen.makers[key_of(out)] = module

    def block_before(_: nn.Module, __: tuple[Any, ...], given: dict[str, Any]) -> None:
        name = handed_empty(given)
        if name is not None:
            seen.lent = given[name]  # the same one for all of them

    def block_after(module: nn.Module, _: tuple[Any, ...], out: Any) -> None:
        if isinstance(out, tuple):
            seen.tuples[module] = len(out)

    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            for part in module:
                handles.append(part.register_forward_hook(block_after))
                handles.append(part.register_forward_pre_hook(block_before, with_kwargs=True))
        own = next(module.parameters(recurse=False), None) is not None
        if own or next(module.children(), None) is None:
            handles.append(module.register_forward_pre_hook(before))
            handles.append(module.register_forward_hook(after))
    ids = torch.zeros(1, TOKENS, dtype=torch.long, device=seen.device)
    _SEEN.append(seen)
    try:
        alone = nullcontext() if masked else _one_sequence()
        with torch.no_grad(), alone, _shapes_only(model), _weights_watched(model, seen):
            mask = torch.ones_like(ids) if masked else None
            model(input_ids=ids, attention_mask=mask, use_cache=False)
    finally:
        _SEEN.pop()
        for handle in handles:
            handle.remove()
    for stack in model.modules():
        if isinstance(stack, Experts) and next(stack[0].children()) in seen.reads:
            _read_alike(stack, seen)
    return seen


def _read_alike(stack: Experts, seen: Seen) -> None:
    """Note of all experts what the run has shown of the first one."""
    shown, *others = ([*expert.children()] for expert in stack)
    for layers in others:
        for layer, first in zip(layers, shown, strict=True):
            read = seen.reads[first]
            of_all = key_of(read) == key_of(seen.reads[shown[0]])
            seen.reads[layer] = read if of_all else torch.empty_like(read)


@contextmanager
def _one_sequence() -> Iterator[None]:
    """Let transformers not look for several sequences in the data of one that has no mask."""
    find = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda *_, **__: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = find


@contextmanager
def _weights_watched(model: nn.Module, seen: Seen) -> Iterator[None]:
    """Note which linear layers have a weight that other code than theirs looks at."""

    class Watched(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return input.new_zeros(*input.shape[:-1], self.out_features)

        def __getattr__(self, name: str) -> Any:
            if name == "weight":
                seen.weighed.add(self)
            return super().__getattr__(name)

    layers = [part for part in model.modules() if type(part) is nn.Linear]
    for layer in layers:
        layer.__class__ = Watched
    try:
        yield
    finally:
        for layer in layers:
            layer.__class__ = nn.Linear


@contextmanager
def _shapes_only(model: nn.Module) -> Iterator[None]:
    """Let experts run whatever the router says, which has no data."""
    stacks = [part for part in model.modules() if isinstance(part, Experts) or is_stack(part)]
    for stack in stacks:

        def forward(x: Tensor, *_: Any, stack: nn.Module = stack, **__: Any) -> Tensor:
            if isinstance(stack, Experts):
                stack[0](x)  # which tells of all of them
            return torch.zeros_like(x)

        stack.__dict__["forward"] = forward
    try:
        yield
    finally:
        for stack in stacks:
            del stack.__dict__["forward"]


def is_stack(module: nn.Module) -> bool:
    """Whether a module computes all experts of a block from 3-D parameters."""
    shapes = [p.dim() for _, p in module.named_parameters(recurse=False)]
    return 3 in shapes and hasattr(module, "down_proj")
