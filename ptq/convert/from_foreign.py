"""A foreign folder as a checkpoint of ours, its integers bit for bit.

GPTQ, AWQ, FP8 blocks, bitsandbytes' int8, and what neural-compressor calls GPTQ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from formats.checkpoint.write import CheckpointWriter
from formats.errors import CheckpointError
from formats.foreign.awq import awq_layout, read_awq_config
from formats.foreign.bitsandbytes import read_bitsandbytes_config
from formats.foreign.fp8_block import fp8_block_layout, read_fp8_block_config
from formats.foreign.gptq import gptq_layout, read_gptq_config
from formats.foreign.layout import ForeignFolder, Layout
from formats.foreign.neural_compressor import is_neural_compressor, neural_compressor_layout
from formats.scale_table import ScaleEntry, ScaleTable
from formats.scheme import Scheme, WeightSpec
from formats.stored.weights import StoredWeight, read_weights, weight_tensors
from kernels.numerics import dequantize
from ptq.convert.conversion import (
    Conversion,
    compare,
    named,
    parts,
    require_same,
    unquantized,
    zero_points,
)
from ptq.convert.surplus import surplus_tensors


def import_folder(
    source: ForeignFolder, out: Path, force: bool, shard_bytes: int, progress: bool
) -> Conversion:
    """Write a foreign folder as a compressed-tensors one; arguments as in
    `ptq.convert.convert.convert`.

    Raises:
        CheckpointError: settings or tensors cannot be expressed, or are damaged.
    """
    scheme, layout, modules = open_layout(source)
    assert layout.unpack is not None
    surplus = surplus_tensors(source, modules)
    rows: list[ScaleEntry] = []
    with CheckpointWriter(
        out,
        config=source.config,
        scheme=scheme,
        ignore=unquantized(source, modules),
        aux_files=source.auxiliary_files(),
        force=force,
        shard_bytes=shard_bytes,
    ) as writer:
        for name, module in parts(source, modules, "Converting", progress):
            if module is None:
                if name not in surplus:
                    writer.add(name, source.tensor(name))
                continue
            with named(module):
                tensors = source.layer(layout, module)
                weight = _suited(layout.unpack(tensors), scheme)
                _check_stored(module, weight, scheme, dtype := _scale_dtype(tensors))
            writer.add_linear(module, weight, dtype)
            rows.append(_entry(module, weight, scheme))
        writer.finish(ScaleTable(entries=tuple(rows)))
    notes = _import_notes(source, scheme)
    return Conversion(modules=len(modules), scale_rounding=0.0, notes=notes)


def require_grid(source: ForeignFolder) -> None:
    """Refuse a foreign folder whose values lie on no integer grid.

    Raises:
        CheckpointError: so they do; it says what to do instead.
    """
    _, layout = _read_layout(source)
    if layout.unpack is None:
        raise CheckpointError(
            f"{source.path}: values of {layout.name} weights lie on no integer grid, so that no "
            "scheme here holds them exactly. Make a float model of it with `ptq convert "
            f"{source.path} FLOAT --to float`, then quantize that with a recipe: `ptq run RECIPE "
            "--set model.path=FLOAT`"
        )


def open_layout(source: ForeignFolder) -> tuple[Scheme, Layout, tuple[str, ...]]:
    """A foreign folder's scheme, its layout, and its quantized layers.

    Raises:
        CheckpointError: settings are not read here, do not fit the tensors, or a layer's tensors
            are not complete.
    """
    scheme, layout = _read_layout(source)
    modules = source.modules(layout)
    return _with_symmetry(source, scheme, layout, modules), layout, modules


def _read_layout(source: ForeignFolder) -> tuple[Scheme, Layout]:
    """Scheme and layout of a foreign `quantization_config`."""
    quantization = source.quantization
    method = quantization.get("quant_method")
    if method == "gptq":
        scheme, version = read_gptq_config(quantization)
        if is_neural_compressor(source.names()):
            return scheme, neural_compressor_layout(_weights(scheme), quantization, source.names())
        return scheme, gptq_layout(_weights(scheme), version)
    if method == "bitsandbytes":
        return read_bitsandbytes_config(quantization)
    if method == "awq":
        scheme = read_awq_config(quantization)
        return scheme, awq_layout(_weights(scheme))
    if method == "fp8":
        return read_fp8_block_config(quantization), fp8_block_layout()
    raise CheckpointError(
        f"config.json: quantization_config has quant_method {method!r}; allowed: 'gptq', 'awq', "
        "'fp8', 'bitsandbytes'. Quantize the original model with one of the shipped recipes"
    )


def _weights(scheme: Scheme) -> WeightSpec:
    assert scheme.weights is not None
    return scheme.weights


def _with_symmetry(
    source: ForeignFolder, scheme: Scheme, layout: Layout, modules: Sequence[str]
) -> Scheme:
    """The scheme, symmetric where all zero points are: loaders run that everywhere, and faster."""
    if layout.zero_word is None:
        return scheme
    names = [f"{module}.qzeros" for module in modules]
    other = (n for n in names if bool((source.tensor(n) != layout.zero_word).any()))
    first = next(other, None)
    if first is not None and _weights(scheme).symmetric:
        raise CheckpointError(
            f"{first} has other zero points than those of sym: true in {layout.name}, which is "
            f"{layout.zero_word & 0xFFFFFFFF:#x} in every word. checkpoint_format or sym of "
            "quantization_config is wrong; get the checkpoint again"
        )
    weights = _weights(scheme).model_copy(update={"symmetric": first is None})
    return scheme.model_copy(update={"weights": weights})


def _suited(weight: StoredWeight, scheme: Scheme) -> StoredWeight:
    """The weight with zero points where the scheme has them."""
    if _weights(scheme).symmetric or weight.zero_point is not None:
        return weight
    return StoredWeight(weight.q, weight.scale, zero_points(weight))


def _scale_dtype(tensors: Mapping[str, Tensor]) -> torch.dtype:
    """The type that holds a layer's scales exactly: the one they came in."""
    return tensors["scales"].dtype if "scales" in tensors else torch.float32


