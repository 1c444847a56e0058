"""Train the head that drafts tokens of the default model: `recipes/tiny-python-eagle` (EAGLE-3).

    python -m recipes.train_tiny_python_eagle FOLDER_OF_TEXT output/head --device cuda

The model continues the first eighth of each sequence of the text; the head is trained on what it
wrote, as its drafts are compared with that.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, LlamaConfig

from calibrate.data import load_tokens
from calibrate.spec import DatasetSpec, SplitSpec
from formats.checkpoint.compressed_tensors import quantization_config
from formats.command import count, device, run_command
from formats.errors import RecipeError
from formats.files import replace_file
from formats.namespace import ROOT
from formats.residual_rotation import KEY as ROTATION
from formats.residual_rotation import rotation_seeds
from formats.scheme import LayerScheme, WeightSpec
from formats.stored.weights import StoredWeight, weight_tensors
from formats.tokenizer import load_tokenizer
from inference.config import EngineConfig
from inference.engine import Engine
from inference.requests.request import SamplingParams
from kernels.numerics import choose_scale, quantize
from recipes.tiny_python_eagle_network import HeadNetwork

MODEL = ROOT / "recipes" / "tiny-python"
BEGINNING = 8  # the model is given a sequence's first eighth
AT_ONCE = 256  # sequences that it continues together
WARM_TEXT = 0.8  # temperature of every other sequence; the others are greedy
DECAY = 0.8  # weight of a pass beside the one before, as in the authors' code
WARM = 0.03  # share of the steps in which the learning rate grows
CLIPPED = 0.5  # norm of the gradient
INT8_WEIGHTS = LayerScheme(weights=WeightSpec())
SHOWN = 20  # steps between two updates of the bar: each waits for the device


def continued_by_model(model: Path, ids: Tensor, device: str) -> Tensor:
    """Sequences of a text with the model's words after the first eighth of each.

    Every other one is greedy, the others are drawn at a temperature of 0.8, by seeds of their own.

    Args:
        ids: int64 [sequences, length].

    Returns:
        Of the same shape.
    """
    count, length = ids.shape
    given = max(1, length // BEGINNING)
    sizes = EngineConfig(max_batch_size=AT_ONCE, max_model_len=length)
    engine = Engine.from_pretrained(model, config=sizes, device=device)
    room = length - given
    params = [
        SamplingParams(max_tokens=room, ignore_eos=True, temperature=WARM_TEXT * (i % 2), seed=i)
        for i in range(count)
    ]
    outputs = engine.generate([row[:given].tolist() for row in ids], params)
    return torch.tensor([[*output.prompt_token_ids, *output.token_ids] for output in outputs])


@dataclass(frozen=True)
class HeadSpec:
    """A head, and how it is trained; the defaults are the shipped head's.

    Attributes:
        vocabulary: Tokens that it drafts: those most frequent in the text.
        taps: Blocks of the model whose inputs it reads.
        heads: Query heads of its attention; K and V keep the model's ratio.
        intermediate_size: Of its feed-forward layer.
        passes: How often it runs on its own output in training.
        batch: Sequences in a step.
        epochs: How often the text is read.
        learning_rate: The highest.
        minutes: Most time of training; the learning rate has fallen to zero by then.
    """

    vocabulary: int = 3072
    taps: tuple[int, ...] = (2, 4, 7)
    heads: int = 4
    intermediate_size: int = 768
    passes: int = 4
    batch: int = 16
    epochs: int = 200
    learning_rate: float = 3e-3
    minutes: float = 3.0
    seed: int = 0


def train_head(model: Any, ids: Tensor, spec: HeadSpec, *, progress: bool = True) -> HeadNetwork:
    """Train a head.

    Args:
        model: A causal language model of transformers, which is not changed.
        ids: int64 [sequences, length], the text.
        progress: Show a bar with the share of tokens that were drafted right, by pass.
    """
    own, device = model.config.get_text_config(), model.device
    torch.manual_seed(spec.seed)
    tokens = frequent(ids, spec.vocabulary)
    network = HeadNetwork(head_config(own, spec), spec.taps, tokens)
    _begin(network, model.get_output_embeddings().weight.data[tokens])
    network.to(device)
    steps = spec.epochs * (len(ids) // spec.batch)
    optimizer = torch.optim.AdamW(
        network.parameters(),
        spec.learning_rate,
        betas=(0.9, 0.95),
        weight_decay=0.0,
        fused=device.type == "cuda",
    )
    bar = tqdm(total=steps, disable=not progress)
    started, done = time.monotonic(), 0.0
    for step, batch in enumerate(_batches(ids.to(device), spec)):
        optimizer.param_groups[0]["lr"] = spec.learning_rate * _share_of_rate(done)
        found = _step(model, network, batch, spec.passes)
        torch.nn.utils.clip_grad_norm_(network.parameters(), CLIPPED)
        optimizer.step()
        optimizer.zero_grad()
        if step % SHOWN == 0:
            bar.set_postfix_str(" ".join(f"{right:.2f}" for right in found), refresh=False)
        bar.update()
        spent = (time.monotonic() - started) / 60 / spec.minutes
        done = max((step + 1) / steps, spent)
        if done >= 1:
            break
    bar.close()
    return network.eval()


def _share_of_rate(done: float) -> float:
    """Of the highest learning rate: it grows at first, and falls as a cosine to zero."""
    if done < WARM:
        return 0.04 + 0.96 * done / WARM
    return 0.5 + 0.5 * math.cos(math.pi * (done - WARM) / (1 - WARM))


def _step(model: Any, network: HeadNetwork, batch: Tensor, passes: int) -> list[Tensor]:
    """Gradients of a batch; the share of tokens drafted right, by pass."""
    embedded, hidden, wanted = _of_model(model, batch, network.taps)
    length = batch.shape[1] - passes - 1
    outputs = network(embedded[:, 1:], hidden[:, :length], passes)
    found = [
        network.loss(logits, wanted[:, 1 + j : 1 + j + length]) for j, logits in enumerate(outputs)
    ]
    loss = sum((DECAY**j * nats for j, (nats, _) in enumerate(found)), torch.zeros(()))
    loss.backward()
    return [right for _, right in found]


def _begin(network: HeadNetwork, rows: Tensor) -> None:
    """First weights: the model's rows of the head, and of its hidden states the last as it is."""
    size = network.config.hidden_size
    with torch.no_grad():
        network.lm_head.weight.copy_(rows)
        network.fc.weight.mul_(0.1)
        network.fc.weight[:, -size:] = torch.eye(size)


