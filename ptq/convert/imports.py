"""What becomes a checkpoint of ours: a foreign folder, or a model with PaddleNLP's scale tables.

A foreign folder's integers are taken over bit for bit: GPTQ, AWQ, FP8 blocks, bitsandbytes' int8,
and what neural-compressor calls GPTQ.

Under Paddle's tables, float weights are rounded to the nearest with the tables' scales; int8
weights (per channel, in the compressed-tensors layout) are taken over, and must have the scales
that the table says. Tables of inputs and of the cache may be empty, that of weights only where
that of inputs is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from formats.adapters.factors import factors_document
from formats.cache_scheme import KVCacheSpec
from formats.checkpoint.native import only_here
from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError, typed
from formats.families.block_layers import HEAD
from formats.families.values import named_dtype
from formats.foreign.folder import named
from formats.foreign.paddle import FILES, PaddleScales, read_paddle
from formats.foreign.settings import integer_weights
from formats.scale_table import Role, ScaleEntry, ScaleTable, unmeasured_entry
from formats.scheme import ActivationSpec, LayerScheme, Scheme, WeightSpec
from formats.stored.weights import StoredWeight, read_weights, scale_in_table, weight_tensors
from kernels.numerics import INT8, TYPES, dequantize, quantize, sqnr_db
from ptq.convert.conversion import (
    Conversion,
    Destination,
    compare,
    require_same,
    surplus_tensors,
    unquantized,
)


def import_folder(
    source: Checkpoint, quantization: Mapping[str, Any], to: Destination
) -> Conversion:
    """Write a foreign folder as a compressed-tensors one.

    Args:
        quantization: The `quantization_config` of the source.

    Raises:
        CheckpointError: tensors cannot be expressed, or are damaged.
    """
    scheme, modules = source.scheme, source.quantized_modules
    layers = {module: source.scheme_of(module) for module in modules}
    surplus = surplus_tensors(source, modules)
    rows: list[ScaleEntry] = []
    with to.writer(
        source.config,
        scheme,
        source.auxiliary_files,
        layers=layers if HEAD in modules or len(set(layers.values())) > 1 else None,
        ignore=unquantized(source, modules),
    ) as writer:
        for module in to.layers(source, modules, writer.add, surplus):
            weight, dtype = source.weight(module), source.dtype(f"{module}.weight_scale")
            if weight.order is not None:
                raise CheckpointError(
                    f"{module}: g_idx is not sorted (act-order): its groups are no neighbouring "
                    "inputs, which only GPTQ's own layout expresses. Here it runs as it is; "
                    "elsewhere it must be quantized again: make a float model of it with "
                    f"{typed('convert', source.path, 'FLOAT', '--to', 'float')}, then "
                    "`ptq quantize FLOAT --scheme w4`"
                )
            with named(module):
                _check_stored(module, weight, layers[module], dtype)
            inputs = f"{module}.input_scale" if layers[module].static_input else None
            scale = None if inputs is None else source.tensor(inputs)
            writer.add_linear(module, weight, dtype, input_scale=scale)
            rows += _entries(module, weight, layers[module], scale)
        writer.finish(ScaleTable(entries=tuple(rows)), factors_document(source.path))
    notes = _import_notes(source, quantization)
    return Conversion(modules=len(modules), scale_rounding=0.0, notes=notes)


def _check_stored(
    module: str, weight: StoredWeight, scheme: LayerScheme, dtype: torch.dtype
) -> None:
    """Refuse a weight that does not come back from its tensors; the writer checks their bits."""
    tensors = weight_tensors(scheme, weight, dtype)
    back = read_weights(scheme, [(len(weight.q), weight.q.shape[1])], tensors.__getitem__)
    compare(module, weight, back)
    require_same("scales", weight.scale, back.scale)


def _entries(
    module: str, weight: StoredWeight, scheme: LayerScheme, inputs: Tensor | None
) -> Iterator[ScaleEntry]:
    """The scale table's rows of an imported layer; magnitudes are those of the source folder."""
    spec, activations = scheme.weights, scheme.activations
    assert spec is not None
    values = dequantize(weight.q, weight.scale, weight.zero_point, spec.block)
    absmax, scale = values.abs().max().item(), scale_in_table(spec, weight)
    name = f"{module}.weight_scale"
    yield unmeasured_entry(name, "weight", scale, spec.dtype, spec.granularity, absmax)
    if inputs is not None:
        assert activations is not None
        reach = inputs.item() * TYPES[activations.dtype].top
        name, kind = f"{module}.input_scale", activations
        yield unmeasured_entry(name, "input", inputs, kind.dtype, kind.granularity, reach)


def _import_notes(source: Checkpoint, quantization: Mapping[str, Any]) -> tuple[str, ...]:
    scheme = source.scheme
    alone = only_here(source.config, quantized=True, shares_head=False)
    notes = [
        *([alone] if alone else []),
        f"Read as scheme {scheme.wac} ({scheme.of_layers.text}); its calibration is not known.",
    ]
    kept = named_dtype(source.config) or "another type"
    if scheme.activations is None and kept != "float16":
        notes.append(
            f"Scales are kept as they are; software that runs the model in {kept} may round."
        )
    if quantization.get("sym") and not integer_weights(scheme).symmetric:
        notes.append(
            "Scales of both signs became positive, integers and zero points their complements: the "
            "same values."
        )
    if quantization.get("llm_int8_threshold"):
        notes.append(
            "bitsandbytes quantizes inputs, too, but for columns with outliers; here they run in "
            "float, so that answers differ a little."
        )
    return tuple(notes)


INT8_WEIGHTS = WeightSpec()
CLIPPED = 1.01  # times the range of the table; more is reported