def _check_stored(module: str, weight: StoredWeight, scheme: Scheme, dtype: torch.dtype) -> None:
    """Refuse a weight that does not come back from its tensors; the writer checks their bits."""
    tensors = weight_tensors(scheme, weight, dtype)
    back = read_weights(scheme, [(len(weight.q), weight.q.shape[1])], tensors.__getitem__)
    compare(module, weight, back)
    require_same("scales", weight.scale, back.scale)


def _entry(module: str, weight: StoredWeight, scheme: Scheme) -> ScaleEntry:
    """The scale table's row of an imported weight; magnitudes are those of the source folder."""
    spec, scale = _weights(scheme), weight.scale
    values = dequantize(weight.q, scale, weight.zero_point, spec.block)
    return ScaleEntry(
        module=module,
        role="weight",
        dtype=spec.dtype,
        granularity=spec.granularity,
        shape=tuple(scale.shape),
        tensor=f"{module}.weight_scale",
        scale_min=scale.min().item(),
        scale_max=scale.max().item(),
        statistic="imported",
        absmax=values.abs().max().item(),
        tokens=0,
        clip_fraction=0.0,
        sqnr_db=None,
    )


def _import_notes(source: ForeignFolder, scheme: Scheme) -> tuple[str, ...]:
    notes = [
        f"Read as scheme {scheme.wac} ({_weights(scheme).text}); its calibration is not known."
    ]
    kept = source.config.get("dtype") or source.config.get("torch_dtype") or "another type"
    if scheme.activations is None and kept != "float16":
        notes.append(
            f"Scales are kept as they came; software that runs the model in {kept} may round."
        )
    if source.quantization.get("llm_int8_threshold"):
        notes.append(
            "bitsandbytes quantizes inputs, too, but for columns with outliers; here they run in "
            "float, so that answers differ a little."
        )
    return tuple(notes)
