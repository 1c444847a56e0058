"""The recipe: everything that a run needs, in one strict file.

    model: {path: tiny-python}              # a folder, or organization/model on the hub
    dataset:
      name: stdlib                          # or a local file, or a name that `datasets` knows
      calibration: {samples: 64, sequence_length: 512}
      evaluation: {samples: 64, sequence_length: 512}
    scheme: a8w8c8                          # a preset, or weights, activations and kv_cache
    layers:                                 # optional; later entries override earlier ones
      - {match: ['re:.*down_proj'], scheme: a8w8_dynamic}    # or weights and activations
    budget: {kl: 0.01, target: cpu}         # or instead: choose the bits of each group of layers
    observers:
      input: {method: absmax}
      kv_cache: {method: absmax}
    methods:
      - smoothquant: {alpha: search}
      - rtn
    sinks: {keep: auto}                     # first tokens of a sequence that are quantized apart
    statistics: {histograms: false, hessians: auto}    # kept for `ptq solve`
    device: auto                            # where blocks are solved: a GPU if there is one; or
                                            # {gpus: 4}
    ignore: [lm_head, 're:.*layers\\.0\\.mlp\\.down_proj']
    output: {path: output/a8w8c8}           # relative to the current directory
    report:
      thresholds: {perplexity_ratio: 1.01, kl: 0.01}
      speed: {batch: 4, prompt_tokens: 128, new_tokens: 64}    # or false
      attribution: {sequences: 4}           # or false: where the loss comes from
      completions: 3                        # of both models, side by side
      peers: [bitsandbytes-nf4]             # other tools beside ours; see ptq.recipe.peers
      device: auto                          # or cpu, cuda: where the two models run for it

A recipe may start from another one, `base: other.yaml`, or from a shipped one by its name, `base:
a8w8c8`. Its own keys override the base's: mappings key by key, lists and values as a whole.

Paths of the model and of data are relative to the recipe's folder, so that a recipe and what it
uses can be moved together. The output path, and every path given on the command line, is relative
to the current directory. A loaded recipe holds absolute paths and every default.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from calibrate.spec import DatasetSpec, ObserverSpec
from formats.cache_scheme import KVCacheSpec
from formats.checkpoint.targets import last_match
from formats.families.block_layers import is_weight_only
from formats.gguf.locate import locate_model
from formats.hub import find_model
from formats.namespace import later
from formats.scheme import LayerScheme, Scheme, Strict
from formats.stored.folder import MOST_SINKS
from ptq.methods.registry import AnyMethod, method_fault
from ptq.recipe.budget import BudgetSpec
from ptq.recipe.peers import PeerChoice

with later():
    from formats.adapters import merge
    from formats.adapters import settings as adapters

Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


def _compiles(pattern: str) -> str:
    if pattern.startswith("re:"):
        try:
            re.compile(pattern.removeprefix("re:"))
        except re.error as error:
            raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
    return pattern


Pattern = Annotated[str, AfterValidator(_compiles)]


class ModelSpec(Strict):
    """The model to quantize: in the transformers layout with safetensors, here or on the hub.

    YAML: ``model: {path: organization/model, revision: main}``
    """

    path: Path
    """Folder with config.json, safetensors and the tokenizer's files, relative to the recipe's
    folder; or `tiny-python`, which comes with ptq; or `organization/model` on the Hugging Face hub.
    If both exist, the folder is used.
    """
    revision: str | None = None
    """Branch, tag or commit of a model on the hub; default: its main branch. A run records the
    commit.
    """
    adapter: Path | None = None
    """Folder of a LoRA adapter saved by PEFT, or its name on the hub. It is merged into the weights
    first, so the run's original is the merged model.
    """

    @property
    def base(self) -> Path:
        """The local folder; one of the hub is downloaded first, once in a process.

        Raises:
            CheckpointError: there is none, or it cannot be had.
        """
        return locate_model(self.path, self.revision, floats=True)

    @property
    def folder(self) -> Path:
        """`base`, or that of the model with the adapter merged in, made when first asked for.

        Raises:
            CheckpointError: as of `base`, or the adapter is not one of it.
        """
        base = self.base
        return base if self.adapter is None else merge.merged_folder(base, self.adapter)

    @property
    def title(self) -> str:
        """For a reader: the path, or the name on the hub with what is known of the revision."""
        text = str(self.path) if self.revision is None else f"{self.path} ({self.revision})"
        return text if self.adapter is None else f"{text} with the adapter {self.adapter}"

    def pinned(self) -> ModelSpec:
        """The same model for good: an absolute path, or the commit that is on the hub now.

        Raises:
            CheckpointError: there is no such model, or it cannot be had.
        """
        adapter = self.adapter
        if adapter is not None:
            adapter = adapters.adapter_folder(adapter).absolute()  # of the hub: the commit's
        if self.path.is_absolute():
            return self.model_copy(update={"adapter": adapter})
        if self.revision is None and (found := find_model(self.path)) is not None:
            return ModelSpec(path=found.absolute(), adapter=adapter)
        return ModelSpec(path=self.path, revision=self.base.name, adapter=adapter)


class ObserversSpec(Strict):
    """How clipping ranges are chosen for the static inputs of linear layers and for K and V.

    YAML: ``observers: {input: {method: absmax}, kv_cache: {method: absmax}}``
    """

    input: ObserverSpec = ObserverSpec()
    """For the static inputs of linear layers."""
    kv_cache: ObserverSpec = ObserverSpec()
    """For the static scales of cached keys and values."""

    @property
    def by_absmax(self) -> bool:
        """Whether static scales follow from maxima alone."""
        return self.input.method == self.kv_cache.method == "absmax"


class SinksSpec(Strict):
    """Sink tokens: the first tokens of a sequence, which most attention goes to, and whose
    activations can be hundreds of times those of all others and decide every static scale.
    Statistics of ordinary tokens leave them out, and methods count a sink token by its relative
    error, as 16 ordinary tokens, in recipes of weights alone, too. When the model runs, their rows
    have static input scales of their own, and their K and V stay in floating point where others'
    do not; latents of sink tokens do so on a CPU alone.

    YAML: ``sinks: {keep: auto}``
    """

    keep: Literal["auto", "none"] | Annotated[int, Field(ge=1, le=MOST_SINKS)] = "auto"
    """How many tokens: `auto` looks at the calibration data first, and takes those positions from
    the first on where some input is 64 times larger than that of an ordinary token, or a value V
    smaller than a third (4 at most; V does not count where inputs have static scales and the cache
    is not quantized); `none` treats all tokens alike, for runtimes that know no sink tokens.
    """


class StatisticsSpec(Strict):
    """What calibration keeps beyond what the recipe itself needs, so that `ptq solve` can use it.

    YAML: ``statistics: {histograms: true, hessians: true, gradients: true}``
    """

    histograms: bool = False
    """Count magnitudes where the scheme has no static scales, too; `ptq solve` can then give
    another scheme static ones, by any observer.
    """
    hessians: bool | Literal["auto"] = "auto"
    """Keep the second moments of all inputs, so that `ptq solve` can run GPTQ: fp32 [in, in] on
    disk for each input of a block. `auto` keeps them where a method of the recipe uses them and
    all of them take at most 1 GB.
    """
    gradients: bool | Literal["auto"] = "auto"
    """Run the model backward and keep what errors of its layers cost it (Fisher factors), so that
    `ptq solve` can run methods that need it. `auto` does so where a method of the recipe needs it,
    and keeps it where all of it takes at most 1 GB.
    """
    gradient_tokens: Count = 16384
    """Most tokens of calibration data that are run backward: whole samples, one at the least. The
    others weigh as these do on average. Twice as many take twice as long and gain little.
    """


class LayersSpec(Strict):
    """Linear layers that have another scheme than the rest of the model.

    The cache is that of the recipe's own scheme.

    YAML: ``layers: [{match: ['re:.*down_proj'], scheme: a8w8_dynamic}]``
    """

    match: Annotated[tuple[Pattern, ...], Field(min_length=1)]
    """Full names, or `re:` patterns matched from the name's start. A pattern that matches no layer
    is an error.
    """
    scheme: LayerScheme
    """A preset without a cache, or `weights` and `activations` spelled out."""

    @field_validator("scheme")
    @classmethod
    def _quantizes(cls, scheme: LayerScheme) -> LayerScheme:
        if scheme.weights is None:
            raise ValueError(
                "quantizes no weights; give weights, or name layers that stay in float in ignore"
            )
        return scheme


class CachesSpec(Strict):
    """Blocks whose cache has another scheme than that of the rest of the model.

    YAML: ``caches: [{match: ['re:model.layers.[01]$'], kv_cache: {dtype: int8}}]``
    """

    match: Annotated[tuple[Pattern, ...], Field(min_length=1)]
    """Full names of blocks, or `re:` patterns matched from the name's start. A pattern that matches
    no block is an error.
    """
    kv_cache: KVCacheSpec | None
    """How their keys and values are cached; null leaves them in the model's own type."""