def frequent(ids: Tensor, count: int) -> Tensor:
    """The `count` most frequent tokens of a text, ascending; fewer where it has fewer."""
    counts = torch.bincount(ids.flatten())
    order = counts.argsort(descending=True, stable=True)[: min(count, int((counts > 0).sum()))]
    return order.sort().values


def write_head(network: HeadNetwork, folder: Path, bits: Literal[8, 16] = 8) -> None:
    """Write a head in the published layout: config.json and model.safetensors.

    Args:
        bits: Of each weight: 16 are bf16; 8 are int8 with a scale for each output channel.
    """
    tensors, rounded = {}, {}
    for name, tensor in network.state_dict().items():
        module = name.removesuffix(".weight")
        if name.startswith("_rotary"):
            continue
        if bits == 8 and tensor.dim() == 2:
            rounded[module] = INT8_WEIGHTS
            stored = weight_tensors(INT8_WEIGHTS, _rounded(tensor.float()), torch.bfloat16)
            tensors |= {f"{module}.{leaf}": part.cpu() for leaf, part in stored.items()}
        else:
            kept = tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
            tensors[name] = kept.cpu().contiguous()
    config = network.config.to_dict()
    config |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": len(tensors["d2t"]),
        "dtype": "bfloat16",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(network.taps)},
        "tie_word_embeddings": False,
    }
    if rounded:
        config["quantization_config"] = quantization_config(INT8_WEIGHTS, (), rounded)
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / "model.safetensors", save(tensors, {"format": "pt"}))
    replace_file(folder / "config.json", (json.dumps(config, indent=2) + "\n").encode())


