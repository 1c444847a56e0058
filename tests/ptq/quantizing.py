"""What the tests of methods and driver share: small recipes, tokens, observed blocks."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from calibrate.backward import KeptInputs, backward
from calibrate.data import TokenSet
from calibrate.gradients import BlockGradients
from calibrate.spec import DatasetSpec, SplitSpec
from calibrate.stream import BlockStream
from formats.checkpoint.read import Checkpoint
from formats.modeling.model import meta_model
from formats.scheme import PRESETS, Scheme, WeightSpec
from inference.engine import Engine
from ptq.methods.common.block import BlockWork
from ptq.methods.common.folding import Folding, SmoothedGroup
from ptq.methods.common.method import Method
from ptq.methods.common.rounding import round_weight
from ptq.methods.rtn import RTNSpec
from ptq.methods.smoothquant import SmoothQuantSpec, smoothing_scale
from ptq.pipeline import resume
from ptq.pipeline.driver import quantize_tokens
from ptq.pipeline.passes import block_work, observe
from ptq.pipeline.resume import ResumableRun
from ptq.plan.plan import Plan, build_plan
from ptq.plan.preflight import header_bytes
from ptq.recipe.schema import (
    LayersSpec,
    ModelSpec,
    ObserversSpec,
    OutputSpec,
    Recipe,
    ReportSpec,
    StatisticsSpec,
)
from ptq.result import QuantizationResult

SomeMethod = TypeVar("SomeMethod", bound=Method)
ACCURACY = {"speed": False, "attribution": False, "completions": 0}  # of a report, alone
SPLITS = ("calibration", "evaluation")
FEW = (
    *(f"dataset.{split}={{samples: 2, sequence_length: 32}}" for split in SPLITS),
    *("report.speed=false", "report.attribution=false", "report.completions=0"),
)
SMOOTH = (SmoothQuantSpec(alphas=(0.5, 0.9), search_samples=3), RTNSpec())
DATA = DatasetSpec(
    calibration=SplitSpec(samples=8, sequence_length=64),
    evaluation=SplitSpec(samples=2, sequence_length=64),
)


def make_plan(
    model: Path,
    output: Path,
    scheme: str | Scheme = "a8w8c8",
    *,
    methods: tuple = SMOOTH,
    layers: dict[str, str] | None = None,
    ignore: tuple[str, ...] = ("lm_head",),
    observers: ObserversSpec | None = None,
    statistics: StatisticsSpec | None = None,
) -> Plan:
    recipe = Recipe(
        model=ModelSpec(path=model),
        dataset=DATA,
        scheme=PRESETS[scheme] if isinstance(scheme, str) else scheme,
        layers=tuple(
            LayersSpec(match=(pattern,), scheme=PRESETS[preset].of_layers)
            for pattern, preset in (layers or {}).items()
        ),
        observers=observers or ObserversSpec(),
        statistics=statistics or StatisticsSpec(),
        methods=methods,
        ignore=ignore,
        output=OutputSpec(path=output),
        report=ReportSpec(speed=None),
    )
    return build_plan(recipe, Checkpoint.open(model), force=True)


def write_recipe(
    folder: Path, model: Path, samples: int = 2, length: int = 32, **keys: object
) -> Path:
    """`r.yaml` of a model, and the text that it calibrates and measures on.

    Args:
        samples: Sequences of each split, of so many tokens.
        keys: Of the recipe, which rounds to `w8`, writes to `out` and measures no speed.
    """
    amounts = {s: {"samples": samples, "sequence_length": length} for s in SPLITS}
    recipe = {
        "model": {"path": str(model)},
        "dataset": {"name": "text.py", **amounts},
        "scheme": "w8",
        "methods": ["rtn"],
        "output": {"path": "out"},
        "report": {"speed": False},
    }
    (folder / "r.yaml").write_text(yaml.safe_dump(recipe | keys))
    text = "".join(f"def f{i}(x, y):\n    return x * {i} + y\n\n" for i in range(200))
    (folder / "text.py").write_text(text)
    return folder / "r.yaml"


def settings(*more: str) -> list[str]:
    """Words of a command: two short samples for each split, accuracy alone, and more settings."""
    return [word for one in (*FEW, *more) for word in ("--set", one)]


def write_header(folder: Path) -> None:
    """The file of a model's weights without its bytes: a hole as long as they are."""
    config = AutoConfig.from_pretrained(folder)
    header, end = {}, 0
    for name, tensor in meta_model(config).state_dict().items():
        start, end = end, end + 2 * tensor.numel()
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def random_tokens(sequences: int = 6, length: int = 40, vocabulary: int = 384) -> TokenSet:
    """Random tokens; every second sequence ends in padding."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(1, vocabulary, (sequences, length), generator=generator)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[::2, length - 5 :] = False
    return TokenSet(ids=ids.masked_fill(~mask, 0), mask=mask, source="random", split="calibration")


def quantize_head(
    model: Path, out: Path, scheme: str = "w4", of_head: str = "w8", **options
) -> Checkpoint:
    """A checkpoint whose head is quantized, too, by plain rounding unless `methods` say otherwise."""
    options = {"methods": (RTNSpec(),), "ignore": (), "layers": {"lm_head": of_head}} | options
    plan = make_plan(model, out, scheme, **options)
    executed(plan, force=True)
    return Checkpoint.open(out / "checkpoint")


def quantized(model: Path, output: Path, *given, **named) -> QuantizationResult:
    """A run of what `make_plan` makes of these arguments, on random tokens."""
    return executed(make_plan(model, output, *given, **named))


def executed(plan: Plan, **options) -> QuantizationResult:
    """A run of a plan on random tokens."""
    return quantize_tokens(plan, random_tokens(), progress=False, **options)


def opened(*given, **named) -> Checkpoint:
    """The checkpoint, verified, of such a run."""
    return Checkpoint.open(quantized(*given, **named).checkpoint, verify=True)


IDS = torch.arange(1, 90) * 7 % 384


def scored(model: Path, ids: torch.Tensor = IDS) -> torch.Tensor:
    """Log probabilities that the engine gives after each of some tokens."""
    return Engine.from_pretrained(model).score(ids).log_softmax(-1)


def divergence(exact: torch.Tensor, found: torch.Tensor) -> float:
    """Mean KL divergence between log probabilities [tokens, vocabulary], in nats."""
    return (exact.exp() * (exact - found)).sum(-1).mean().item()


def solved(work: BlockWork, method: SomeMethod, *, see: bool = True) -> SomeMethod:
    """A method that has solved a block, after it has seen its samples where it is to."""
    if see:
        observe(work, [method])
    else:
        method.prepare(work)
    method.solve(work)
    return method


class Stop(BaseException):
    """Stands for a kill: nothing of ours catches it."""


@contextmanager
def stopped_run(saves: int = 1, by: type[BaseException] = Stop) -> Iterator[None]:
    """A run in it is stopped once it was saved so many times, with states each time."""
    save, saved = ResumableRun.save, []

    def save_and_stop(self, *arguments):
        save(self, *arguments)
        saved.append(1)
        if len(saved) == saves:
            raise by

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ResumableRun, "save", save_and_stop)
        patch.setattr(resume, "SHARE", 1e9)  # however little time a block took
        with pytest.raises(by):
            yield


def files(folder: Path) -> dict[str, bytes]:
    """What a folder's files hold, by their paths in it."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def goes_on(
    expected: QuantizationResult,
    run: Callable[[], QuantizationResult],
    saves: int = 1,
    by: type[BaseException] = Stop,
) -> QuantizationResult:
    """What a run leaves that is stopped and goes on: the same bytes as one that was not."""
    with stopped_run(saves, by):
        run()
    found = run()
    assert found.resumed_blocks == saves
    assert files(found.checkpoint) == files(expected.checkpoint)
    return found


