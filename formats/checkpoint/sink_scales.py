"""What a checkpoint says of sink tokens: how many there are, and the static scales of their rows.

    quant/sink_scales.safetensors   X.input_sink_scale [1], fp32, of each linear layer X whose input
                                    has a static scale
    config.json                     `ptq: {sink_tokens: n}`

The first tokens of a sequence can have activations hundreds of times larger than all others, and
keys and values far smaller (Sun et al., "Massive Activations in Large Language Models", arXiv
2402.17762). No scale fits both: rows of the first n positions have one of their own.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from formats.checkpoint.check import same_names
from formats.errors import CheckpointError
from formats.links import find_file
from formats.stored.folder import SINK_SCALES, OwnPart
from formats.stored.safetensors_files import SafetensorsFile, TensorFile, read_elements
from formats.stored.weights import check_scale

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

LEAF = "input_sink_scale"


@dataclass(frozen=True)
class Sinks:
    """Sink tokens of a checkpoint.

    Attributes:
        tokens: How many there are at the beginning of every sequence.
        files: Where each tensor is read from, by `X.input_sink_scale`.
        scales: Of the rows of sink tokens, fp32 [1], by the layer's full name.
    """

    tokens: int = 0
    files: Mapping[str, TensorFile] = field(default_factory=dict)
    scales: Mapping[str, Tensor] = field(default_factory=dict)


def read_sinks(path: Path, own: OwnPart | None, static: Collection[str]) -> Sinks:
    """The sink tokens of a folder.

    Args:
        path: The folder.
        own: What config.json says of `quant/`; None where it says nothing.
        static: Full names of the linear layers whose input has a static scale.

    Raises:
        CheckpointError: scales are missing, extra, damaged or of another shape.
    """
    tokens, beside = 0 if own is None else own.sink_tokens, find_file(path, SINK_SCALES)
    if not tokens:
        if beside is not None:
            raise CheckpointError(
                f"{path}: found {SINK_SCALES}, but config.json says of no sink tokens. Copy the "
                "checkpoint again as a whole"
            )
        return Sinks()
    if beside is None:
        raise CheckpointError(
            f"{path}: config.json says that {tokens} sink tokens have scales of their own, but "
            f"{SINK_SCALES} is missing. Copy the checkpoint again with its folder quant/"
        )
    file = SafetensorsFile(beside)
    files = dict.fromkeys(file.tensors, file)
    same_names({f"{name}.{LEAF}" for name in static}, set(files), f"{SINK_SCALES}: ")
    scales = {}
    for name in static:
        tensor = f"{name}.{LEAF}"
        scale = read_elements(files, [tensor]).reshape(file.tensors[tensor][1])
        check_scale(tensor, scale, ((1,),))
        scales[name] = scale.float()
    return Sinks(tokens, files, scales)
