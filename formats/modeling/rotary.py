"""Rotary position embedding: the angles of every position, for all kinds that families declare.

Channel pair i of a head turns at position p by the angle p f_i (Su et al. 2021, arXiv 2104.09864),
f_i = theta^(-2 i / R) for a head of which R channels turn. Kinds of scaling change f, and multiply
cos and sin by a factor: linear, Llama 3's, YaRN's (arXiv 2309.00071) and LongRoPE's (Ding et al.
2024, arXiv 2402.13753), as transformers computes them.

The tables are as wide as a head, in the layout of two halves: pair i turns at i and i + D / 2, and
where fewer than D channels turn, cos is 1 and sin 0 for the rest. Models whose kinds of layers turn
by angles of their own have a rotation for each (Gemma 3, OLMo 3), and layers that do not turn have
one of no channels (SmolLM3).

LongRoPE has frequencies for sequences within the length that a model was first trained on, and
others for longer ones. transformers changes over when a sequence grows past that length, which
leaves the keys that are cached until then turned by the old ones. Here one of the two serves a
model as it is loaded: the short ones where no request may be longer than that length
(`EngineConfig.max_model_len`), else the long ones, for short requests too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from formats.errors import CheckpointError
from formats.families.family import Family
from formats.families.sizes import heads_of, rotary_channels


@dataclass(frozen=True, eq=False)
class Rotary:
    """Rotary embedding of a decoder's layers, of all or of one kind.

    Attributes:
        frequency: fp32 [R / 2] of the pairs of channels that turn; R is 0 where none does.
        long_frequency: The same for requests longer than `original_positions`, where they differ.
        original_positions: Longest request that `frequency` is for; None for any.
        scaling: Factor of cos and sin, usually 1.
    """

    frequency: Tensor
    long_frequency: Tensor | None = None
    original_positions: int | None = None
    scaling: float = 1.0

    def table(self, longest: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos and sin of the positions, each fp32 [longest, D], the two halves equal.

        Args:
            longest: Most tokens that a request may have.
            head_dim: D.
        """
        limit, frequency = self.original_positions, self.frequency
        if self.long_frequency is not None and limit is not None and longest > limit:
            frequency = self.long_frequency
        angle = torch.outer(torch.arange(longest).float(), frequency)
        rest = (0, head_dim // 2 - len(frequency))
        cos = F.pad(angle.cos() * self.scaling, rest, value=1.0)
        sin = F.pad(angle.sin() * self.scaling, rest)
        cos, sin = cos.to(device), sin.to(device)
        return torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)


@dataclass(frozen=True)
class Growth:
    """Growth of q with its position p, by the factor 1 + b log(1 + floor(p / L)) (Llama 4).

    Attributes:
        rate: b.
        positions: L, the positions that a model was first trained on.
    """

    rate: float
    positions: int

    def table(self, longest: int) -> Tensor | None:
        """The factor of each position, fp32 [longest]; None where it is 1 at all of them."""
        if longest <= self.positions:
            return None
        steps = torch.floor(torch.arange(longest) / self.positions)
        return 1 + self.rate * torch.log(1 + steps)


def read_rotary(family: Family, config: PretrainedConfig) -> tuple[Rotary, ...]:
    """The rotary embedding of each layer that a configuration describes; equal ones are one object.

    Raises:
        CheckpointError: a kind of scaling is not run for this family.
    """
    parameters, count = config.rope_parameters or {}, config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or ()
    nested = [kind for kind in dict.fromkeys(kinds) if kind in parameters]
    if nested:
        own = {kind: _read(family, config, parameters[kind], layer_type=kind) for kind in nested}
        if missing := set(kinds) - set(own):
            raise _no_rotation(f"there are none for {', '.join(sorted(missing))}")
        layers = tuple(own[kind] for kind in kinds)
    else:
        layers = (_read(family, config, parameters),) * count
    setting = family.attention.unrotated_setting
    if setting is None:
        return layers
    turning, still = getattr(config, setting), Rotary(torch.empty(0))
    if len(turning) < count:
        raise CheckpointError(
            f"config.json: {setting} has {len(turning)} values for {count} layers; needed is one "
            "for each"
        )
    return tuple(own if turns else still for own, turns in zip(layers, turning, strict=False))


def read_growth(family: Family, config: PretrainedConfig) -> Growth | None:
    """How q grows with its position; None where it does not.

    Raises:
        CheckpointError: a value that it needs is missing.
    """
    setting, parameters = family.attention.growth_setting, config.rope_parameters or {}
    rate = None if setting is None else parameters.get(setting)
    if not rate:
        return None
    positions = parameters.get("original_max_position_embeddings")
    if not positions:
        raise _no_rotation(f"{setting} needs original_max_position_embeddings")
    return Growth(float(rate), int(positions))


def _read(
    family: Family, config: PretrainedConfig, parameters: Mapping[str, Any], **kind_of_layer: str
) -> Rotary:
    """The rotary embedding of the layers that have these parameters."""
    kind, values = parameters.get("rope_type", "default"), config.to_dict()
    if kind not in family.rope_types:
        raise CheckpointError(
            f"rope_type {kind!r} is not run here; supported are {', '.join(family.rope_types)}"
        )
    if kind == "default":
        theta, turning = parameters.get("rope_theta"), rotary_channels(family, values)
        if theta is None:
            raise _no_rotation("rope_theta is missing")
        exponent = torch.arange(0, turning, 2).float() / turning
        return Rotary(1.0 / (float(theta) ** exponent))
    initial = partial(_frequencies, kind, config, **kind_of_layer)
    if family.partial_rotary is None and parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise CheckpointError(
            f"partial_rotary_factor {parameters['partial_rotary_factor']} is not run here: heads "
            f"of this family, of {heads_of(values).size} channels, turn as a whole"
        )
    frequency, scaling = initial()
    if kind != "longrope":
        return Rotary(frequency.float(), scaling=float(scaling))
    limit = int(parameters["original_max_position_embeddings"])
    long_frequency, _ = initial(seq_len=limit + 1)
    return Rotary(frequency.float(), long_frequency.float(), limit, float(scaling))


def _frequencies(kind: str, config: PretrainedConfig, **chosen: Any) -> tuple[Tensor, float]:
    """Frequencies of a kind of scaling and its factor, as transformers computes them.

    Raises:
        CheckpointError: a value that they need is missing, or makes none of them.
    """
    try:
        frequency, scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), **chosen)
    except (KeyError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        raise _no_rotation(f"{type(error).__name__}: {error}") from error
    if not bool(torch.isfinite(frequency).all()) or not math.isfinite(scaling):
        raise _no_rotation("a frequency is not finite")
    return frequency, float(scaling)


def _no_rotation(reason: str) -> CheckpointError:
    return CheckpointError(
        f"config.json: rope_parameters give no rotary embedding ({reason}). Correct them, or copy "
        "config.json of the original model"
    )
