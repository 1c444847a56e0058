"""Linear layers inside transformers' code: modules in the place of `nn.Linear`, run by a backend.

Layers that read one tensor run as one: the first that is called with it computes them all, and the
others take their part when they are called with the same tensor.

Experts run once each, on the rows that their router chose for them.

Frequencies of rotary embeddings may depend on how long a sequence is. transformers changes them
when the longest sequence of a batch grows past a length: in a batch of several requests that would
turn the keys of one by the length of another. Here they are chosen once, when the model is loaded,
as `formats.modeling.rotary` documents: LongRoPE's short ones where no request may be longer than
the length that the model was first trained on, else the long ones; those of dynamic NTK scaling are
the first ones, since no request is longer than the model's positions.

Modules that keep a state are handed their tokens in pieces, but run their first and last layers
once a step for all tokens. Whether a layer is one of these is seen: it is called with the very
tensor that the module was, or the module gives the very tensor that it gave.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from formats.errors import CheckpointError
from inference.models.layers import LinearLayer, by_expert, sum_in_order
from inference.transformers_code.attention import current_sinks, current_step, only_rows, with_sinks


class BackendLinear(nn.Module):
    """A linear layer of a backend."""

    def __init__(self, layer: LinearLayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] to [..., outputs] of the same type."""
        y = self.layer(x.reshape(-1, x.shape[-1]), current_sinks())
        return y.view(*x.shape[:-1], -1)


class SharedInput:
    """Layers that read one tensor, computed together.

    Attributes:
        layer: All of them as one, their outputs side by side.
        outputs: Numbers of an output of each.
    """

    def __init__(self, layer: LinearLayer, outputs: Sequence[int]) -> None:
        self.layer, self.outputs = layer, list(outputs)
        self._input: Tensor | None = None
        self._parts: dict[int, Tensor] = {}

    def part(self, index: int, x: Tensor) -> Tensor:
        """The outputs of one of them for x [..., inputs]; each is given once for a tensor."""
        if x is not self._input or index not in self._parts:
            y = self.layer(x.reshape(-1, x.shape[-1]), current_sinks()).view(*x.shape[:-1], -1)
            self._input, self._parts = x, dict(enumerate(y.split(self.outputs, dim=-1)))
        own = self._parts.pop(index)
        if not self._parts:
            self._input = None  # nothing of a step is held after it
        return own


class PartOfLinear(nn.Module):
    """One of several layers that read one tensor.

    Args:
        shared: Computes all of them.
        index: Which of them this is.
    """

    def __init__(self, shared: SharedInput, index: int) -> None:
        super().__init__()
        self.shared, self._index = shared, index

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] to [..., outputs] of the same type."""
        return self.shared.part(self._index, x)


class Embedding(nn.Module):
    """The embedding of tokens, held in the type that it is stored in.

    Args:
        weight: [vocabulary, hidden].
    """

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self._dtype = dtype

    def forward(self, ids: Tensor) -> Tensor:
        """[..., hidden] of token ids [...]."""
        return self.weight[ids].to(self._dtype)


class HeadRows(nn.Module):
    """The embedding of tokens, where a quantized head is the embedding, too.

    Args:
        head: Runs the head.
    """

    def __init__(self, head: LinearLayer, dtype: torch.dtype) -> None:
        super().__init__()
        self._head, self._dtype = head, dtype

    def forward(self, ids: Tensor) -> Tensor:
        """[..., hidden] of token ids [...]."""
        return self._head.gather(ids.flatten(), self._dtype).view(*ids.shape, -1)


class OwnEmbedding(nn.Module):
    """An embedding of a class of its own, whose code sees the rows of a step's tokens alone.

    Args:
        module: transformers' module; its weight is not kept.
        table: Gives rows of it.
    """

    def __init__(self, module: nn.Embedding, table: Embedding | HeadRows) -> None:
        super().__init__()
        self.module, self.table = module, table
        self.module._parameters.pop("weight", None)

    def forward(self, ids: Tensor) -> Tensor:
        """[..., hidden] of token ids [...]."""
        rows = self.table(ids.flatten())
        return _with_weight(self.module, rows)(torch.arange(len(rows), device=ids.device)).view(
            *ids.shape, -1
        )


def takes_rows(module: nn.Embedding) -> bool:
    """Whether an embedding, its buffers loaded, gives the same of chosen rows as of all of them."""
    device = next((x.device for x in module.buffers()), torch.device("cpu"))
    seeded, ids = torch.Generator().manual_seed(0), torch.tensor([5, 0, 3], device=device)
    weight = torch.randn(6, module.embedding_dim, generator=seeded).to(device)
    try:
        with torch.no_grad():
            wanted = _with_weight(module, weight)(ids)
            found = _with_weight(module, weight[ids])(torch.arange(3, device=device))
    except (TypeError, ValueError, RuntimeError, IndexError):  # it wants something else
        return False
    return torch.equal(found, wanted)


def _with_weight(module: nn.Embedding, weight: Tensor) -> nn.Embedding:
    """A module that looks rows up in another weight."""
    twin = copy.copy(module)
    twin._parameters = {}
    twin.__dict__["weight"] = weight
    return twin


class Head(nn.Module):
    """The layer that gives logits, of those tokens of a step whose logits are wanted.

    What transformers' code does with logits after it (a factor, a bound) it does with these.

    Attributes:
        weight: Nothing, of that type, which code may ask for.
    """

    def __init__(self, layer: LinearLayer, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer, self.weight = layer, torch.empty(0, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[1, T, hidden] to logits fp32 [1, R, vocabulary]."""
        step, x = current_step(), x[0]
        step.keep_output(x)
        x = x if step.rows is None else x.index_select(0, step.rows)
        return self.layer(x).float()[None]


