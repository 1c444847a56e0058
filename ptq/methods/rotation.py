"""Rotation of the residual stream and of the values: the same function in a basis without outliers.

Ashkboos et al., "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs", NeurIPS 2024 (arXiv
2404.00456), section 4, with the names that Liu et al., "SpinQuant" (arXiv 2405.16406), give to the
matrices. With x [tokens, hidden] in the residual stream and a linear layer y = x W^T,

    R1   the stream is x R1: embedding E R1, readers (q, k, v, gate, up, routers) W diag(g) R1,
         writers (o, down) R1^T W with biases b R1, lm_head W diag(g) R1
    R2   each KV head's values are v D^-1 R2: v R2^T D^-1 W with biases b D^-1 R2, o's columns of
         each head W D R2

where g is what the norm before a reader multiplies by: its weight w, or 1 + w. RMSNorm(x R1) =
RMSNorm(x) R1 only once that is 1, so it moves into the readers; the final norm's moves into
lm_head, which can then no longer be the embedding: tied weights are untied. Factors of embedding,
sub-layers and logits commute with all of it. Queries and keys stay as they are, and with them
rotary embedding and the norms that some families (Qwen3) have of q and k: R1 cancels inside of the
projections before them. D and R2 pass through attention, which mixes tokens and not channels.

D is diagonal. Rounding turned values brings noise of one power to all channels, proportional to
sum_j (v_j / D_j)^2, of which o reads sum_j (D_j |o_j|)^2: by Cauchy and Schwarz their product is
least where D_j^2 = |v_j| / |o_j|. A channel that is large in v and small in o
would otherwise bring its noise to all others. |v_j| is the norm of the row of W diag(g) with its
bias: what normed inputs, whose mean square is 1, give in the mean. Where o has a bias, too, that of
v moves into it (`ptq.methods.shift`, Eq. 4, with z = b) and nothing large is rounded with V.

Everything is folded into weights: products are made in fp64, and rounding them to the checkpoint's
type is all that is lost. The inputs of down_proj are not rotated: that would take a product when
the model runs (QuaRot's online transform); SmoothQuant's group `mlp_output` serves them. A layer
that predicts further tokens is left out with R1: it norms what the final norm gave with a weight
that is no longer there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from formats.errors import RecipeError
from formats.families import block_layers
from formats.families.family import LatentAttention
from formats.families.registry import family_of, predicting_layer
from formats.families.sizes import heads_of
from formats.namespace import later
from formats.residual_rotation import hadamard_matrix, random_rotation, with_rotation
from formats.scheme import LayerScheme, Scheme
from ptq.methods.common.float_model import LEFT_OUT, FloatModel, FloatModelView, kept_layers
from ptq.methods.common.spec import MethodSpec, PlannedLayer, Stage

if TYPE_CHECKING:
    from torch import Tensor

    from formats.families.family import Family
with later():
    import torch

    from formats.modeling import load

EMBEDDING, FINAL_NORM, HEAD = (
    f"{name}.weight"
    for name in (block_layers.EMBEDDING, block_layers.FINAL_NORM, block_layers.HEAD)
)
ROWS = 8192  # of a weight that are rotated at a time


class RotationSpec(MethodSpec):
    """Rotation of the residual stream and of the values, folded into the weights.

    YAML::

        rotation:
          residual: true          # R1: the residual stream; a tied lm_head is untied by it
          values: true            # R2: the values of each head, and with them the cache V
          seed: 0

    It needs no data and comes first: all other methods see the rotated model.

    Raises:
        ValueError: nothing is to be rotated.
    """

    stage: ClassVar = Stage.ROTATE
    needs_declaration: ClassVar[bool] = True
    fits_cache_alone: ClassVar[bool] = True
    unmovable: ClassVar = "the method rotation turned what its layers read or write"
    name: Literal["rotation"] = "rotation"
    residual: bool = True
    """Rotate the residual stream (R1). Unties a tied lm_head, which adds its bytes."""
    values: bool = True
    """Rotate the values of each head (R2), and with them the cached V."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the random parts of the rotations."""

    @model_validator(mode="after")
    def _rotates(self) -> RotationSpec:
        if not (self.residual or self.values):
            raise ValueError("rotates nothing; set residual or values to true, or remove it")
        return self

    def misfit(self, scheme: Scheme, layers: Sequence[LayerScheme]) -> str | None:
        """Without quantized weights it serves the cached V alone."""
        if scheme.weights is not None or not self.residual:
            return None
        return (
            f"found rotation with residual: true, but the scheme {scheme.wac} leaves weights and "
            "activations in floating point; set residual: false, and V alone is turned"
        )

    def knows(self, family: Family | None) -> bool:
        """It turns no residual stream that norms stand before (see `view`)."""
        return family is not None and not (self.residual and family.norms.after)

    def view(self, model: FloatModel) -> FloatModel:
        """The rotated model.

        Raises:
            RecipeError: layers that read the residual stream are kept as they are stored, or it has
                tensors whose place in it is not known here.
        """
        kept = next(iter(kept_layers(model)), None)
        if self.residual and kept is not None:
            raise RecipeError(
                f"rotation: {kept} is kept as it is stored, and cannot turn with the residual "
                "stream. Set residual: false, or make a float model first with `ptq convert "
                f"{model.path} FLOAT --to float`"
            )
        return RotatedCheckpoint(model, self)

    def explain(self, layer: PlannedLayer) -> Iterator[str]:
        """What of the layer turns."""
        role = block_layers.role_of(layer.name)
        if self.residual:
            turned = "rows" if role in ("o", "down") else "columns"
            yield f"rotation: its {turned} turn with the residual stream"
        if self.values and role in ("v", "o"):
            turned = "rows" if role == "v" else "columns"
            yield f"rotation: its {turned} turn with each head's V"