def weight_bytes(folder: Path) -> int:
    """Bytes of a checkpoint's tensors, scales of the cache included, and at most of headers."""
    checkpoint = Checkpoint.open(folder)
    scales = [scale for pair in checkpoint.kv_scales.values() for scale in pair]
    tensors = [checkpoint.tensor(name) for name in checkpoint.names()]
    found = sum(tensor.nbytes for tensor in (*scales, *tensors))
    names = [f"{a}.{role}" for a in checkpoint.kv_scales for role in ("k_cache", "v_cache")]
    most = header_bytes([*checkpoint.names(), *names])
    assert found < checkpoint.nbytes <= found + most
    return found + most


def observed_work(plan: Plan, index: int = 0) -> BlockWork:
    """A block of the plan's model after the samples ran through it."""
    checkpoint = Checkpoint.open(plan.recipe.model.path)
    config = AutoConfig.from_pretrained(plan.recipe.model.path)
    stream = BlockStream(config, checkpoint.tensor)
    stream.start(random_tokens().sequences())
    work = block_work(plan, checkpoint, stream.load(index))
    observe(work)
    return work


def with_gradients(work: BlockWork, plan: Plan) -> BlockWork:
    """Give a block what the samples' gradients show of it."""
    checkpoint = Checkpoint.open(plan.recipe.model.path)
    stream = BlockStream(AutoConfig.from_pretrained(plan.recipe.model.path), checkpoint.tensor)
    kept: dict[str, BlockGradients] = {}
    sequences = random_tokens().sequences()
    backward(stream, sequences, size=256, inputs=KeptInputs(), found=kept.__setitem__)
    work.gradients = kept[work.block.name]
    return work


def edit_model(source: Path, target: Path, change=None, **settings) -> Path:
    """Copy a model of one file; `change` edits the mapping of its tensors, settings are config's."""
    shutil.copytree(source, target)
    if change is not None:
        tensors = load_file(source / "model.safetensors")
        change(tensors)
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, target / "model.safetensors", metadata={"format": "pt"})
    return edit_config(target, **settings) if settings else target


def edit_config(folder: Path, **values: object) -> Path:
    """A folder whose config.json has other values."""
    config = json.loads((folder / "config.json").read_text()) | values
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def per_channel(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight rounded to int8 with a scale for each output channel, and the scales."""
    stored = round_weight(weight, WeightSpec(), torch.float32)
    return stored.q, stored.scale


def fold_alpha(group: SmoothedGroup, alpha: float) -> Folding:
    """SmoothQuant's factors of a strength."""
    return group.fold(smoothing_scale(group.x_absmax, group.w_absmax, alpha))


def add_outliers(tensors: dict[str, torch.Tensor]) -> None:
    """Give the input of every down_proj three channels a hundred times as large as the others."""
    for name, tensor in tensors.items():
        if name.endswith("up_proj.weight"):
            tensor[[3, 50, 101]] *= 100
        if name.endswith("down_proj.weight"):
            tensor[:, [3, 50, 101]] /= 64


def enlarge_v(tensors: dict[str, torch.Tensor]) -> None:
    """A channel of each head's V that is far larger than the others, which o makes up for."""
    for name, tensor in tensors.items():
        layer = name.rpartition("self_attn.")[2]
        if layer.startswith("v_proj"):
            tensor.view(2, -1, *tensor.shape[1:])[:, 3] *= 32
        elif layer == "o_proj.weight":
            tensor.view(len(tensor), 4, -1)[:, :, 3] /= 32
