"""A foreign folder as a checkpoint of ours, its integers bit for bit.

GPTQ, AWQ, FP8 blocks, bitsandbytes' int8, and what neural-compressor calls GPTQ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from formats.adapters.factors import factors_document
from formats.checkpoint.native import only_here
from formats.checkpoint.read import Checkpoint
from formats.checkpoint.write import CheckpointWriter
from formats.errors import CheckpointError
from formats.families.names import HEAD
from formats.foreign.folder import named
from formats.foreign.settings import integer_weights
from formats.scale_table import ScaleEntry, ScaleTable, unmeasured_entry
from formats.scheme import LayerScheme
from formats.stored.weights import (
    StoredWeight,
    read_weights,
    scale_in_table,
    weight_tensors,
)
from kernels.numerics import TYPES, dequantize
from ptq.convert.conversion import (
    Conversion,
    compare,
    parts,
    require_same,
    surplus_tensors,
    unquantized,
)


def import_folder(
    source: Checkpoint,
    quantization: Mapping[str, Any],
    out: Path,
    force: bool,
    shard_bytes: int,
    progress: bool,
) -> Conversion:
    """Write a foreign folder as a compressed-tensors one; arguments as in
    `ptq.convert.convert.convert`, and the `quantization_config` of the source.

    Raises:
        CheckpointError: tensors cannot be expressed, or are damaged.
    """
    scheme, modules = source.scheme, source.quantized_modules
    layers = {module: source.scheme_of(module) for module in modules}
    surplus = surplus_tensors(source, modules)
    rows: list[ScaleEntry] = []
    with CheckpointWriter(
        out,
        config=source.config,
        scheme=scheme,
        layers=layers if HEAD in modules or len(set(layers.values())) > 1 else None,
        ignore=unquantized(source, modules),
        aux_files=source.auxiliary_files,
        force=force,
        shard_bytes=shard_bytes,
    ) as writer:
        for name, module in parts(source, modules, "Converting", progress):
            if module is None:
                if name not in surplus:
                    writer.add(name, source.tensor(name))
                continue
            weight, dtype = source.weight(module), source.dtype(f"{module}.weight_scale")
            if weight.order is not None:
                raise _act_order(source, module)
            with named(module):
                _check_stored(module, weight, layers[module], dtype)
            inputs = f"{module}.input_scale" if layers[module].static_input else None
            scale = None if inputs is None else source.tensor(inputs)
            writer.add_linear(module, weight, dtype, input_scale=scale)
            rows += _entries(module, weight, layers[module], scale)
        writer.finish(ScaleTable(entries=tuple(rows)), factors_document(source.path))
    notes = _import_notes(source, quantization)
    return Conversion(modules=len(modules), scale_rounding=0.0, notes=notes)


def _act_order(source: Checkpoint, module: str) -> CheckpointError:
    return CheckpointError(
        f"{module}: g_idx is not sorted (act-order): its groups are no neighbouring inputs, which "
        "only GPTQ's own layout expresses. Here it runs as it is; elsewhere it must be quantized "
        f"again: make a float model of it with `ptq convert {source.path} FLOAT --to float`, then "
        "`ptq quantize FLOAT --scheme w4`"
    )


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
    kept = source.config.get("dtype") or source.config.get("torch_dtype") or "another type"
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
