"""Train the default model, or one like it of another family, on permissively licensed Python code.

    python -m recipes.train_tiny_python --out recipes/tiny-python
    python -m recipes.train_tiny_python --out /tmp/tiny-python-gemma3 \\
        --config recipes/tiny-python-gemma3.json --tokenizer recipes/tiny-python --minutes 6

It reads the Python packages installed beside it (see `tiny_python_corpus` for which of them, and
for how the standard library is kept out), trains a byte-level BPE tokenizer and the model, checks
the model on text it has not seen, and writes a directory that transformers loads: weights in bf16,
tokenizer, `training.json` with every figure and source, and a model card. Nothing is downloaded.
One GPU takes minutes, and a few more for reading text before and checks after; on a CPU it is only
good for trying the script out (`--steps 5 --limit-mb 1 --batch-tokens 2048`). What every shipped
recipe costs on the model is shown by `python -m recipes.run_all`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from tqdm import tqdm
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from formats.errors import RecipeError
from recipes.tiny_python_card import Check, check_model, write_card
from recipes.tiny_python_corpus import Corpus, build_corpus

DEFAULT_CONFIG = Path(__file__).parent / "tiny-python" / "config.json"
END = "<|endoftext|>"  # id 0: ends every document
VOCABULARY = 4096
LENGTH = 1024  # tokens of a training sequence, and the longest context
TOKENIZER_SAMPLE = 40_000_000  # characters
# Words, single digits, punctuation, line ends, indentation; a word keeps one space before it.
# Unlike GPT-2's pattern it does not cut 'self' after the quote and s, and lets a prompt end with a
# line, as the indentation of the next one is a piece of its own.
PIECES = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|[\r\n]+|[^\S\r\n]+(?!\S)|\s+"
WARMUP = 200  # steps


@dataclass(frozen=True)
class Result:
    """What a training run did."""

    parameters: int
    steps: int
    tokens: int
    loss: float  # nats per token, running mean of the last steps
    seconds: float


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE of 4096 tokens; any text survives encoding and decoding unchanged."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END,
        eos_token=END,
        pad_token=END,
        clean_up_tokenization_spaces=False,
    )


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> Tensor:
    """All texts as one row of ids, each ended by the end token: [tokens] int16."""
    parts: list[Tensor] = []
    for start in tqdm(range(0, len(texts), 512), desc="encode", unit="batch"):
        for item in tokenizer.backend_tokenizer.encode_batch_fast(texts[start : start + 512]):
            parts.append(torch.tensor([*item.ids, 0], dtype=torch.int16))
    return torch.cat(parts)


def read_config(path: Path) -> PreTrainedConfig:
    """The model's shape, from a config.json of any family that transformers knows.

    Raises:
        RecipeError: there is none, or it has another vocabulary or a shorter context.
    """
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise RecipeError(f"--config {path}: no config.json of a model ({error})") from None
    found = config.vocab_size, config.max_position_embeddings
    if found[0] != VOCABULARY or found[1] < LENGTH:
        raise RecipeError(
            f"--config {path}: {found[0]} tokens, contexts of {found[1]}; needed are vocab_size "
            f"{VOCABULARY} and max_position_embeddings {LENGTH} or more"
        )
    return config


def make_optimizer(model: nn.Module, rate: float, decay: float) -> torch.optim.Optimizer:
    """AdamW; norms are not decayed."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    norms = [p for p in model.parameters() if p.dim() != 2]
    groups = [
        {"params": matrices, "weight_decay": decay},
        {"params": norms, "weight_decay": 0.0},
    ]
    on_gpu = matrices[0].is_cuda
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), eps=1e-8, fused=on_gpu)


def learning_rate(step: int, progress: float, peak: float) -> float:
    """Linear warm-up over 200 steps, then a cosine to zero at progress 1."""
    return peak * min(1.0, (step + 1) / WARMUP) * 0.5 * (1 + math.cos(math.pi * min(1, progress)))


