"""What `ptq train-head` does: load a model and text, train, write."""

from __future__ import annotations

import argparse

import torch
from transformers import AutoModelForCausalLM

from calibrate.data import load_tokens
from calibrate.spec import DatasetSpec
from formats.checkpoint.read import Checkpoint
from formats.errors import RecipeError
from formats.tokenizer import load_tokenizer
from ptq.draft_head.own_text import continued_by_model
from ptq.draft_head.training import HeadSpec, train_head, write_head


def run(arguments: argparse.Namespace, data: DatasetSpec) -> None:
    """Train the head that the arguments ask for.

    Raises:
        CheckpointError: the model is damaged.
        RecipeError: it is quantized or too small, or the text cannot be read.
    """
    checkpoint = Checkpoint.open(arguments.model)
    if checkpoint.quantized_modules:
        raise RecipeError(
            f"{checkpoint.path} is quantized; train the head on the float model that it was made "
            "of. It serves the quantized one as well"
        )
    tokens = load_tokens(data, load_tokenizer(checkpoint.path), "calibration")
    whole = tokens.ids[tokens.mask.all(dim=1)]
    if arguments.own_text:
        whole = continued_by_model(checkpoint, whole, arguments.device)
    dtype = torch.float32 if arguments.device == "cpu" else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(checkpoint.path, dtype=dtype)
    if arguments.device != "cpu":
        torch.set_float32_matmul_precision("high")  # TF32
    spec = HeadSpec(
        vocabulary=arguments.vocabulary,
        taps=tuple(arguments.blocks) if arguments.blocks else None,
        heads=arguments.heads,
        intermediate_size=arguments.intermediate_size,
        batch=arguments.batch_size,
        epochs=arguments.epochs,
        learning_rate=arguments.learning_rate,
        minutes=arguments.minutes,
        seed=arguments.seed,
    )
    model.to(torch.device(arguments.device))  # pyright: ignore[reportArgumentType]
    model.eval().requires_grad_(requires_grad=False)
    network = train_head(model, whole, spec, progress=not arguments.quiet)
    write_head(network, arguments.head, arguments.bits)