def _rounded(weight: Tensor) -> StoredWeight:
    """A weight [N, K] to the nearest, with scales that bf16 holds."""
    scale = choose_scale(weight.abs().amax(dim=1, keepdim=True)).to(torch.bfloat16).float()
    return StoredWeight(quantize(weight, scale), scale)


def head_config(model: Any, spec: HeadSpec) -> LlamaConfig:
    """A block of the model's width."""
    own = model.num_attention_heads
    kv = max(1, getattr(model, "num_key_value_heads", own) * spec.heads // own)
    config = LlamaConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=spec.heads,
        num_key_value_heads=kv,
        head_dim=getattr(model, "head_dim", None) or model.hidden_size // own,
        max_position_embeddings=model.max_position_embeddings,
        rms_norm_eps=getattr(model, "rms_norm_eps", 1e-6),
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    if seeds := rotation_seeds(model.to_dict()):
        config.update({ROTATION: list(seeds)})  # the basis that it is trained in
    return config


def _batches(ids: Tensor, spec: HeadSpec) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(spec.seed)
    for _ in range(spec.epochs):
        order = torch.randperm(len(ids), generator=generator)
        for i in range(0, len(ids) // spec.batch * spec.batch, spec.batch):
            yield ids[order[i : i + spec.batch].to(ids.device)]


@torch.no_grad()
def _of_model(model: Any, ids: Tensor, taps: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Of a text embeddings [B, T, H], hidden states [B, T, taps H], logits [B, T, vocabulary]."""
    said = model(ids, output_hidden_states=True, use_cache=False)
    hidden = torch.cat([said.hidden_states[tap] for tap in taps], dim=-1)
    embedded = model.get_input_embeddings()(ids)
    return embedded.float(), hidden.float(), said.logits.float()


def main(argv: Sequence[str] | None = None) -> int:
    """Train the head and write it."""
    parser = argparse.ArgumentParser(prog="python -m recipes.train_tiny_python_eagle")
    parser.add_argument("text", help="folder or file of text")
    parser.add_argument("head", type=Path, help="folder that gets the head")
    parser.add_argument("--sequences", type=count, default=4307, metavar="N", help="of 512 tokens")
    parser.add_argument("--minutes", type=float, default=HeadSpec.minutes, help="time of training")
    parser.add_argument("--device", type=device, default="cpu", help="cpu (the default) or cuda")
    arguments = parser.parse_args(argv)
    amount = SplitSpec(samples=arguments.sequences, sequence_length=512)
    data = DatasetSpec(name=arguments.text, fewer=True, calibration=amount)
    tokens = load_tokens(data, load_tokenizer(MODEL), "calibration")
    whole = tokens.ids[tokens.mask.all(dim=1)]
    if len(whole) < HeadSpec.batch:
        raise RecipeError(
            f"{arguments.text}: {len(whole)} whole sequences of 512 tokens; a step takes "
            f"{HeadSpec.batch}, give more text"
        )
    ids = continued_by_model(MODEL, whole, arguments.device)
    dtype = torch.float32 if arguments.device == "cpu" else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=dtype)
    model.to(torch.device(arguments.device))  # pyright: ignore[reportArgumentType]
    model.eval().requires_grad_(requires_grad=False)
    write_head(train_head(model, ids, HeadSpec(minutes=arguments.minutes)), arguments.head)
    return 0


if __name__ == "__main__":
    raise SystemExit(run_command(main))
