"""What holds of every family: our numbers are transformers', before and after quantization."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from calibrate.stream import BlockStream
from formats.checkpoint.read import Checkpoint
from inference.config import EngineConfig
from inference.engine import Engine
from inference.requests.request import SamplingParams
from ptq.methods.gptq import GPTQSpec
from ptq.pipeline.driver import quantize_tokens
from tests.fake_quantized import fake_quantized_logits
from tests.ptq.quantizing import SMOOTH, make_plan, random_tokens

NEAR = 0.15  # of the KL, by roundings that fall the other way after sums in another order
METHODS = {  # by preset: methods, and how far logits of random weights may go from the original's
    "a8w8c8": (SMOOTH, 0.08),
    "w4": ((GPTQSpec(),), 0.3),
    "fp8_channel": ((GPTQSpec(),), 0.15),
}


def transformers_logits(folder: Path, ids: Tensor) -> Tensor:
    """Logits fp32 [T, vocabulary] by transformers, of a float or compressed-tensors folder."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(ids[None]).logits[0].float()


def distance(found: Tensor, wanted: Tensor) -> float:
    """Relative distance of two tensors."""
    return ((found - wanted).norm() / wanted.norm()).item()


def divergence(found: Tensor, wanted: Tensor) -> float:
    """Mean KL divergence of the next token's distribution, in nats, from logits [T, vocabulary]."""
    q, p = found.double().log_softmax(-1), wanted.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).mean().item()


def check_engine(folder: Path, ids: Tensor, longest: int = 512, **config: Any) -> Engine:
    """Our float logits are transformers', and the greedy tokens after a prompt in chunks too.

    Args:
        folder: Of the float model.
        ids: Of a prompt [T].
        longest: Tokens of the longest request.
        config: Other settings of the engine.
    """
    sizes = {"max_batched_tokens": 16, "max_batch_size": 2, "max_model_len": longest}
    engine = Engine.from_pretrained(folder, config=EngineConfig(**sizes, **config))
    assert distance(engine.score(ids.tolist()), transformers_logits(folder, ids)) < 1e-4
    (out,) = engine.generate([ids.tolist()], SamplingParams(max_tokens=8, ignore_eos=True))
    whole = torch.cat((ids, torch.tensor(out.token_ids)))
    greedy = transformers_logits(folder, whole).argmax(-1)
    assert list(out.token_ids) == greedy[len(ids) - 1 : -1].tolist()
    return engine


def but_one_in_ci(preset: str, presets: Iterable[str] = METHODS) -> list[Any]:
    """All presets, of which the CI alone runs those that other families show as well."""
    return but_in_ci(presets, preset)


def but_in_ci(values: Iterable[Any], *here: Any) -> list[Any]:
    """All values of a parameter, of which the CI alone runs all but these."""
    return [v if v in here else pytest.param(v, marks=pytest.mark.ci) for v in values]


def in_turn(names: Iterable[str], presets: Sequence[Any]) -> list[Any]:
    """Every name with every preset, of which each name has one in turn outside of the CI."""
    return [
        pytest.param(name, preset, marks=() if j == i % len(presets) else pytest.mark.ci)
        for i, name in enumerate(names)
        for j, preset in enumerate(presets)
    ]


def check_blocks(folder: Path) -> None:
    """Calibration runs the family's blocks as transformers does."""
    checkpoint, ids = Checkpoint.open(folder), random_tokens().sequences()[0]
    stream = BlockStream(AutoConfig.from_pretrained(folder), checkpoint.tensor)
    stream.start([ids])
    for index in range(len(stream.blocks)):
        stream.advance(stream.load(index))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        wanted = model.model(ids[None]).last_hidden_state[0]
        assert distance(model.model.norm(stream.inputs[0]), wanted) < 1e-4


def check_quantized(
    folder: Path,
    out: Path,
    preset: str,
    longest: int = 512,
    methods: tuple | None = None,
    *,
    opens: bool = True,
) -> Checkpoint:
    """A quantized checkpoint opens here and in transformers; both give the float model's logits.

    With its cache quantized, too, our engine is as far from the float model as the same numbers are
    in transformers' own code, rounded by hand.

    Args:
        folder: Of the float model.
        out: Where the run's output goes.
        preset: What is quantized; one of `METHODS`.
        longest: Tokens of the longest request.
        methods: In the place of the preset's.
        opens: Whether transformers opens such a checkpoint of this family; its reader of
            compressed-tensors does not know what every model is made of.
    """
    usual, bound = METHODS[preset]
    plan = make_plan(folder, out, preset, methods=methods or usual)
    path = quantize_tokens(plan, random_tokens(), progress=False).checkpoint
    ids = random_tokens().sequences()[1]
    wanted = transformers_logits(folder, ids)
    sizes = EngineConfig(max_model_len=longest)
    engine = Engine.from_pretrained(path, config=sizes, quantized_kv=False)
    ours = engine.score(ids.tolist())
    assert distance(ours, wanted) < bound
    if opens:
        theirs = transformers_logits(path, ids)
        assert distance(theirs, wanted) < bound
        assert distance(ours, theirs) < bound / 2
    checkpoint = Checkpoint.open(path, verify=True)
    check_rounding(checkpoint, ids, wanted, bound, longest)
    return checkpoint


def check_rounding(
    checkpoint: Checkpoint,
    ids: Tensor,
    wanted: Tensor,
    bound: float,
    longest: int = 512,
    near: float = NEAR,
    apart: int = 0,
    **config: Any,
) -> None:
    """Our engine on a quantized checkpoint, cache and all, beside transformers rounded by hand.

    Args:
        checkpoint: The quantized one.
        ids: Of one text [T].
        wanted: The float model's logits of it [T, vocabulary].
        bound: How far logits may go from these.
        longest: Tokens of the longest request.
        near: How far apart the two KL may be, as a share of one.
        apart: Tokens at which the two differ most, that are left out: a router may send them
            elsewhere after a rounding that falls the other way.
        config: Other settings of the engine.
    """
    rounded = fake_quantized_logits(checkpoint, ids)
    settings = EngineConfig(max_model_len=longest, **config)
    engine = Engine.from_pretrained(checkpoint.path, config=settings)
    ours = engine.score(ids.tolist())
    assert distance(ours, rounded) < bound / 2
    kept = (ours - rounded).norm(dim=-1).argsort()[: len(ids) - apart]
    told = divergence(ours[kept], wanted[kept]), divergence(rounded[kept], wanted[kept])
    assert abs(told[0] - told[1]) < near * told[1], told
