"""What the default model, or one like it, is worth; and its card, from its training's record.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerFast

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
def mean_loss(model: PreTrainedModel, rows: Tensor) -> float:
    """Mean cross entropy in nats over positions 1.. of every row of ids [n, length]."""
    total = 0.0
    for part in rows.to(model.device).split(16):
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


PARTS = {  # of a block, by the model type
    "llama": ": RMSNorm, rotary embedding, grouped-query attention, SwiGLU",
    "gemma3_text": ": RMSNorm (1 + w) before and after each layer, norms of q and k, rotary "
    "embedding, windows and full attention in turn, GEGLU",
}
CARD = """---
license: apache-2.0
language: code
library_name: transformers
pipeline_tag: text-generation
tags: [python, {model_type}, quantization, test-model]
---
# {name}

A language model of {parameters:,} parameters that continues Python source. It is here so that
quantization can be tried, tested and demonstrated without a download: it is small, but it is
trained, and like large models it has massive activations that naive int8 quantization breaks.

| architecture | |
|---|---|
| layout | `{architecture}`{parts} |
| blocks, hidden size | {blocks}, {hidden} |
| heads | {heads} query, {kv_heads} key/value, of {head_size} |
| intermediate size | {intermediate} |
| vocabulary | 4096, byte-level BPE, tied embeddings; `<|endoftext|>` (id 0) ends a document |
| context | {sequence_length} tokens; no begin token is added |
| weights | bf16 |

## Figures
| | |
|---|---|
| training | {steps:,} steps of {batch_tokens:,} tokens, {seconds:.0f} s on {hardware} |
| loss on its training text, last steps | {training_loss:.3f} nats per token |
| loss on held-out files of the same packages | {held_out_loss:.3f} nats per token |
| perplexity on standard library modules, per token | {stdlib_perplexity:.2f} |
| bits per byte of their text | {stdlib_bits_per_byte:.3f} |
| perplexity ratio, int8 weights, static int8 activations, no method | {static_ratio:.3f} |
| perplexity ratio, int8 weights, dynamic int8 activations | {dynamic_ratio:.3f} |

The standard library is Python {python}'s, in windows of {sequence_length} tokens.
Perplexities are those of {evaluation};
static activation scales come from {calibration}.
In the latter, the largest input magnitudes of each kind of linear layer are:

| input of | largest of any block | median block |
|---|---|---|
{absmax_rows}

## Data
{corpus_files:,} Python files, {corpus_tokens:,} tokens; {held_out_files:,} files more are held out.
They come from installed packages whose metadata name only permissive licences; files whose head
names another licence, vendored code, tables and repeated files are left out. **Python's standard
library is not trained on**: a file is left out if more than a fiftieth of its runs of five lines
also occur in the library ({stdlib_copies_left_out:,} files were), so that the library can serve for
calibration and evaluation.

| package | version | licence as stated | files | bytes |
|---|---|---|---|---|
{source_rows}

The weights are no copy of this source, but a model may repeat short passages of what it was
trained on; their licences are those above.

## Limits
It writes plausible lines and wrong programs. It knows no language but Python, follows no
instruction, and says nothing about the quality of larger models: use it for tests and
demonstrations of quantization only.

## Train it again
From the root of the project, with torch, transformers and one GPU:

    {command}

Other installed packages give another model; this one's are listed above. AdamW (0.9, 0.95), peak
learning rate {learning_rate:g}, weight decay {weight_decay:g} (norms excepted), cosine to zero,
bf16 autocast, gradients clipped to norm 1, seed {seed}.
"""


def rows(table: list[tuple[object, ...]]) -> str:
    """Lines of a Markdown table."""
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in table)


def write_card(folder: Path, record: Mapping[str, Any]) -> None:
    """Write README.md of a model's folder, from its config.json and what `training.json` holds."""
    config = AutoConfig.from_pretrained(folder)
    largest, median = record["absmax"], record["absmax_median"]
    (architecture,) = config.architectures or [""]
    card = CARD.format(
        **record,
        name=folder.resolve().name,
        model_type=config.model_type,
        architecture=architecture,
        parts=PARTS.get(config.model_type, ""),
        blocks=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_size=config.head_dim,
        intermediate=config.intermediate_size,
        command=training_command(folder, record),
        evaluation=", ".join(EVALUATION),
        calibration=", ".join(CALIBRATION),
        absmax_rows=rows([(k, f"{largest[k]:.1f}", f"{median[k]:.1f}") for k in largest]),
        source_rows=rows([tuple(source.values()) for source in record["sources"]]),
    )
    (folder / "README.md").write_text(card, encoding="utf-8")


def training_command(folder: Path, record: Mapping[str, Any]) -> str:
    """The command that trains such a model again; time does not end it."""
    words = ["python -m recipes.train_tiny_python --out", str(folder)]
    for option in ("config", "tokenizer"):
        if record.get(option):
            words += [f"--{option}", record[option]]
    words += [f"--learning-rate {record['learning_rate']:g} --steps {record['steps']}"]
    return " ".join([*words, "--minutes 60"])
