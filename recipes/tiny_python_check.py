"""What the default model is worth: perplexity on unseen text, and its activation outliers.

The model exists to test quantization, so beside its perplexity three facts are taken: the largest
magnitude at the input of each kind of linear layer, and what int8 weights and activations cost
without any method, with static (per tensor, from calibration text) and dynamic (per token)
activation scales. A large static cost beside a small dynamic one is the signature of the massive
activations of large models.
"""

from __future__ import annotations

import math
import sysconfig
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import ptq  # noqa: F401  (joins our kernels folder to a foreign package of that name)
from kernels.numerics import block_absmax, choose_scale, fake_quantize

CALIBRATION = ("configparser", "codecs", "functools", "heapq", "optparse", "plistlib", "shutil")
EVALUATION = (
    "argparse", "ast", "bdb", "difflib", "ftplib", "inspect", "pickle", "smtplib", "tarfile"
)  # fmt: skip


@dataclass(frozen=True)
class Check:
    """Figures of one model; losses in nats per token, perplexities per token."""

    held_out_loss: float
    stdlib_perplexity: float
    stdlib_bits_per_byte: float
    static_ratio: float  # perplexity, naive static A8W8 / float
    dynamic_ratio: float  # perplexity, naive dynamic A8W8 / float
    absmax: dict[str, float]  # kind of linear layer -> largest input magnitude of any layer
    absmax_median: dict[str, float]  # the same, median over layers

    def to_json(self) -> dict[str, object]:
        """As plain JSON values."""
        return asdict(self)


def stdlib_text(modules: Sequence[str]) -> list[str]:
    """Sources of standard library modules of the running interpreter."""
    root = Path(sysconfig.get_path("stdlib"))
    return [(root / f"{name}.py").read_text(encoding="utf-8") for name in modules]


def windows(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str], length: int) -> Tensor:
    """Token ids of texts joined by the end token, cut into rows: [windows, length] int64."""
    ids: list[int] = []
    for text in texts:
        ids += [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    return torch.tensor(ids[: len(ids) // length * length]).view(-1, length)


@torch.no_grad()
def mean_loss(model: PreTrainedModel, rows: Tensor, batch: int = 16) -> float:
    """Mean cross entropy in nats over positions 1.. of every row of ids [n, length]."""
    total = 0.0
    for part in rows.to(model.device).split(batch):
        logits = model(part, use_cache=False).logits[:, :-1].float()
        losses = nn.functional.cross_entropy(
            logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum"
        )
        total += losses.item()
    return total / (rows.shape[0] * (rows.shape[1] - 1))


def linears(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """Linear layers of the decoder blocks by name; embedding and head stay float."""
    found = model.named_modules()
    return {n: m for n, m in found if isinstance(m, nn.Linear) and ".layers." in n}


@contextmanager
def input_hooks(
    model: PreTrainedModel, hook: Callable[[str, Tensor], Tensor | None]
) -> Iterator[None]:
    """Call `hook(name, x)` before every linear layer; what it returns replaces x."""

    def bind(name: str) -> Callable[[nn.Module, tuple[Tensor]], tuple[Tensor] | None]:
        def pre(_module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor] | None:
            replaced = hook(name, args[0])
            return None if replaced is None else (replaced,)

        return pre

    handles = [m.register_forward_pre_hook(bind(n)) for n, m in linears(model).items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def input_absmax(model: PreTrainedModel, rows: Tensor) -> dict[str, Tensor]:
    """Largest input magnitude of every linear layer over rows of ids."""
    found: dict[str, Tensor] = {}

    def observe(name: str, x: Tensor) -> None:
        here = x.abs().amax().float()
        found[name] = torch.maximum(found.get(name, here), here)

    with input_hooks(model, observe):
        mean_loss(model, rows)
    return found


@contextmanager
def int8_weights(model: PreTrainedModel) -> Iterator[None]:
    """Weights of all decoder linears rounded to int8 per output channel, restored afterwards."""
    original = {name: layer.weight.data for name, layer in linears(model).items()}
    for name, layer in linears(model).items():
        weight = original[name]
        layer.weight.data = fake_quantize(weight, choose_scale(block_absmax(weight, (1, -1))))
    try:
        yield
    finally:
        for name, layer in linears(model).items():
            layer.weight.data = original[name]


def int8_loss(model: PreTrainedModel, rows: Tensor, absmax: dict[str, Tensor] | None) -> float:
    """`mean_loss` with int8 weights and inputs: static scales from `absmax`, or one a token."""

    def quantize(name: str, x: Tensor) -> Tensor:
        if absmax is not None:
            return fake_quantize(x, choose_scale(absmax[name]))
        flat = x.flatten(0, -2)
        return fake_quantize(flat, choose_scale(block_absmax(flat, (1, -1)))).view_as(x)

    with int8_weights(model), input_hooks(model, quantize):
        return mean_loss(model, rows)


def check_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    held_out: Sequence[str],
    length: int,
    limit: int,
) -> Check:
    """Measure a model.

    Args:
        model: In fp32 and in evaluation mode.
        held_out: Held-out training text.
        length: Tokens of a window.
        limit: Windows of each text at most.
    """
    unseen = windows(tokenizer, held_out, length)[:limit]
    texts = stdlib_text(EVALUATION)
    rows = windows(tokenizer, texts, length)[:limit]
    absmax = input_absmax(model, windows(tokenizer, stdlib_text(CALIBRATION), length)[:limit])
    loss = mean_loss(model, rows)
    kinds: dict[str, list[float]] = defaultdict(list)
    for name, value in absmax.items():
        kinds[name.rsplit(".", 1)[1]].append(value.item())
    text_bytes = len(tokenizer.backend_tokenizer.decode(rows.flatten().tolist()).encode())
    return Check(
        held_out_loss=mean_loss(model, unseen) if len(unseen) else math.nan,
        stdlib_perplexity=math.exp(loss),
        stdlib_bits_per_byte=loss * rows.numel() / text_bytes / math.log(2),
        static_ratio=math.exp(int8_loss(model, rows, absmax) - loss),
        dynamic_ratio=math.exp(int8_loss(model, rows, None) - loss),
        absmax={kind: max(values) for kind, values in kinds.items()},
        absmax_median={k: sorted(values)[len(values) // 2] for k, values in kinds.items()},
    )