def batch_loss(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Mean cross entropy of predicting ids [b, 1 + length] from their left context."""
    logits = model(ids[:, :-1], use_cache=False).logits.float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def make_sampler(ids: Tensor, rows: int, seed: int) -> Callable[[], Tensor]:
    """Draws batches of random windows of a row of ids: [rows, 1 + LENGTH] int64 on its device."""
    generator = torch.Generator(ids.device).manual_seed(seed)
    offsets = torch.arange(LENGTH + 1, device=ids.device)

    def draw() -> Tensor:
        starts = torch.randint(len(ids) - LENGTH, (rows, 1), generator=generator, device=ids.device)
        return ids[starts + offsets].long()

    return draw


def train(
    ids: Tensor, config: PreTrainedConfig, args: argparse.Namespace, device: torch.device
) -> tuple[PreTrainedModel, Result]:
    """Train until `args.steps` or `args.minutes` are spent, whichever comes first.

    The cosine follows the larger of both shares, so the rate ends at zero either way.
    """
    torch.manual_seed(args.seed)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    optimizer = make_optimizer(model, args.learning_rate, args.weight_decay)
    loss_of = torch.compile(batch_loss) if device.type == "cuda" else batch_loss
    rows = max(1, args.batch_tokens // LENGTH)
    draw = make_sampler(ids.to(device), rows, args.seed)
    started, progress, recent = time.perf_counter(), 0.0, math.nan
    bar = tqdm(range(args.steps), desc="train", unit="step", mininterval=10)
    step = 0
    for step in bar:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, progress, args.learning_rate)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = loss_of(model, draw())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 10 == 0 or step + 1 == args.steps:  # reading the loss waits for the device
            recent = loss.item() if math.isnan(recent) else 0.9 * recent + 0.1 * loss.item()
            bar.set_postfix(loss=f"{recent:.3f}", refresh=False)
        elapsed = (time.perf_counter() - started) / 60
        progress = max((step + 1) / args.steps, elapsed / args.minutes)
        if progress >= 1:
            break
    bar.close()
    steps = step + 1
    seconds = time.perf_counter() - started
    size = sum(parameter.numel() for parameter in model.parameters())
    return model, Result(size, steps, steps * rows * LENGTH, recent, round(seconds, 1))


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Options of the command line."""
    summary, _, usage = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=summary,
        epilog=usage.strip("\n"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument(
        "--config",
        type=Path,
        default=DEFAULT_CONFIG,
        metavar="FILE",
        help="config.json of the model to train, of any family (default: that of the default "
        "model; recipes/tiny-python-gemma3.json is a Gemma 3 of its size)",
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="DIR",
        help="model folder whose tokenizer to take, so that perplexities compare (default: train "
        "one)",
    )
    parser.add_argument("--steps", type=int, default=10_000, help="optimizer steps at most")
    parser.add_argument("--minutes", type=float, default=8.0, help="training time at most")
    parser.add_argument("--limit-mb", type=float, default=1000.0, help="text at most")
    parser.add_argument(
        "--site-packages",
        type=Path,
        nargs="+",
        default=[Path(sysconfig.get_path("purelib"))],
        help="folders of installed packages to read",
    )
    parser.add_argument("--batch-tokens", type=int, default=131_072, help="tokens a step")
    parser.add_argument("--learning-rate", type=float, default=6e-3, help="peak")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--check-windows", type=int, default=256, help="windows a check at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(argv)


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write weights in bf16, configuration and tokenizer in the transformers layout."""
    out.mkdir(parents=True, exist_ok=True)
    nn.Module.to(model, torch.bfloat16)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def training_record(
    args: argparse.Namespace, corpus: Corpus, tokens: int, result: Result, check: Check
) -> dict[str, Any]:
    """Everything about a run that `training.json` and the model card tell."""
    on_gpu = torch.device(args.device).type == "cuda"
    return {
        "config": None if args.config == DEFAULT_CONFIG else str(args.config),
        "tokenizer": None if args.tokenizer is None else str(args.tokenizer),
        "steps": result.steps,
        "tokens": result.tokens,
        "training_loss": round(result.loss, 4),
        **asdict(check),
        "parameters": result.parameters,
        "sequence_length": LENGTH,
        "batch_tokens": args.batch_tokens,
        "learning_rate": args.learning_rate,
        "weight_decay": args.weight_decay,
        "seed": args.seed,
        "seconds": result.seconds,
        "python": ".".join(map(str, sys.version_info[:2])),
        "hardware": f"one {torch.cuda.get_device_name()}" if on_gpu else "a CPU",
        "corpus_tokens": tokens,
        "corpus_files": len(corpus.train),
        "held_out_files": len(corpus.held_out),
        "stdlib_copies_left_out": corpus.stdlib_copies,
        "sources": corpus.sources(),
    }


def main(argv: list[str] | None = None) -> None:
    """Corpus, tokenizer, training, check, files; prints the figures as a table."""
    args = parse_args(argv)
    device = torch.device(args.device)
    try:
        config = read_config(args.config)
        corpus = build_corpus(args.site_packages, int(args.limit_mb * 1e6), os.cpu_count() or 1)
    except RecipeError as error:
        raise SystemExit(f"error: {error}") from None
    if args.tokenizer is None:
        share = min(1.0, TOKENIZER_SAMPLE / corpus.characters)
        tokenizer = train_tokenizer(corpus.train[: math.ceil(share * len(corpus.train))])
    else:
        tokenizer = AutoTokenizer.from_pretrained(args.tokenizer, local_files_only=True)
    ids = encode(tokenizer, corpus.train)
    model, result = train(ids, config, args, device)
    save(model, tokenizer, args.out)
    model = AutoModelForCausalLM.from_pretrained(args.out, dtype=torch.float32).eval()
    nn.Module.to(model, device)
    check = check_model(model, tokenizer, corpus.held_out, LENGTH, args.check_windows)
    record = training_record(args, corpus, len(ids), result, check)
    (args.out / "training.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    write_card(args.out, record)
    for key, value in record.items():
        if key != "sources":
            print(f"{key:24s} {value}")


if __name__ == "__main__":
    main()
