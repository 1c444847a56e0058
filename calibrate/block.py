"""A decoder block with its weights, as methods see it: what its layers read can be looked at."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.func import functional_call

from calibrate.attention import Cache, OnGradient, OnKV, watched, watched_gradients, watched_latent
from calibrate.handed import Handed, Rows
from calibrate.transfers import TOGETHER, neighbours, passed_through, run_size, stacked, to_host
from formats.errors import CheckpointError, RecipeError
from formats.families.family import Family, LatentAttention
from formats.modeling.experts import Experts, OnRoute

OnInput = Callable[[str, Tensor], None]
OnProduct = Callable[[str, Tensor, Tensor], None]
OnOutput = Callable[[str, Tensor, Tensor | None, int, Tensor | None], None]


class DecoderBlock:
    """A decoder block with its weights, its samples, and hooks into its run.

    Full names are those of the checkpoint's files; the code may have others below the block.

    Attributes:
        name: Full name, such as `model.layers.0`.
        family: The declaration of its model's family; None where there is none.
        attention: Full name of its attention module; None where it has none.
        module: The block; its float weights may be replaced by methods.
        linears: Its linear layers by full name.
        inputs: Hidden states of each sample: [tokens, hidden], in the host's memory; K and V of
            earlier blocks that later ones read are in the same rows (`calibrate.handed`). What
            `begins` gives may have several samples in one: [samples, tokens, hidden].
        quantized_inputs: The same after the quantized blocks before, where the stream keeps them.
        sinks: How many tokens at the beginning of each sample are sink tokens (`calibrate.sinks`):
            `on_input` leaves them out, `on_sinks` shows their inputs. `on_kv` shows them with all
            others: a GPU reads their K and V in the cache's format, whose ranges must hold them.
    """

    sinks = 0

    def __init__(
        self,
        name: str,
        family: Family | None,
        attention: str | None,
        module: nn.Module,
        inputs: list[Tensor],
        handed: Handed,
        quantized_inputs: list[Tensor] | None = None,
        device: torch.device | None = None,
        names: Mapping[str, str] | None = None,
    ) -> None:
        self.name, self.family = name, family
        self.device = device or torch.device("cpu")
        self.attention = attention
        self.module = module
        renamed = names or {}
        self._names = {
            path: renamed.get(path, f"{name}.{path}" if path else name)
            for path, _ in module.named_modules()
        }
        self._paths = {own: path for path, own in self._names.items()}
        self.inputs = inputs
        self.quantized_inputs = quantized_inputs
        self.linears, self.handed = self._linears_of(module), handed

    def to(self, device: torch.device) -> Self:
        """The block as it is now, to be run beside this one; on one device they share weights."""
        other = copy.copy(self)
        own = (*self.module.parameters(), *self.module.buffers())
        moved = {id(tensor): _on(tensor, device) for tensor in own}
        other.module, other.device = copy.deepcopy(self.module, moved), device
        other.linears, other.handed = self._linears_of(other.module), self.handed.to(device)
        return other

    def _linears_of(self, module: nn.Module) -> dict[str, nn.Linear]:
        parts = module.named_modules()
        return {self._names[path]: part for path, part in parts if isinstance(part, nn.Linear)}

    @property
    def declared(self) -> Family:
        """The declaration of its model's family, for methods that are refused without one."""
        assert self.family is not None
        return self.family

    @property
    def attended(self) -> str:
        """Full name of its attention module, where it is known to have one."""
        assert self.attention is not None, f"{self.name} has no attention"
        return self.attention

    def submodule(self, name: str) -> nn.Module:
        """A module of the block by its full name, such as `model.layers.0.input_layernorm`."""
        return self.module.get_submodule(self._paths[name])

    def together(self, samples: Sequence[int], run: int) -> list[list[int]]:
        """Samples that go through the block at once, in their order: on a GPU, where launching the
        kernels of a small block takes longer than running them, neighbours of one length.

        Args:
            samples: Indices into `inputs`.
            run: As many samples form a run, and no others go together.
        """
        most = TOGETHER.get(self.device.type, 0) if self._is_plain else 0
        return neighbours(self.inputs, samples, run, most)

    @property
    def _is_plain(self) -> bool:
        """Whether the code is known to take several samples as it takes one: not of experts, whose
        layers read tokens of no certain sample, nor where more than hidden states is handed on."""
        alone = self.handed.own or self.handed.rows != Rows() or self.family is None
        if alone or isinstance(self.declared.attention, LatentAttention):
            return False
        return not any(isinstance(part, Experts) for part in self.module.modules())

    def begins(self, most: int) -> Self:
        """The block with its first `most` samples alone, those that go `together` as one input."""
        other, first = copy.copy(self), range(min(most, len(self.inputs)))
        each = ([self.inputs[i] for i in g] for g in self.together(first, max(1, len(first))))
        other.inputs = [g[0] if len(g) == 1 else stacked(g).to(self.device) for g in each]
        return other

    @torch.no_grad()
    def run(
        self,
        sample: int,
        *,
        on_input: OnInput | None = None,
        on_kv: OnKV | None = None,
        on_route: OnRoute | None = None,
        cache: Cache | None = None,
        on_product: OnProduct | None = None,
    ) -> Tensor:
        """Run one sample through the block as it is now.

        Args:
            sample: Index into `inputs`.
            on_input: Called with each linear layer's full name and its input [tokens, in], sink
                tokens left out; layers of experts see every other token.
            on_kv: Called with K after RoPE and V, both [tokens, kv heads, head_dim]; of latent
                attention with what is cached in their place.
            on_route: Called with the full name of the experts and how many tokens the router sends
                to each of them: int64 [experts].
            cache: Makes of K and V, those of sink tokens with them, what attention reads.
            on_product: Called with each linear layer's full name, its input [tokens, in] and its
                output [tokens, out], of the same tokens as `on_input`.

        Of an input of several samples, calls are with the tokens of one after those of another, but
        `cache` gets and gives [samples, tokens, kv heads, head_dim].

        Returns:
            Hidden states [tokens, hidden] as the input has them, on the block's device.
        """
        with self._hooks(on_input, on_kv, on_route, cache, None, on_product):
            return self.forward(self.inputs[sample], sample)

    @torch.no_grad()
    def outputs(
        self,
        *,
        on_input: OnInput | None = None,
        on_kv: OnKV | None = None,
        on_route: OnRoute | None = None,
        samples: Sequence[int] | None = None,
        begin: Callable[[Sequence[int]], None] = lambda _: None,
        on_sinks: OnInput | None = None,
    ) -> list[Tensor]:
        """`run` on some samples, checked, in the host's memory: hidden states for the next block.

        Args:
            on_input: As of `run`, like `on_kv` and `on_route`; `on_sinks` gets sink tokens' inputs.
            samples: Indices into `inputs`, in the order in which they run; None for all.
            begin: Called with those that go `together` before they run.

        Raises:
            RecipeError: they hold NaN or infinity.
        """
        sums: list[Tensor] = []  # of outputs: quicker to look at
        order = range(len(self.inputs)) if samples is None else samples
        groups = self.together(order, run_size(len(self.inputs)))

        def step(hidden: Tensor) -> Tensor:
            group = groups[len(sums)]
            begin(group)
            out = self.forward(hidden, group[0])
            sums.append(out.sum())
            return out

        inputs = [[self.inputs[i] for i in group] for group in groups]
        with self._hooks(on_input, on_kv, on_route, None, on_sinks):
            found = passed_through(inputs, step, self.device)
        bad = bool(sums) and not bool(torch.stack(sums).isfinite().all())
        if bad and not all(bool(x.isfinite().all()) for x in found):
            message = "its output holds NaN or infinity. Check the model's weights"
            raise RecipeError(f"{self.name}: {message}")
        return found

    def backward(
        self, sample: int, gradient: Tensor, on_output: OnOutput, on_kv: OnGradient
    ) -> Tensor:
        """Run one sample through the block and its loss's gradient back.

        Args:
            sample: Index into `inputs`.
            gradient: Of the block's outputs [tokens, hidden], in the type that it computes in.
            on_output: Called with each linear layer's full name, the gradient of its output
                [rows, out], and of an expert's layer with the tokens routed to it, int64 [rows],
                and how many the sample has, else with None and 0; of the layers that make K and V
                with their input [rows, in], else with None.
            on_kv: Called with `k_cache` or `v_cache` and the gradient [tokens, kv heads, D] of K or
                V; of latent attention of what is cached in their place. Gradients of sink tokens
                are shown as 0.

        Returns:
            The gradient of its inputs, in the host's memory.

        Raises:
            CheckpointError: the block's code hands no gradient from its outputs to its inputs, or
                runs a layer more than once.
        """
        narrow = self.inputs[sample].to(self.device)  # over the bus as it is kept
        hidden = narrow.to(gradient.dtype).requires_grad_()
        with self._gradient_hooks(on_output, on_kv), torch.enable_grad():
            out = self.forward(hidden.clone(), sample)  # which its code may change in place
            try:
                (found,) = torch.autograd.grad(out, hidden, gradient.to(self.device))
            except RuntimeError as error:
                raise CheckpointError(
                    f"{self.name}: its code takes no gradient from its outputs to its inputs "
                    f"({error}); methods that need gradients cannot solve this model"
                ) from error
        return to_host(found)

    @contextmanager
    def _gradient_hooks(self, on_output: OnOutput, on_kv: OnGradient) -> Iterator[None]:
        rows: dict[str, tuple[Tensor, int]] = {}  # tokens routed to an expert, by its name
        run, cached = set[str](), self._cached_layers()
        with ExitStack() as stack:
            for path, experts in self.module.named_modules():
                if isinstance(experts, Experts):

                    def count_tokens(i: int, tokens: Tensor, count: int, path: str = path) -> None:
                        rows[f"{path}.{i}"] = (tokens, count)

                    stack.enter_context(experts.routed(count_tokens))
            for name, linear in self.linears.items():
                expert = self.expert_of(name)

                def hook(
                    _: nn.Module, args: Any, out: Any, name: str = name, expert: str = expert
                ) -> None:
                    if name in run:
                        raise CheckpointError(
                            f"{name}: it runs more than once on a sample; methods that need "
                            "gradients cannot solve this model"
                        )
                    run.add(name)
                    tokens, count = rows.get(expert, (None, 0))
                    x = args[0].detach().flatten(0, -2) if name in cached else None

                    def show(g: Tensor) -> None:
                        rows = self._without_sinks(g.flatten(0, -2), tokens)
                        on_output(name, rows, tokens, count, x)

                    if isinstance(out, Tensor) and out.requires_grad:  # not a router's choice
                        out.register_hook(show)

                stack.callback(linear.register_forward_hook(hook).remove)
            names = self.family and self.family.attention
            latent = names if isinstance(names, LatentAttention) else None

            def show_kv(role: str, g: Tensor) -> None:
                on_kv(role, self._without_sinks(g, None))

            if self.attention is not None:
                attention = self.submodule(self.attention)
                stack.enter_context(watched_gradients(attention, latent, show_kv))
            yield

    def _without_sinks(self, g: Tensor, tokens: Tensor | None) -> Tensor:
        """Gradients [rows, ...], those of sink tokens 0; `tokens` tells which tokens rows are."""
        if not self.sinks:
            return g
        own = torch.arange(len(g), device=g.device) if tokens is None else tokens
        kept = (own >= self.sinks).view(-1, *(1,) * (g.dim() - 1))
        return g * kept

    def _cached_layers(self) -> set[str]:
        """Full names of the linear layers that make K and V, where they are declared."""
        names = self.family and self.family.attention
        if names is None or isinstance(names, LatentAttention):
            return set()
        return {f"{self.attention}.{names.k}", f"{self.attention}.{names.v}"}

    def expert_of(self, layer: str) -> str:
        """Where in the code the expert stands that a layer belongs to; "" for none.

        Such a layer reads the tokens that are routed to its expert, others those of whole samples.
        """
        path = self._paths[layer]
        parts = path.split(".")
        holders = (".".join(parts[:i]) for i in range(len(parts) - 1, 0, -1))
        for holder in holders:
            if isinstance(self.module.get_submodule(holder), Experts):
                return ".".join(parts[: holder.count(".") + 2])
        return ""

    def forward(
        self, hidden: Tensor, sample: int, weights: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """The block's function, with gradients: hidden states [tokens, hidden] to the same.

        Args:
            hidden: Of one of the samples, or of several that go `together`.
            weights: To compute with in place of those of linear layers, by the layer's full name.
        """
        given = {f"{self._paths[name]}.weight": w for name, w in (weights or {}).items()}
        there = hidden.to(self.device, non_blocking=True)
        args, kwargs, lent = self.handed.arguments(there, sample)
        called = functional_call(self.module, given, args, kwargs) if given else None
        out = self.module(*args, **kwargs) if called is None else called
        return self.handed.rows.together(out[0] if isinstance(out, tuple) else out, lent)

    @contextmanager
    def _hooks(
        self,
        on_input: OnInput | None,
        on_kv: OnKV | None,
        on_route: OnRoute | None,
        cache: Cache | None,
        on_sinks: OnInput | None,
        on_product: OnProduct | None = None,
    ) -> Iterator[None]:
        first = self.sinks
        with ExitStack() as stack:
            for name, linear in self.linears.items():
                if on_input is not None:

                    def hook(_: nn.Module, args: tuple[Tensor], name: str = name) -> None:
                        x = args[0]
                        on_input(name, x[..., first:, :].flatten(0, -2))
                        if on_sinks is not None and first:
                            on_sinks(name, x[..., :first, :].flatten(0, -2))

                    stack.callback(linear.register_forward_pre_hook(hook).remove)
                if on_product is not None:

                    def ran(_: nn.Module, args: Any, out: Any, name: str = name) -> None:
                        if isinstance(out, Tensor):  # not a router's choice
                            both = (x[..., first:, :].flatten(0, -2) for x in (args[0], out))
                            on_product(name, *both)

                    stack.callback(linear.register_forward_hook(ran).remove)
            observed = on_input is not None or on_product is not None
            for path, experts in self.module.named_modules():
                if isinstance(experts, Experts):
                    stack.enter_context(experts.watched(self._names[path], observed, on_route))
            if self.attention is None:
                yield
                return
            names, attention = self.family and self.family.attention, self.submodule(self.attention)
            if isinstance(names, LatentAttention):
                assert cache is None  # no method replaces what is cached there
                stack.enter_context(watched_latent(attention, names, on_kv))
            else:
                stack.enter_context(watched(attention, on_kv, cache))
            yield


def _on(tensor: Tensor, device: torch.device) -> Tensor:
    """A parameter or a buffer on a device, as what it is; itself where it is there."""
    own = tensor.data
    moved = own.to(device)
    if moved is own:
        return tensor
    return nn.Parameter(moved, requires_grad=False) if isinstance(tensor, nn.Parameter) else moved
