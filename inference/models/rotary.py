"""Rotary position embedding: the angles of every position, for all kinds that families declare.

Channel pair i of a head turns at position p by the angle p f_i (Su et al. 2021, arXiv 2104.09864),
f_i = theta^(-2 i / R) for a head of which R channels turn. Kinds of scaling change f, and multiply
cos and sin by a factor: linear, Llama 3's, YaRN's (arXiv 2309.00071) and LongRoPE's (Ding et al.
2024, arXiv 2402.13753), as transformers computes them.

LongRoPE has frequencies for sequences within the length that a model was first trained on, and
others for longer ones. transformers changes over when a sequence grows past that length, which
leaves the keys that are cached until then turned by the old ones. Here one of the two serves a
model as it is loaded: the short ones where no request may be longer than that length
(`EngineConfig.max_model_len`), else the long ones, for short requests too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from formats.errors import CheckpointError
from formats.families.family import Family, heads_of, rotary_channels


@dataclass(frozen=True)
class Rotary:
    """Rotary embedding of a decoder.

    Attributes:
        frequency: fp32 [R / 2] of the pairs of channels that turn.
        long_frequency: The same for requests longer than `original_positions`, where they differ.
        original_positions: Longest request that `frequency` is for; None for any.
        scaling: Factor of cos and sin, usually 1.
    """

    frequency: Tensor
    long_frequency: Tensor | None = None
    original_positions: int | None = None
    scaling: float = 1.0

    def table(self, longest: int) -> tuple[Tensor, Tensor]:
        """cos and sin of the positions, each fp32 [longest, R], the two halves equal.

        Args:
            longest: Most tokens that a request may have.
        """
        limit, frequency = self.original_positions, self.frequency
        if self.long_frequency is not None and limit is not None and longest > limit:
            frequency = self.long_frequency
        angle = torch.outer(torch.arange(longest).float(), frequency)
        angle = torch.cat((angle, angle), dim=-1)
        return angle.cos() * self.scaling, angle.sin() * self.scaling


def read_rotary(family: Family, config: PretrainedConfig) -> Rotary:
    """The rotary embedding that a configuration describes.

    Raises:
        CheckpointError: its kind of scaling is not run for this family.
    """
    parameters = config.rope_parameters or {}
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
    initial = partial(_frequencies, kind, config)
    if not family.partial_rotary and parameters.get("partial_rotary_factor", 1.0) != 1.0:
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


def _frequencies(kind: str, config: PretrainedConfig, **length: int) -> tuple[Tensor, float]:
    """Frequencies of a kind of scaling and its factor, as transformers computes them.

    Raises:
        CheckpointError: a value that they need is missing, or makes none of them.
    """
    try:
        frequency, scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), **length)
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