class DevicesSpec(Strict):
    """Several devices that calibrate and solve together: samples are spread over them, a block's
    layers are solved side by side. The checkpoint has the same bytes as on one of them, and a run
    that was stopped may go on with another number.

    YAML: ``device: {gpus: 4}``
    """

    gpus: Count | None = None
    """Number of GPUs, from the first one on, all of one kind."""
    cpus: Count | None = None
    """Number of CPU threads, each with as many of torch's own as there are (set `OMP_NUM_THREADS`):
    the same work as on GPUs, to try it without any.
    """

    @model_validator(mode="after")
    def _one_kind(self) -> DevicesSpec:
        if (self.gpus is None) == (self.cpus is None):
            found = "both gpus and cpus" if self.gpus is not None else "neither gpus nor cpus"
            raise ValueError(f"found {found}; give one of them, such as device: {{gpus: 2}}")
        return self


class OutputSpec(Strict):
    """The folder that receives the checkpoint, the report and the resolved recipe.

    YAML: ``output: {path: output/w4, format: gguf}``
    """

    path: Path
    """Folder to create, relative to the current directory. Holds `checkpoint`, `report`,
    `recipe.yaml` and the statistics.
    """
    format: Literal["folder", "gguf"] = "folder"
    """`gguf` also writes the checkpoint as `model.gguf` next to it, for llama.cpp, Ollama and LM
    Studio: the same integers. Needs `ptq[gguf]`; int4 and int8 weights in groups of 32 are exact.
    """


