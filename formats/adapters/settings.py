"""What PEFT's adapter_config.json says of an adapter, and which kinds of it are run here.

LoRA (Hu et al. 2021, arXiv 2106.09685), s = alpha / r, and rsLoRA (Kalajdzievski 2023, arXiv
2312.03732), s = alpha / sqrt(r), of linear layers without biases of their own. Source: PEFT 0.21,
`peft.tuners.lora.config` and `peft.utils.other.get_pattern_key`.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator

from formats.documents import Values, check_values, read_document
from formats.errors import CheckpointError
from formats.hub import model_folder

CONFIG = "adapter_config.json"
AGAIN = "Save the adapter again by PEFT's save_pretrained"
MERGE = (
    "Merge it into its base in PEFT where that can (`model.merge_and_unload()`, then "
    "save_pretrained), and take the merged model"
)
ALLOWED = (
    "Allowed are LoRA and rsLoRA of linear layers, peft_type 'LORA', with bias 'none', and prefix "
    "tuning, 'PREFIX_TUNING'"
)
REFUSED = {  # keys of other adapters; values that say nothing are passed over
    "fan_in_fan_out": "its layers hold their weights as [in, out]",
    "use_dora": "DoRA divides by the norms of the merged weights",
    "lora_bias": "its B has a bias",
    "modules_to_save": "it replaces whole modules",
    "trainable_token_indices": "it replaces rows of the embedding",
    "target_parameters": "it adds to parameters that are no linear layers",
    "layer_replication": "it repeats blocks of the base",
    "alora_invocation_tokens": "it begins with certain tokens only (aLoRA)",
    "arrow_config": "it is a router among adapters (Arrow)",
    "kasa_config": "it changed the weights of its base (KaSA)",
    "monteclora_config": "it samples (Monteclora)",
}
BASE_AS_IT_IS = ("gaussian", "eva", "orthogonal")  # beginnings of A and B that leave the base alone

Rank = Annotated[int, Field(ge=1)]
Alpha = Annotated[float, Field(allow_inf_nan=False)]


class LoraSettings(Values):
    """adapter_config.json, as far as it changes what is computed.

    Attributes:
        r: Rank, where `rank_pattern` says nothing else.
        lora_alpha: Alpha, where `alpha_pattern` says nothing else.
        use_rslora: Whether s is alpha / sqrt(r), not alpha / r.
        rank_pattern: Ranks of layers by a regular expression of the end of their names.
        alpha_pattern: Alphas of layers, likewise.
        target_modules: Last parts of the layers' names, or an expression of all of it.
        layers_to_transform: Blocks that have an adapter; None for all.
        exclude_modules: What of the targets is left out.
        base_model_name_or_path: What it was trained on.
    """

    r: Rank
    lora_alpha: Alpha
    use_rslora: bool = False
    rank_pattern: dict[str, Rank] | None = None
    alpha_pattern: dict[str, Alpha] | None = None
    target_modules: list[str] | str | None = None
    layers_to_transform: list[int] | int | None = None
    exclude_modules: list[str] | str | None = None
    base_model_name_or_path: str | None = None

    @field_validator("rank_pattern", "alpha_pattern")
    @classmethod
    def _compiles(cls, patterns: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        for pattern in patterns or ():
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is no regular expression ({error})") from error
        return patterns

    def rank(self, module: str) -> int:
        """Rank of a layer, by its name in the adapter."""
        return _by_pattern(self.rank_pattern, module, self.r)

    def scale(self, module: str) -> float:
        """s of a layer, by its name in the adapter."""
        alpha, rank = _by_pattern(self.alpha_pattern, module, self.lora_alpha), self.rank(module)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def targets(self, modules: Iterable[str]) -> set[str] | None:
        """Those of a model's linear layers that have an adapter; None where this is not known."""
        wanted = self.target_modules
        if not isinstance(wanted, list):
            return None
        return {m for m in modules if any(m == t or m.endswith(f".{t}") for t in wanted)}

    @property
    def of_all_blocks(self) -> bool:
        """Whether every layer that `targets` names has one."""
        return self.layers_to_transform is None and not self.exclude_modules


class PrefixSettings(Values):
    """adapter_config.json of prefix tuning (`formats.adapters.prefix`).

    Attributes:
        num_virtual_tokens: Positions of the cache that it fills.
        base_model_name_or_path: What it was trained on.
    """

    num_virtual_tokens: Rank
    base_model_name_or_path: str | None = None


def _by_pattern(patterns: Mapping[str, Any] | None, module: str, usual: Any) -> Any:
    """The value of the first pattern that is the end of a name."""
    found = (v for p, v in (patterns or {}).items() if re.match(rf"(.*\.)?({p})$", module))
    return next(found, usual)


def adapter_folder(path: str | Path) -> Path:
    """The folder of an adapter, downloaded where it is a name on the hub.

    Raises:
        CheckpointError: there is none, it cannot be had, or it is a file.
    """
    if os.path.isfile(os.path.expanduser(path)):
        raise CheckpointError(f"{path} is a file; give the folder of an adapter, with {CONFIG}")
    return model_folder(path, kind="an adapter")


def read_settings(folder: Path) -> LoraSettings | PrefixSettings:
    """What an adapter's folder says of it.

    Raises:
        CheckpointError: its adapter_config.json is missing or damaged, or it is no adapter that is
            run here.
    """
    values = read_document(folder, CONFIG, dict[str, Any], AGAIN)
    if values is None:
        raise CheckpointError(
            f"{folder}: found no {CONFIG}. Give the folder of a LoRA adapter that PEFT saved: "
            f"{CONFIG} and adapter_model.safetensors"
        )
    if values.get("peft_type") == "PREFIX_TUNING":
        return check_values(values, PrefixSettings, str(folder / CONFIG), AGAIN)
    reason = next(_reasons(values), None)
    if reason is not None:
        raise CheckpointError(
            f"{folder / CONFIG}: {reason}, which is not run here. {ALLOWED}. {MERGE}"
        )
    return check_values(values, LoraSettings, str(folder / CONFIG), AGAIN)


def read_lora_settings(folder: Path) -> LoraSettings:
    """`read_settings` of an adapter that changes weights, such as can be merged.

    Raises:
        CheckpointError: as there, or it is none.
    """
    settings = read_settings(folder)
    if isinstance(settings, PrefixSettings):
        raise CheckpointError(
            f"{folder / CONFIG}: found prefix tuning, which changes no weights. Quantize the model "
            f"without it, and load it when the model runs: `ptq predict CHECKPOINT --adapter "
            f"NAME={folder}`"
        )
    return settings


def _reasons(values: Mapping[str, Any]) -> Iterator[str]:
    """Why an adapter is none that is run here."""
    kind = values.get("peft_type")
    if kind != "LORA":
        yield f"peft_type is {kind!r}"
    for key, why in REFUSED.items():
        if values.get(key):
            yield f"{key} is {values[key]!r}: {why}"
    for key, value in values.items():
        if key.startswith("use_") and key != "use_rslora" and value:
            yield f"{key} is {value!r}"
    if values.get("bias", "none") != "none":
        yield f"bias is {values['bias']!r}: it changes biases of the base"
    begin = values.get("init_lora_weights", True)
    if isinstance(begin, str) and begin not in BASE_AS_IT_IS:
        yield (
            f"init_lora_weights is {begin!r}: it may have changed the weights of its base (save it "
            "with path_initial_model_for_weight_conversion)"
        )