class RoutedExperts(nn.ModuleList):
    """The experts of a block, in the place of transformers' stack."""

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Sum of the chosen experts' outputs, as weighted.

        Args:
            x: [T, hidden].
            chosen: Experts of each token: int64 [T, k].
            weights: Theirs [T, k].
        """

        def run(expert: nn.Module, tokens: Tensor) -> Tensor:
            with only_rows(tokens):
                return expert(x[tokens])

        return sum_in_order(by_expert(x, chosen, list(self), run), weights).to(x.dtype)


class _ByLayer(TorchFunctionMode):
    """Has a layer compute products with a weight of one shape."""

    def __init__(self, layer: LinearLayer, shape: torch.Size) -> None:
        super().__init__()
        self._layer, self._shape = layer, shape

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        return self._linear(*args, **named) if func is F.linear else func(*args, **named)

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`F.linear`, whose arguments have these names."""
        if weight.shape != self._shape:
            return F.linear(input, weight, bias)
        y = self._layer(input.reshape(-1, input.shape[-1])).to(input.dtype)
        y = y.view(*input.shape[:-1], -1)
        return y if bias is None else y + bias


def in_one_order(module: nn.Module, layer: LinearLayer) -> None:
    """Have a backend's layer multiply in code that calls torch with a weight of its own.

    So most routers do. torch sums as it likes for so many rows, the layer in one order.
    """
    own, shape = module.forward, module.get_parameter("weight").shape

    def forward(*args: Any, **kwargs: Any) -> Any:
        with _ByLayer(layer, shape):
            return own(*args, **kwargs)

    module.forward = forward


CHANGING = ("longrope", "dynamic")


def fix_frequencies(model: nn.Module, longest: int) -> None:
    """Choose the frequencies of every rotary embedding for requests of up to so many tokens.

    Raises:
        CheckpointError: the code keeps frequencies in a way that is not known here.
    """
    module: Any
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, dict):
            for layer_type, kind in kinds.items():
                _fix(module, kind, longest, layer_type)
            module.rope_type = dict.fromkeys(kinds, "default")
        elif kinds is not None:
            _fix(module, kinds, longest, None)
            module.rope_type = "default"


def _fix(module: Any, kind: str, longest: int, layer_type: str | None) -> None:
    if not any(name in str(kind) for name in CHANGING):
        return
    prefix = "" if layer_type is None else f"{layer_type}_"
    frequency = getattr(module, f"{prefix}inv_freq", None)
    if frequency is None:
        raise CheckpointError(f"{type(module).__name__}: rope_type {kind!r} is not run here")
    if kind != "longrope":
        return
    parameters = module.config.rope_parameters
    own = parameters if layer_type is None else parameters[layer_type]
    limit = own["original_max_position_embeddings"]
    if longest > limit:
        options = {} if layer_type is None else {"layer_type": layer_type}
        longer, _ = ROPE_INIT_FUNCTIONS[kind](
            module.config, torch.device("cpu"), seq_len=limit + 1, **options
        )
        frequency.copy_(longer)