class ThresholdsSpec(Strict):
    """Limits of the quantized model against the original; null is not checked. If all are null, the
    run is compared with the known loss of its scheme on other models.

    YAML: ``thresholds: {perplexity_ratio: 1.01, kl: 0.01, top1_agreement: 0.97}``
    """

    perplexity_ratio: Positive | None = None
    """Most that the quantized model's perplexity may be of the original's: 1.01 allows 1% more."""
    kl: Positive | None = None
    """Most mean KL divergence of the next token's distribution, in nats: `RESULTS.md` has the loss
    of each recipe by model.
    """
    top1_agreement: Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)] | None = None
    """Least share of positions at which both find the same token most likely, from 0 to 1."""


class SpeedSpec(Strict):
    """The speed measurement of the report: equal requests of fixed lengths.

    YAML: ``speed: {batch: 4, prompt_tokens: 128, new_tokens: 64}``
    """

    batch: Count = 4
    """Requests that run at a time."""
    prompt_tokens: Count = 128
    """Tokens of each prompt."""
    new_tokens: Annotated[int, Field(ge=2)] = 64
    """Tokens that each request generates."""


class AttributionSpec(Strict):
    """How the report attributes the loss: the original is run with one kind of
    layer quantized at a time, and with one block at a time (in at most 12 groups of blocks).

    YAML: ``attribution: {sequences: 4, tokens: 128}``
    """

    sequences: Count = 4
    """Evaluation sequences that each of these runs scores."""
    tokens: Annotated[int, Field(ge=2)] = 128
    """Most tokens of each, from its start: there are about twenty of these runs."""


