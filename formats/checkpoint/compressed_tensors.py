"""Our scheme as compressed-tensors' `quantization_config`, and back.

Source: the `quantization_config` that compressed-tensors 0.17 to 0.20 read, in config.json. Only
keys that all of them have are written. That scales have two levels stands in `observer_kwargs`,
whose keys are free and which no loader heeds. Cache scales are not written here: no release
serves static int8 scales a head, so they lie beside the served files and `kv_cache_scheme` stays
null. That of others, such as llm-compressor's, is read.

A head whose integers are the embedding's, too (`formats.checkpoint.read.Checkpoint.shares_head`),
is something that no other loader knows: it would run an embedding that it does not find. So the
strategy of its group is `tied_channel` or `tied_group`, which their strict readers refuse.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, ValidationError

from formats.cache_scheme import KVCacheSpec
from formats.checkpoint.targets import is_ignored, layer_targets, served_names
from formats.documents import Values, check_values
from formats.errors import CheckpointError
from formats.families.block_layers import HEAD
from formats.families.registry import numbered_on
from formats.scheme import AUTO, BLOCK, ActivationSpec, LayerScheme, WeightSpec, has_groups
from formats.stored.weights import storage_format

METHOD = "compressed-tensors"
CLASS = "Linear"  # the target that means every linear layer
TWO_LEVEL = "two_level"
SUPPORTED = (
    "int8, int4 (packed) and fp8 e4m3 weights per channel, int8 and int4 in groups of 32, 64 or "
    "128, fp8 per tensor or in blocks of 128 x 128; activations float, int8 or fp8, static, "
    "per token or (fp8) in groups of 128; NVFP4, MXFP4, MXFP8 weight-only"
)
CACHES = (
    "caches in int8 or fp8 e4m3, symmetric and static, with scales per tensor (strategy tensor) or "
    "per head (attn_head)"
)
_TIED = "tied_"  # before the strategy of a head that is the embedding, too
_STRATEGY = {"per_tensor": "tensor", "per_channel": "channel", "group": "group", "block": "block"}
_FLOAT_ZEROS = "torch.float32"  # zp_dtype; that of others is an integer type
_SCALE_DTYPES = {"e8m0": "torch.uint8", "e4m3": "torch.float8_e4m3fn"}
_INPUT_STRATEGY = {"per_tensor": "tensor", "per_token": "token", "group": "group"}
_CACHE_STRATEGY = {"per_tensor": "tensor", "per_head": "attn_head"}
_TYPES = {
    ("int", 8): "int8",
    ("int", 4): "int4",
    ("float", 8): "fp8_e4m3",
    ("float", 4): "fp4_e2m1",
}


def quantization_config(
    scheme: LayerScheme,
    ignore: Sequence[str],
    layers: Mapping[str, LayerScheme] | None = None,
    *,
    shared_head: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> dict[str, Any] | None:
    """The `quantization_config` of a scheme, or None where no weight is quantized.

    Args:
        scheme: Of all linear layers, or of those that `layers` does not say otherwise of.
        ignore: Linear layers left alone: full names, or `re:` patterns for `re.match`.
        layers: Schemes of all quantized layers by their full name, where they may differ; the
            scheme is that of one at least. The head, `lm_head`, is left alone unless it is here.
        shared_head: Full name of the head, where its integers are the embedding's, too.
        config: config.json of the model, which tells its layers that predict further tokens.
    """
    if scheme.weights is None:
        return None
    if config is not None:
        ignore = [*ignore, *served_names(config, ignore)]
        numbered = {numbered_on(config, name): own for name, own in (layers or {}).items()}
        layers = {**(layers or {}), **numbered}
    main = LayerScheme(weights=scheme.weights, activations=scheme.activations)
    members: dict[tuple[LayerScheme, bool], list[str]] = {}
    members.setdefault((main, False), [])  # first, whichever layer is
    for name, of_layer in (layers or {}).items():
        members.setdefault((of_layer, name == shared_head), []).append(name)
    targets = [[CLASS]] if len(members) == 1 else layer_targets(list(members.values()))
    formats = {storage_format(of_group) for of_group, _ in members}
    return {
        "quant_method": METHOD,
        "version": "0.17.0",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "config_groups": {
            f"group_{i}": _group(*group, own)
            for i, (group, own) in enumerate(zip(members, targets, strict=True))
        },
        "ignore": list(dict.fromkeys([*ignore, *([] if HEAD in (layers or {}) else [HEAD])])),
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "transform_config": {},
    }


def _group(scheme: LayerScheme, tied: bool, targets: list[str]) -> dict[str, Any]:
    assert scheme.weights is not None
    weights = _weight_args(scheme.weights)
    if tied:
        weights["strategy"] = _TIED + weights["strategy"]
    return {
        "targets": targets,
        "format": storage_format(scheme),
        "weights": weights,
        "input_activations": scheme.activations and _input_args(scheme.activations),
        "output_activations": None,
    }


def _weight_args(spec: WeightSpec) -> dict[str, Any]:
    assert spec.group_size != AUTO, "the plan settles it"
    args: dict[str, Any] = {
        "num_bits": spec.bits,
        "type": "float" if spec.dtype.startswith("fp") else "int",
        "symmetric": spec.symmetric,
        "strategy": "tensor_group" if spec.scale_type == "e4m3" else _STRATEGY[spec.granularity],
        "dynamic": False,
    }
    if spec.granularity == "group":
        args["group_size"] = spec.group_size
    if spec.scale_type != "float":
        args["scale_dtype"] = args["zp_dtype"] = _SCALE_DTYPES[spec.scale_type]
    if spec.float_zeros:
        args["zp_dtype"] = _FLOAT_ZEROS
    if spec.two_level:
        args["observer_kwargs"] = {TWO_LEVEL: True}
    if spec.granularity == "block":
        args["block_structure"] = [BLOCK, BLOCK]
    return args


def _input_args(spec: ActivationSpec) -> dict[str, Any]:
    args: dict[str, Any] = {
        "num_bits": spec.bits,
        "type": "float" if spec.dtype == "fp8_e4m3" else "int",
        "symmetric": True,
        "strategy": _INPUT_STRATEGY[spec.granularity],
        "dynamic": spec.dynamic,
    }
    if spec.granularity == "group":
        args["group_size"] = BLOCK
    return args


class UnsupportedSchemeError(CheckpointError):
    """What compressed-tensors states and no kernel here runs; weights have values all the same."""


def _check_pattern(entry: str) -> str:
    try:
        re.compile(entry.removeprefix("re:"))
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"not a pattern ({error})") from error
    return entry


class ArgsValues(Values):
    """How one tensor of a layer is quantized."""

    num_bits: int | None = None
    type: str | None = None
    symmetric: bool | None = None
    strategy: str | None = None
    dynamic: bool | str | None = None
    group_size: int | None = None
    block_structure: list[int] | None = None
    actorder: str | bool | None = None
    scale_dtype: str | None = None
    zp_dtype: str | None = None
    observer_kwargs: dict[str, Any] | None = None


class GroupValues(Values):
    """Layers of one scheme."""

    targets: list[Annotated[str, AfterValidator(_check_pattern)]]
    format: str | None = None
    weights: ArgsValues | None = None
    input_activations: ArgsValues | None = None


class QuantizationValues(Values):
    """The whole of it."""

    format: str | None = None
    config_groups: dict[str, GroupValues] | None = None
    ignore: list[Annotated[str, AfterValidator(_check_pattern)]] | None = None
    kv_cache_scheme: ArgsValues | None = None


Groups = tuple[tuple[tuple[str, ...], LayerScheme], ...]


def read_groups(config: Mapping[str, Any]) -> Groups:
    """Targets and scheme of each of a `quantization_config`'s groups, in their order.

    Raises:
        UnsupportedSchemeError: a compressed-tensors scheme that is not run here.
        CheckpointError: another method, or what has no values without more.
    """
    groups = read_values(config).config_groups
    if groups is None or not (groups or config.get("kv_cache_scheme")):
        raise _unsupported(f"{'no' if groups is None else 0} config_groups")
    return tuple(
        _read_group(f"config_groups.{name}", group, config.get("format"))
        for name, group in config["config_groups"].items()
    )


def read_values(config: Mapping[str, Any]) -> QuantizationValues:
    """A `quantization_config` by the types of its values.

    Raises:
        CheckpointError: it is of another method, or weights are no plain arithmetic by it.
    """
    where = "config.json: quantization_config"
    found = check_values(
        config, QuantizationValues, where, "Copy config.json of the checkpoint again"
    )
    sparsity = config.get("sparsity_config") or {}
    if not isinstance(sparsity, Mapping):
        raise CheckpointError(
            f"{where} has sparsity_config {sparsity!r}; needed is an object. Copy config.json of "
            "the checkpoint again"
        )
    for key, value, allowed in (
        ("quant_method", config.get("quant_method"), (METHOD,)),
        ("transform_config", config.get("transform_config") or None, (None,)),
        ("sparsity_config.format", sparsity.get("format"), (None, "dense")),
    ):
        if value not in allowed:
            raise CheckpointError(
                f"{where} has {key} {value!r}, which is not read here; allowed: "
                f"{', '.join('absent' if own is None else repr(own) for own in allowed)}. Quantize "
                "the original model with one of the shipped recipes"
            )
    return found


def read_cache_scheme(config: Mapping[str, Any]) -> KVCacheSpec | None:
    """How a `quantization_config` says that the cache is quantized, None where it is not.

    Raises:
        CheckpointError: so that it is not run here; the message lists what is.
    """
    args = config.get("kv_cache_scheme")
    if not args:
        return None
    where = "kv_cache_scheme"
    if not isinstance(args, Mapping) or args.get("dynamic") or not args.get("symmetric", True):
        raise _unsupported(f"{where} {args}", CACHES)
    strategy = _ours(_CACHE_STRATEGY, str(args.get("strategy")), where, CACHES)
    try:
        return KVCacheSpec(dtype=_dtype(args, where, CACHES), granularity=strategy)
    except ValidationError as error:
        raise _unsupported(f"{where} {args}", CACHES) from error


def _read_group(
    where: str, group: Mapping[str, Any], layout_of_all: str | None
) -> tuple[tuple[str, ...], LayerScheme]:
    targets, weights = group["targets"], group.get("weights")
    if not targets or not all(map(_is_target, targets)):
        raise _unsupported(f"{where}.targets {targets}")
    if not weights or group.get("output_activations"):
        key = "output_activations" if weights else "weights"
        raise _unsupported(f"{where}.{key} {group.get(key)}")
    spec = _read_weights(weights, f"{where}.weights")
    inputs = _read_inputs(group.get("input_activations"), f"{where}.input_activations")
    try:
        scheme = LayerScheme(weights=spec, activations=inputs)
    except ValidationError as error:
        raise _unsupported(f"{where}.input_activations ({_reason(error)})") from error
    layout = group.get("format") or layout_of_all
    if layout not in (None, storage_format(scheme)):
        raise _unsupported(f"{where}.format {layout!r} for {scheme.text}")
    return tuple(targets), scheme


def _read_weights(args: Mapping[str, Any], where: str) -> WeightSpec:
    said = str(args.get("strategy")).removeprefix(_TIED)
    by_tensor = said == "tensor_group"
    strategy: Any = "group" if by_tensor else _ours(_STRATEGY, said, where)
    blocks = [BLOCK, BLOCK] if strategy == "block" else args.get("block_structure")
    allowed = {"dynamic": (False, None), "actorder": (None, "weight", "static")}
    for key, values in (allowed | {"block_structure": (blocks,)}).items():
        if args.get(key) not in values:
            raise _unsupported(f"{where}.{key} {args.get(key)!r}")
    dtype, extra = _dtype(args, where), args.get("observer_kwargs")
    size = args.get("group_size") if strategy == "group" else None
    if strategy == "group" and not has_groups(dtype, size):
        raise _unsupported(f"{where}.group_size {size} for {dtype}")
    try:
        spec = WeightSpec(
            dtype=dtype,
            granularity=strategy,
            group_size=size,
            symmetric=bool(args.get("symmetric", True)),
            zero_points="float" if _has_float_zeros(args) else "integer",
            two_level=extra.get(TWO_LEVEL, False) if isinstance(extra, Mapping) else False,
        )
    except ValidationError as error:
        raise _unsupported(f"{where} ({_reason(error)})") from error
    needed, given = _SCALE_DTYPES.get(spec.scale_type), args.get("scale_dtype")
    implied = given is None and spec.dtype == "fp4_e2m1"
    if by_tensor != (spec.scale_type == "e4m3"):
        raise _unsupported(f"{where}.strategy {said!r} for {spec.text}")
    if needed not in (None, given) and not implied:
        raise _unsupported(f"{where}.scale_dtype {given!r} for {spec.text}")
    return spec


def _has_float_zeros(args: Mapping[str, Any]) -> bool:
    return not args.get("symmetric", True) and args.get("zp_dtype") == _FLOAT_ZEROS


def _read_inputs(args: Mapping[str, Any] | None, where: str) -> ActivationSpec | None:
    if args is None:
        return None
    strategy = _ours(_INPUT_STRATEGY, str(args.get("strategy")), where)
    try:
        spec = ActivationSpec(dtype=_dtype(args, where), granularity=strategy)
    except ValidationError as error:
        raise _unsupported(f"{where} ({_reason(error)})") from error
    size = args.get("group_size") if strategy == "group" else BLOCK
    for key, value, allowed in (
        ("dynamic", bool(args.get("dynamic")), spec.dynamic),
        ("symmetric", args.get("symmetric", True), True),
        ("group_size", size, BLOCK),
    ):
        if value != allowed:
            raise _unsupported(f"{where}.{key} {args.get(key)!r} with strategy {strategy!r}")
    return spec


def _reason(error: ValidationError) -> str:
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"]))
    return f"{place}: " * bool(place) + first["msg"].removeprefix("Value error, ")


def _ours(strategies: Mapping[str, str], said: str, where: str, supported: str = SUPPORTED) -> Any:
    found = {theirs: ours for ours, theirs in strategies.items()}.get(said)
    if found is None:
        raise _unsupported(f"{where}.strategy {said!r}", supported)
    return found


def _dtype(args: Mapping[str, Any], where: str, supported: str = SUPPORTED) -> Any:
    kind, bits = args.get("type", "int"), args.get("num_bits", 8)
    if (kind, bits) not in _TYPES:
        raise _unsupported(f"{where}.num_bits {bits} of type {kind!r}", supported)
    return _TYPES[kind, bits]


def _is_target(target: Any) -> bool:
    """Whether it names linear layers: all of them, one by its full name, or some by a pattern."""
    return isinstance(target, str) and (target == CLASS or "." in target)


def find_scheme(module: str, groups: Groups) -> LayerScheme | None:
    """The scheme of a layer, None where no target means it.

    A target that names it goes before its class, and an earlier group before a later one.
    """
    for targets, scheme in groups:
        if is_ignored(module, targets):
            return scheme
    return next((scheme for targets, scheme in groups if CLASS in targets), None)


def _unsupported(found: str, supported: str = SUPPORTED) -> UnsupportedSchemeError:
    return UnsupportedSchemeError(
        f"config.json: quantization_config has {found}, which is not run here. Supported: "
        f"{supported}. Make a float model of it with `ptq convert CHECKPOINT FLOAT --to float`, or "
        "quantize the original model with one of the shipped recipes"
    )
