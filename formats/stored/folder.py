"""What is in a checkpoint folder beside its tensors: configuration, manifest, other files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from formats.cache_scheme import CacheSchemes, StateSpec
from formats.documents import Strict, check_values, read_document
from formats.errors import CheckpointError
from formats.families.registry import is_ours
from formats.families.values import check_model_values
from formats.files import find_file, sha256_file
from formats.hub import refuse_other_kinds
from formats.namespace import later
from formats.published import PublishedLayout, find_layout, needs_code

with later():
    from formats.stored import safetensors_files as weights

CONFIG = "config.json"
KV_SCALES = "quant/kv_scales.safetensors"
SINK_SCALES = "quant/sink_scales.safetensors"
ADAPTER_FACTORS = "quant/adapter_factors.safetensors"  # as `formats.adapters.factors` says
INPUT_DIVISOR, OUTPUT_DIVISOR, UNMOVABLE = "input_divisor", "output_divisor", "unmovable"
MOST_SINKS = 16  # tokens at the beginning of a sequence
MANIFEST = "quant/manifest.json"
SETTINGS = f"{CONFIG}: quantization_config"
OWN_KEY = "ptq"  # of config.json: transformers keeps it, vLLM and compressed-tensors ignore it
SETTINGS_FILES = (
    "quantize_config.json",
    "quant_config.json",
    "quantization_config.json",
    "hf_quant_config.json",
)
"""What other software has in the place of config.json's `quantization_config`, or beside it: GPTQ's
or AWQ's, AWQ's, AutoRound's, ModelOpt's."""
QUANTIZED = (".qweight", ".weight_scale", ".weight_scale_inv", ".weight_packed")
CERTIFICATE = "certificate.json"  # of these weights alone
NOT_AUXILIARY = {
    CONFIG, CERTIFICATE, "model.safetensors.index.json", "README.md", *SETTINGS_FILES
}  # fmt: skip
AUXILIARY = {".json", ".txt", ".model", ".jinja", ".tiktoken"}
AGAIN = "Copy the checkpoint again, or write it again"


class OwnPart(CacheSchemes):
    """What is ours, as config.json says under a key of its own: scales of the cache in `quant/`.

    Without it nobody could tell a folder that has lost its `quant/` from one that never had any.

    Attributes:
        sink_tokens: Tokens at the beginning of every sequence that are quantized apart: their rows
            have static input scales of their own, their K and V stay in float on a CPU.
        states: How kept recurrent states are stored, which has nothing in `quant/`.
    """

    sink_tokens: Annotated[int, Field(ge=0, le=MOST_SINKS)] = 0
    states: StateSpec | None = None


class ConfigFile(NamedTuple):
    """config.json in its parts.

    Attributes:
        model: What describes the model, in the terms of the class of transformers that computes it.
        quantization: The `quantization_config`, if there is one.
        own: What belongs in `quant/`; None in a folder that was not written here.
        published: What describes the model as it stands in the file, where that is one of the
            layouts of `formats.published`; else None.
        settings: Where the `quantization_config` stands, for messages.
    """

    model: dict[str, Any]
    quantization: dict[str, Any] | None
    own: OwnPart | None
    published: dict[str, Any] | None = None
    settings: str = SETTINGS


class WrittenFile(Strict):
    """A file as it was written."""

    bytes: Annotated[int, Field(ge=0)]
    sha256: str


class Manifest(Strict):
    """Every other file of a checkpoint, by its path in the folder."""

    files: dict[str, WrittenFile]


def auxiliary_files(folder: Path) -> tuple[Path, ...]:
    """Tokenizer, generation and licence files of a model's folder.

    Raises:
        CheckpointError: one is a link that is not followed, or no file.
    """
    names = sorted(path.name for path in folder.iterdir() if _is_auxiliary(path))
    found = (find_file(folder, name) for name in names)
    return tuple(path for path in found if path is not None)


def _is_auxiliary(path: Path) -> bool:
    if path.name in NOT_AUXILIARY or path.is_dir():
        return False
    return path.suffix in AUXILIARY or path.name.upper().startswith("LICEN")


def check_manifest(folder: Path, verify: bool) -> bool:
    """Compare a folder with its manifest, if it has one: sizes of files, with `verify` all bytes.

    Returns:
        Whether it has one.

    Raises:
        CheckpointError: a file is missing or another, or the manifest cannot be read.
    """
    manifest = read_document(folder, MANIFEST, Manifest, AGAIN)
    for name, written in manifest.files.items() if manifest else ():
        file = find_file(folder, name, MANIFEST)
        if file is None:
            raise CheckpointError(
                f"{folder}: {name} is missing; {MANIFEST} lists it. Copy the checkpoint again"
            )
        if file.stat().st_size != written.bytes:
            raise CheckpointError(
                f"{name} has {file.stat().st_size} bytes, {MANIFEST} says {written.bytes}; copy it "
                "again"
            )
        if verify and sha256_file(file) != written.sha256:
            raise CheckpointError(
                f"{name} is not what was written: its SHA-256 differs from {MANIFEST}. Copy "
                "the checkpoint again or write it again"
            )
    return manifest is not None


def read_config(path: Path, name: str = CONFIG) -> ConfigFile:
    """config.json of a folder, or what has another name in it.

    Raises:
        CheckpointError: there is none, it is damaged, or the model needs code of its own.
    """
    remedy = "Correct it, or copy that of the original model"
    config = read_document(path, name, dict[str, Any], remedy)
    if config is None:
        refuse_other_kinds(path)
        inner = sorted(found.parent for found in path.glob(f"*/{CONFIG}"))
        guess = f"did you mean {inner[0]}?" if inner else "is this a model folder?"
        if find_file(path, "adapter_config.json") is not None:
            guess = "it holds an adapter. Give its base model here, and it with --adapter"
        raise CheckpointError(f"{path}: found no config.json; {guess}")
    quantization, settings = config.pop("quantization_config", None), SETTINGS
    if quantization is None:
        quantization, settings = _settings_beside(path)
    if quantization is not None and not isinstance(quantization, dict):
        raise CheckpointError(f"{path / name}: quantization_config is not an object. {remedy}")
    layout = find_layout(config)
    if layout is not None:
        found = _published(path, layout, config, quantization, remedy)
        return found._replace(settings=settings)
    check_model_values(config, f"{path / name} is not a valid configuration", remedy)
    if needs_code(config):
        raise CheckpointError(
            f"{path / name}: model_type {config.get('model_type')!r} needs code of its own "
            "(auto_map, trust_remote_code), which is never run. Convert it to an architecture that "
            "transformers knows"
        )
    if not is_ours(config):  # others need it, with their code, for a class that they lack
        config.pop("auto_map", None)
    own = config.pop(OWN_KEY, None)
    if own is not None:
        own = check_values(own, OwnPart, f"{path / name}: {OWN_KEY}", remedy)
    return ConfigFile(config, quantization, own, settings=settings)


def _settings_beside(path: Path) -> tuple[dict[str, Any] | None, str]:
    """What stands for the `quantization_config` that config.json lacks, and its file.

    None in the folder of a float model, whatever files have been left in it.

    Raises:
        CheckpointError: the file is damaged.
    """
    name = next((name for name in SETTINGS_FILES if find_file(path, name) is not None), None)
    if name is None or not any(tensor.endswith(QUANTIZED) for tensor in weights.open_weights(path)):
        return None, SETTINGS
    found = read_document(path, name, dict[str, Any], "Get it again") or {}
    inner = found.get("quantization")
    if isinstance(inner, dict):
        return {"quant_method": "modelopt", **inner}, name
    awq = name == SETTINGS_FILES[1] or "w_bit" in found or "zero_point" in found
    return {"quant_method": "awq" if awq else "gptq", **found}, name


def _published(
    path: Path,
    layout: PublishedLayout,
    config: dict[str, Any],
    quantization: dict[str, Any] | None,
    remedy: str,
) -> ConfigFile:
    """A configuration that stands for that of another class."""
    if quantization and layout.modules:
        raise CheckpointError(
            f"{path / CONFIG}: weights of model_type {layout.model_type!r} are read in floating "
            "point alone, and these are quantized. Give the original model"
        )
    try:
        native = layout.native_config(config)
        check_model_values(native, "as the native class has it", remedy)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    return ConfigFile(native, quantization, None, config)


def check_own_cache(
    folder: Path, own: OwnPart | None, found: CacheSchemes, *, needed: bool
) -> None:
    """Compare the cache that config.json says belongs to a checkpoint with what `quant/` has.

    Args:
        own: What config.json says; None where it says nothing.
        found: How the scales in `quant/` say that the cache is quantized.
        needed: Whether scales that belong to it must be there.

    Raises:
        CheckpointError: they are missing, or of another cache.
    """
    wanted = found
    if own is not None:
        wanted = CacheSchemes(kv_cache=own.kv_cache, kv_caches=own.kv_caches)
    if wanted == found or (not found.any and not needed):
        return
    if not found.any:
        spec = wanted.kv_cache or next(filter(None, wanted.kv_caches.values()))
        raise CheckpointError(
            f"{folder}: config.json says that a cache of {spec.dtype} {spec.granularity} "
            f"belongs to this checkpoint, but {KV_SCALES} is missing. Copy the checkpoint again "
            "with its folder quant/; to run it with a cache of floats, give "
            "Engine.from_pretrained(..., quantized_kv=False), or remove the key "
            f"{OWN_KEY!r} from config.json"
        )
    raise CheckpointError(
        f"{folder}: config.json says of the cache: {wanted.model_dump()}, {KV_SCALES}: "
        f"{found.model_dump()}. They are of two checkpoints; copy one of them again as a whole"
    )