class _Step:
    """All tokens of a step, and the piece of them that the module's code has now.

    Args:
        x: What the module reads [T, H].
    """

    def __init__(self, x: Tensor) -> None:
        self.x, self.sinks = x, current_sinks()
        self.piece = self.tokens = x
        self.first: dict[nn.Module, Tensor] = {}  # by layer, what it gives [T, N]
        self.inner: Tensor | None = None  # what the last layer reads [T, K]
        self.later: Tensor | None = None  # stands for what it gives of the piece


class Projection(nn.Module):
    """A linear layer of such a module, in the place of `BackendLinear` or a part of one.

    Args:
        owner: All those of the module.
    """

    def __init__(self, layer: BackendLinear | PartOfLinear, owner: Projections) -> None:
        super().__init__()
        self.layer, self._owner = layer, owner

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] to [..., outputs] of the same type."""
        return self._owner.computed(self, x)


class Projections:
    """Those of one module, which are put in their places.

    Attributes:
        last: Name in the module of the layer that makes what it gives; None where none does.
    """

    def __init__(self, module: nn.Module) -> None:
        self.last: str | None = None
        self._names: dict[nn.Module, str] = {}
        self._made: list[tuple[str, Tensor]] | None = []
        self._step: _Step | None = None
        for name, part in list(module.named_modules()):
            if isinstance(part, BackendLinear | PartOfLinear):
                own = Projection(part, self)
                self._names[own] = name
                module.set_submodule(name, own)

    @contextmanager
    def step(self, x: Tensor) -> Iterator[None]:
        """For a while, the module is called with pieces of x [T, H]."""
        self._step = _Step(x)
        try:
            yield
        finally:
            self._step = None

    def begin(self, x: Tensor, tokens: Tensor) -> None:
        """The module is called with x [..., H] next, which are some of the step's tokens."""
        if self._step is not None:
            self._step.piece, self._step.tokens, self._step.later = x, tokens, None

    def computed(self, own: Projection, x: Tensor) -> Tensor:
        """What a layer gives of x [..., K], or stands for it until `outputs`."""
        step = self._step
        if step is None:
            y = own.layer(x)
            if self._made is not None:
                self._made.append((self._names[own], y))
            return y
        if x is step.piece:
            if own not in step.first:
                with with_sinks(step.sinks):
                    step.first[own] = own.layer(step.x)
            return step.first[own][step.tokens].view(*x.shape[:-1], -1)
        if self._names[own] != self.last:
            return own.layer(x)
        rows = x.reshape(-1, x.shape[-1])
        if step.inner is None:
            step.inner = rows.new_zeros(len(step.x), rows.shape[1])
        step.inner[step.tokens] = rows
        step.later = step.x.new_empty(*x.shape[:-1], step.x.shape[1])
        return step.later

    def maker(self, y: Tensor) -> str | None:
        """Before `settle`: name of the layer that made what the module gave just now, if any."""
        made, self._made = self._made, []
        return next((name for name, own in made or () if own is y), None)

    def settle(self, last: str | None) -> None:
        """Which layer makes what the module gives is known."""
        self.last, self._made = last, None

    def check(self, y: Tensor) -> bool:
        """Whether what the module gave of a piece is to come.

        Raises:
            CheckpointError: the module has changed what is to come.
        """
        step = self._step
        if step is None or step.later is None:
            return False
        if y is not step.later:
            raise CheckpointError(
                f"transformers' code changes what its layer {self.last} gives for some tokens and "
                "not for others; such a model is not run here"
            )
        return True

    def outputs(self) -> Tensor | None:
        """What the module gives of all tokens [T, H], where that was to come."""
        step = self._step
        if step is None or step.inner is None:
            return None
        last = next(own for own, name in self._names.items() if name == self.last)
        assert isinstance(last, Projection)
        return last.layer(step.inner)