def import_tables(source: Path, tables: Path, to: Destination) -> Conversion:
    """Write a model with the scales of a folder of tables.

    Args:
        source: Folder of a float model, or of one with int8 weights per channel.
        tables: Folder of the three tables.

    Raises:
        CheckpointError: the tables do not fit the model, or a file is damaged.
    """
    checkpoint = Checkpoint.open(source)
    modules = _layers(checkpoint)
    scales = read_paddle(
        tables, checkpoint.config, {m: checkpoint.weight_shape(m) for m in modules}
    )
    scheme = _scheme(checkpoint, scales)
    modules = modules if scheme.weights else ()
    rows, beyond = list(_rows(scales)), ("", 0.0)
    ignore, files = unquantized(checkpoint, modules), checkpoint.auxiliary_files
    with to.writer(checkpoint.config, scheme, files, ignore=ignore) as writer:
        for module in to.layers(checkpoint, modules, writer.add):
            weight, exact = _weight(checkpoint, module, scales.weights[module])
            inputs = scales.inputs.get(module)
            writer.add_linear(module, weight, torch.float32, input_scale=inputs)
            rows.append(_weight_row(module, weight, exact))
            reach = (exact.abs() / (weight.scale * INT8.top)).max().item()
            beyond = max(beyond, (module, reach), key=lambda pair: pair[1])
        for attention, (k, v) in scales.cache.items():
            writer.set_kv_scales(attention, k, v)
        writer.finish(ScaleTable(entries=tuple(rows)))
    notes = (f"Scheme {scheme.wac}, with the scales of {tables}.", *_clipping(*beyond))
    rounded = checkpoint.scheme.weights is None and bool(modules)
    return Conversion(modules=len(modules), scale_rounding=0.0, rounded=rounded, notes=notes)


def _layers(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Full names of the linear layers of the decoder blocks; CheckpointError if not float or w8."""
    checkpoint.require_one_scheme("a set of PaddleNLP's tables")
    scheme = checkpoint.scheme
    if scheme.weights not in (None, INT8_WEIGHTS):
        found = scheme.weights.text if scheme.weights else ""
        raise CheckpointError(
            f"{checkpoint.path}: found {found}; PaddleNLP's tables are read for a float model or "
            "one with int8 weights per channel. Give the folder that the tables were made of"
        )
    if scheme.weights is not None:
        return checkpoint.quantized_modules
    end = "_proj.weight"
    layers = tuple(n.removesuffix(".weight") for n in checkpoint.names() if n.endswith(end))
    if not layers:
        raise CheckpointError(f"{checkpoint.path}: found no linear layers *{end}; is it a decoder?")
    return layers


def _scheme(checkpoint: Checkpoint, scales: PaddleScales) -> Scheme:
    if not scales.weights and (scales.inputs or checkpoint.scheme.weights is not None):
        raise CheckpointError(
            f"{FILES[1]} is empty, but {'inputs' if scales.inputs else 'the weights'} are "
            "quantized; it must have the scales of the weights. Get the three tables of one run"
        )
    if not scales.weights and not scales.cache:
        raise CheckpointError("all three tables are empty; there is nothing to quantize")
    return Scheme(
        weights=INT8_WEIGHTS if scales.weights else None,
        activations=ActivationSpec() if scales.inputs else None,
        kv_cache=KVCacheSpec() if scales.cache else None,
    )


def _weight(checkpoint: Checkpoint, module: str, scale: Tensor) -> tuple[StoredWeight, Tensor]:
    """A layer's weight under a scale [N, 1], and the weight that it stands for, fp32 [N, K]."""
    if checkpoint.scheme.weights is None:
        exact = checkpoint.tensor(f"{module}.weight").float()
        return StoredWeight(quantize(exact, scale, INT8), scale), exact
    weight = checkpoint.weight(module)
    if not torch.equal(weight.scale, scale):
        raise CheckpointError(
            f"{FILES[1]}: scales of {module} are not those of {checkpoint.path}, whose weights are "
            "int8 already. Give the tables of this model, or the float model of these tables"
        )
    return weight, dequantize(weight.q, scale)


def _weight_row(module: str, weight: StoredWeight, exact: Tensor) -> ScaleEntry:
    ratio = sqnr_db(exact, dequantize(weight.q, weight.scale))
    beyond = (exact.abs() > weight.scale * (INT8.top + 0.5)).float().mean().item()
    name, absmax = f"{module}.weight_scale", exact.abs().max().item()
    row = _row(name, "weight", weight.scale, absmax)
    return row.model_copy(
        update={"clip_fraction": beyond, "sqnr_db": ratio if isfinite(ratio) else None}
    )


def _rows(scales: PaddleScales) -> Iterator[ScaleEntry]:
    for module, scale in scales.inputs.items():
        yield _row(f"{module}.input_scale", "input", scale, scale.item() * INT8.top)
    roles: tuple[Role, Role] = ("k_cache", "v_cache")
    for attention, pair in scales.cache.items():
        for role, scale in zip(roles, pair, strict=True):
            absmax = scale.max().item() * INT8.top
            yield _row(f"{attention}.{role[0]}_scale", role, scale, absmax)


def _row(tensor: str, role: Role, scale: Tensor, absmax: float) -> ScaleEntry:
    granularity = {"weight": "per_channel", "input": "per_tensor"}.get(role, "per_head")
    return unmeasured_entry(tensor, role, scale, "int8", granularity, absmax)


def _clipping(module: str, reach: float) -> tuple[str, ...]:
    if reach <= CLIPPED:
        return ()
    return (
        f"Weights of {module} reach {reach:.3g} times the range of their scale and were cut: are "
        "these tables of this very model?",
    )
