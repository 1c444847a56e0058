"""The card of the default model, or of one like it: from its config and its training's record."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from recipes.tiny_python_check import CALIBRATION, EVALUATION

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