class ReportSpec(Strict):
    """What the report checks and measures.

    YAML: ``report: {thresholds: {kl: 0.01}, speed: false, peers: [bitsandbytes-nf4]}``
    """

    thresholds: ThresholdsSpec = ThresholdsSpec()
    """If one is missed, the run is red, with exit code 1. Without any, it is red if it surely loses
    more than twice what its scheme lost on the measured model nearest in size and family.
    """
    speed: SpeedSpec | None = SpeedSpec()
    """How speed is measured; `false` (or null) skips it."""
    attribution: AttributionSpec | None = AttributionSpec()
    """How the loss is attributed to kinds of layers and to blocks; `false` (or null) skips it."""
    tasks: tuple[str, ...] = ()
    """Tasks that both models run, as `ptq eval --tasks` names them: `local` for those that need no
    network. Needs the extra `eval`.
    """
    task_items: Count = 200
    """Most items of each of these tasks."""
    completions: Annotated[int, Field(ge=0)] = 3
    """Prompts from the evaluation text that both models complete, shown side by side."""
    certificate: Literal["quick", "full"] | None = None
    """Certify the checkpoint after the report, as `ptq certify --level` does; a red figure makes
    the run red.
    """
    peers: tuple[PeerChoice, ...] = ()
    """Other tools that quantize the same model, shown beside our run: a name each, or a mapping."""
    device: Literal["auto", "cpu", "cuda"] | DevicesSpec = "auto"
    """Where both models run to be compared: `auto` is where blocks are solved. `{gpus: 4}` spreads
    the sequences over four GPUs, each with both models; all else is measured on the first of them.
    """

    @field_validator("device")
    @classmethod
    def _only_gpus(cls, device: str | DevicesSpec) -> str | DevicesSpec:
        if isinstance(device, DevicesSpec) and device.gpus is None:
            raise ValueError(
                "found cpus; both models run on the processor as a whole: give cpu, or gpus"
            )
        return device

    @field_validator("peers")
    @classmethod
    def _once(cls, peers: tuple[PeerChoice, ...]) -> tuple[PeerChoice, ...]:
        names = [spec.name for spec in peers]
        if len(set(names)) < len(names):
            raise ValueError(f"found {', '.join(names)}; give each peer once")
        return peers