class RotatedCheckpoint(FloatModelView):
    """A float model whose residual stream and values are rotated; see the module's docstring.

    Raises:
        RecipeError: the model has tensors whose place in it is not known here.
    """

    def __init__(self, source: FloatModel, spec: RotationSpec) -> None:
        super().__init__(source)
        self.spec = spec
        config = source.config
        hidden, head = int(config["hidden_size"]), heads_of(config).size
        self.family = family_of(config)
        self.r1 = random_rotation(hidden, spec.seed) if spec.residual else None
        self.r2 = random_rotation(head, spec.seed + 1) if spec.values else None
        tied = bool(config.get("tie_word_embeddings", HEAD not in source))
        self.unties = spec.residual and tied
        self._balances: dict[str, Tensor] = {}  # by the attention's name
        self._unturned = self._check_names()

    @property
    def config(self) -> Mapping[str, Any]:
        """The model's; untied, and with the rotation, where the residual stream is rotated."""
        if not self.spec.residual:
            return self.source.config
        untied = {**self.source.config, "tie_word_embeddings": False}
        return with_rotation(untied, self.spec.seed)

    @property
    def added_bytes(self) -> int:
        """What untying the embedding costs in the checkpoint."""
        if not self.unties or HEAD in self.source:
            return 0
        return math.prod(self.shape(EMBEDDING)) * self.dtype(EMBEDDING).itemsize

    def describe(self) -> Iterator[str]:
        """What is rotated, by what, and what it costs."""
        yield from super().describe()
        parts = (("residual stream", self.r1), ("values of each head", self.r2))
        kinds = [
            f"{name} ({'random' if known is None else 'Hadamard'} {len(r)})"
            for name, r in parts
            if r is not None
            for known in (hadamard_matrix(len(r)),)
        ]
        cost = f"; unties lm_head, which adds {self.added_bytes / 1e6:.1f} MB"
        yield f"rotated: {', '.join(kinds)}{cost if self.added_bytes else ''}"
        yield from (f"leaves out {layer}: {LEFT_OUT}" for layer in self.left_out)

    @property
    def left_out(self) -> tuple[str, ...]:
        """Those that read the residual stream, if that is rotated."""
        return tuple(sorted({str(self._further(name)) for name in self._unturned}))

    def names(self) -> tuple[str, ...]:
        """Names of all tensors, lm_head's among them."""
        block_layers = {*self.source.names()} - self._unturned
        return tuple(sorted({*block_layers, HEAD} if self.unties else block_layers))

    def tensor(self, name: str) -> Tensor:
        """Read one tensor and rotate it, in fp64; rounded once to its type."""
        stored = load.check_finite(name, self.source.tensor(self.origin(name)))
        if self._further(name) is not None:
            return stored
        module, leaf = _parts(name)
        if leaf == "bias" and (moved := self._moved_bias(name)) is not None:
            stored = stored.double() + moved if module == self.family.attention.o else 0 * stored
        norms = self.family.norms.before
        if self.r1 is not None and (module in norms or name == FINAL_NORM):
            return torch.full_like(stored, 1 - self.family.norms.offset)
        rows, columns = self._rotations(name, module)
        if rows is not None:  # [out, in] or, of a bias, [out]
            turned = stored.double().T if leaf == "weight" else stored.double()
            turned = turned / self._balance(name).flatten() if rows is self.r2 else turned
            turned = _rotated(turned, rows)
            stored = turned.T if leaf == "weight" else turned
        dtype = self.dtype(name)
        if leaf != "weight" or (columns is None and rows is None):
            return stored.to(dtype)
        factors = self._factors(name, module)
        parts = [_rotated(part.double() * factors, columns) for part in stored.split(ROWS)]
        return torch.cat([part.to(dtype) for part in parts])

    def _rotations(self, name: str, module: str) -> tuple[Tensor | None, Tensor | None]:
        """What turns the outputs of a layer (its rows) and what its inputs (its columns)."""
        if name in (EMBEDDING, HEAD):
            return None, self.r1
        family, attention = self.family, self.family.attention
        role = attention.roles.get(module)
        rows = self.r1 if module in family.writers else self.r2 if role == "v" else None
        columns = self.r1 if module in family.readers else None
        return rows, self.r2 if role == "o" else columns

    def _factors(self, name: str, module: str) -> Tensor:
        """What a layer's columns take over before they turn, fp64 [in]; 1 for nothing."""
        if self.r2 is not None and module == self.family.attention.o:
            balance = self._balance(name)
            groups = self.shape(name)[1] // balance.numel()  # query heads that read one KV head
            return balance.repeat_interleave(groups, dim=0).flatten()
        return torch.ones(()).double() if self.r1 is None else self._norm(name, module)

    def _balance(self, name: str) -> Tensor:
        """D of the attention that a tensor of v or o is in, fp64 [kv heads, head size]."""
        attention, size = name.rsplit(".", 2)[0], heads_of(self.source.config).size
        if attention not in self._balances:
            v, o = self._value_and_output(name)
            factors = self._norm(f"{v}.weight", _parts(f"{v}.weight")[0])
            power = (self._float(f"{v}.weight") * factors).square().sum(dim=1)
            if f"{v}.bias" in self.source and self._moved_bias(f"{v}.bias") is None:
                power += self._float(f"{v}.bias").square()
            power = power.view(-1, size)
            read = self._float(f"{o}.weight").square().sum(dim=0)
            read = read.view(len(power), -1, size).sum(dim=1)
            alive = (power > 0) & (read > 0)
            self._balances[attention] = torch.where(alive, power / read, 1.0) ** 0.25
        return self._balances[attention]

    def _value_and_output(self, name: str) -> tuple[str, str]:
        """Full names of v and o of the attention that a tensor is in."""
        layers = {role: layer for layer, role in self.family.attention.roles.items()}
        attention = name.rsplit(".", 2)[0]
        return f"{attention}.{layers['v']}", f"{attention}.{layers['o']}"

    def _moved_bias(self, name: str) -> Tensor | None:
        """What o's bias takes over from v's, fp64 [hidden]; None for other biases."""
        role = self.family.attention.roles.get(_parts(name)[0])
        if self.r2 is None or role not in ("v", "o") or self.family.attention.sinks is not None:
            return None
        v, o = self._value_and_output(name)
        if not (f"{v}.bias" in self.source and f"{o}.bias" in self.source):
            return None
        weight, bias = self._float(f"{o}.weight"), self._float(f"{v}.bias")
        heads = bias.view(-1, heads_of(self.source.config).size)
        return weight @ heads.repeat_interleave(weight.shape[1] // len(bias), dim=0).flatten()

    def _float(self, name: str) -> Tensor:
        """A tensor of the source, in fp64."""
        return load.check_finite(name, self.source.tensor(name)).double()

    def _norm(self, name: str, module: str) -> Tensor:
        """What the norm before a layer multiplies by, fp64 [in]; 1 where there is none."""
        norm = block_layers.FINAL_NORM if name == HEAD else self.family.readers.get(module)
        if norm is None:
            return torch.ones((), dtype=torch.float64)
        full = norm if name == HEAD else f"{block_layers.block_of(name)}.{norm}"
        return self._float(f"{full}.weight") + self.family.norms.offset

    def origin(self, name: str) -> str:
        """Name in the source: a tied head is the embedding."""
        return EMBEDDING if self.unties and name == HEAD else name

    def _further(self, name: str) -> str | None:
        """The layer that predicts further tokens which a tensor is in."""
        return predicting_layer(self.source.config, name)

    def _check_names(self) -> frozenset[str]:
        """Refuse tensors that are not known; those that do not turn with the residual stream."""
        family, attention = self.family, self.family.attention
        if self.spec.values and isinstance(attention, LatentAttention):
            raise RecipeError(
                f"rotation: {self.path} has latent attention, whose heads share one latent in the "
                "place of V. Set values: false"
            )
        if self.spec.residual and family.norms.after:
            raise RecipeError(
                f"rotation: {', '.join(family.norms.after)} of {self.path} stand between a layer "
                "and the residual stream that it adds to, and their weights cannot be folded into "
                "it. Set residual: false"
            )
        untouched = {"rotary_emb", *family.norms.after}
        if isinstance(attention, LatentAttention):
            untouched |= {attention.q_norm, attention.q_b, attention.kv_norm, attention.kv_b}
        else:
            untouched |= {attention.q_norm, attention.k_norm}
        known = {*family.readers, *family.writers, *family.norms.before, *untouched}
        further = frozenset(filter(self._further, self.source.names()))
        known_names = {EMBEDDING, FINAL_NORM, HEAD} | further
        for name in self.source.names():
            if name not in known_names and _parts(name)[0] not in known:
                raise RecipeError(
                    f"rotation: {name} of {self.path} reads or writes the residual stream in a way "
                    f"that is not known here; known are {', '.join(sorted(known))}. Remove the "
                    "method rotation"
                )
        return further if self.spec.residual else frozenset()


def _parts(name: str) -> tuple[str, str]:
    """Last name of a tensor's module, and its own: `q_proj`, `weight`."""
    module, _, leaf = name.rpartition(".")
    return module.rpartition(".")[2], leaf


def _rotated(x: Tensor, matrix: Tensor | None) -> Tensor:
    """Every run of n channels [..., k n] times a matrix [n, n]; nothing without one."""
    if matrix is None:
        return x
    return (x.unflatten(-1, (-1, len(matrix))) @ matrix).flatten(-2)