class Recipe(Strict):
    """One run, with nothing left open; see the module's docstring for its YAML.

    Methods work on each layer by its own scheme: `clip` leaves layers without static inputs alone,
    `refine` those with fp8 weights.

    Raises:
        ValueError: methods do not fit the scheme, or a pattern is not a regular expression.
    """

    model: ModelSpec
    """The model to quantize."""
    dataset: DatasetSpec = DatasetSpec()
    """The text for calibration and evaluation."""
    scheme: Scheme
    """What is quantized and how: the name of a preset, or `weights`, `activations`, `kv_cache` and
    `states` spelled out.
    """
    layers: tuple[LayersSpec, ...] = ()
    """Linear layers with a scheme of their own; a later entry overrides an earlier one."""
    caches: tuple[CachesSpec, ...] = ()
    """Blocks with a cache of their own; a later entry overrides an earlier one."""
    budget: BudgetSpec | None = None
    """Limit of loss or size, which chooses the bits of each group of layers. `scheme` then sets
    inputs and cache (default `w4`: both stay in float), `methods` the rounding (default `two_sided`
    with 2 sweeps).
    """
    observers: ObserversSpec = ObserversSpec()
    """How ranges of static scales are chosen from what calibration saw."""
    sinks: SinksSpec = SinksSpec()
    """The first tokens of a sequence, where they are unlike all others."""
    statistics: StatisticsSpec = StatisticsSpec()
    """What calibration keeps for `ptq solve` beyond what the recipe itself needs."""
    methods: Annotated[tuple[AnyMethod, ...], Field(validate_default=True)] = ()
    """What is done to the model: a method's name each, or `name: options`, in the order of their
    sections below. A scheme with weights needs one that rounds, such as `rtn` or `gptq`.
    """
    ignore: tuple[Pattern, ...] = ("lm_head",)
    """Linear layers that stay in floating point, in spite of `layers`: full names, or `re:`
    patterns matched from the name's start. Without `lm_head` in it, the head is quantized, too: as
    `layers` says of it, else by `scheme`. A head that is the embedding is stored once for both; the
    method `untie` gives it a tensor of its own, for other runtimes. Layers that predict further
    tokens (MTP) are rounded to the nearest; `re:mtp`, or their own names, keep them as they are.
    """
    device: Literal["auto", "cpu", "cuda"] | DevicesSpec = "auto"
    """Where blocks are calibrated and solved: `auto` takes a GPU if there is one, `{gpus: 4}` takes
    four of them.
    """
    output: OutputSpec
    """Where everything is written."""
    report: ReportSpec = ReportSpec()
    """What is measured, and what makes the run red."""

    @field_validator("scheme")
    @classmethod
    def _quantizes(cls, scheme: Scheme) -> Scheme:
        if not scheme.quantizes_anything:
            raise ValueError("quantizes nothing; give weights and activations, kv_cache or states")
        return scheme

    @field_validator("layers")
    @classmethod
    def _beside_weights(
        cls, layers: tuple[LayersSpec, ...], info: ValidationInfo
    ) -> tuple[LayersSpec, ...]:
        scheme: Scheme | None = info.data.get("scheme")
        if layers and scheme is not None and scheme.weights is None:
            raise ValueError(
                f"the scheme {scheme.wac} quantizes no weights, of which layers could differ; give "
                "scheme the weights of most layers, and name those that stay in float in ignore"
            )
        return layers

    @field_validator("budget")
    @classmethod
    def _has_what_to_choose(
        cls, budget: BudgetSpec | None, info: ValidationInfo
    ) -> BudgetSpec | None:
        scheme: Scheme | None = info.data.get("scheme")
        if budget is not None and info.data.get("layers"):
            raise ValueError("found layers beside it, which a budget chooses; leave them out")
        if budget is not None and scheme is not None and scheme.weights is None:
            raise ValueError(
                f"the scheme {scheme.wac} quantizes no weights, whose bits a budget chooses; give "
                "one that does, such as w4"
            )
        return budget

    def scheme_of(self, name: str) -> LayerScheme:
        """What `layers` and `scheme` want of a linear layer, by its full name.

        Of a layer that reads what latent attention caches that is its weight's part.
        """
        entry = self.entry_of(name)
        own = self.scheme.of_layers if entry is None else self.layers[entry].scheme
        return own.weights_alone if is_weight_only(name) else own

    def entry_of(self, name: str) -> int | None:
        """Index of the entry of `layers` that decides on a linear layer, if one does."""
        return last_match(name, (entry.match for entry in self.layers))

    @property
    def without_gpu(self) -> bool:
        """Whether it wants blocks to be solved on the CPU, whatever else there is."""
        chosen = self.device
        return chosen == "cpu" or (isinstance(chosen, DevicesSpec) and chosen.gpus is None)

    @property
    def static(self) -> bool:
        """Whether inputs or the cache have static scales, which follow from data."""
        caches = [entry.kv_cache for entry in self.caches]
        return (
            self.scheme.static
            or any(entry.scheme.static_input for entry in self.layers)
            or any(cache is not None and not cache.dynamic for cache in caches)
        )

    @property
    def quantized_caches(self) -> tuple[KVCacheSpec, ...]:
        """How caches are quantized: by `scheme`, then by each of `caches`."""
        found = (self.scheme.kv_cache, *(entry.kv_cache for entry in self.caches))
        return tuple(spec for spec in found if spec is not None)

    @property
    def sums_keys(self) -> bool:
        """Whether keys are centred or compensated, by sums that follow from data."""
        return any(spec.center_keys or spec.compensate_keys for spec in self.quantized_caches)

    def cache_of(self, block: str) -> KVCacheSpec | None:
        """What `caches` and `scheme` want of the cache of a block, by its full name."""
        entry = last_match(block, (entry.match for entry in self.caches))
        return self.scheme.kv_cache if entry is None else self.caches[entry].kv_cache

    @field_validator("methods")
    @classmethod
    def _fit_the_scheme(
        cls, methods: tuple[AnyMethod, ...], info: ValidationInfo
    ) -> tuple[AnyMethod, ...]:
        scheme: Scheme | None = info.data.get("scheme")
        layers: tuple[LayersSpec, ...] = info.data.get("layers", ())
        if scheme is not None:
            fault = method_fault(methods, scheme, [entry.scheme for entry in layers])
            if fault is not None:
                raise ValueError(fault)
        return methods
