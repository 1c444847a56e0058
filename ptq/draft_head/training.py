"""Training a head: text runs through the model, and the head learns to say what it says next."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save
from torch import Tensor
from tqdm import tqdm
from transformers import LlamaConfig

from formats.checkpoint.compressed_tensors import quantization_config
from formats.errors import RecipeError
from formats.files import replace_file
from formats.residual_rotation import KEY as ROTATION
from formats.residual_rotation import rotation_seeds
from formats.scheme import LayerScheme, WeightSpec
from formats.stored.weights import StoredWeight, weight_tensors
from kernels.numerics import choose_scale, quantize
from ptq.draft_head.network import HeadNetwork

DECAY = 0.8  # weight of a pass beside the one before, as in the authors' code
WARM = 0.03  # share of the steps in which the learning rate grows
CLIPPED = 0.5  # norm of the gradient
INT8_WEIGHTS = LayerScheme(weights=WeightSpec())
SHOWN = 20  # steps between two looks at what was right: each waits for the device


@dataclass(frozen=True)
class HeadSpec:
    """A head, and how it is trained.

    Attributes:
        vocabulary: Tokens that it drafts: those most frequent in the text.
        taps: Blocks of the model whose inputs it reads; default: `usual_taps`.
        heads: Of its attention; default: as many as the model's. K and V keep their share of them.
        intermediate_size: Of its feed-forward layer; default: the model's.
        passes: How often it is run on its own output in training.
        batch: Sequences of a step.
        epochs: How often the text is read.
        learning_rate: The highest.
        minutes: Most time of training; the learning rate has fallen to zero then.
        seed: Of the first weights and of the order of sequences.
    """

    vocabulary: int = 32000
    taps: tuple[int, ...] | None = None
    heads: int | None = None
    intermediate_size: int | None = None
    passes: int = 4
    batch: int = 4
    epochs: int = 1
    learning_rate: float = 2e-3
    minutes: float = math.inf
    seed: int = 0


def usual_taps(layers: int) -> tuple[int, int, int]:
    """The blocks whose inputs a head reads: low, middle and high, as in the authors' code."""
    return min(2, layers - 1), layers // 2, max(layers - 3, layers // 2)


def train_head(model: Any, ids: Tensor, spec: HeadSpec, *, progress: bool = True) -> HeadNetwork:
    """Train a head.

    Args:
        model: A causal language model of transformers, which is not changed.
        ids: int64 [sequences, length], the text.
        spec: How.
        progress: Show a bar with the share of tokens that were drafted right, by pass.

    Raises:
        RecipeError: the model has no such blocks, the text is too short, or there is no time.
    """
    own, device = model.config.get_text_config(), model.device
    if ids.shape[1] < 2 * spec.passes + 2:
        raise RecipeError(f"sequences of {ids.shape[1]} tokens are too short for a head")
    if not spec.minutes > 0:
        raise RecipeError(f"{spec.minutes:g} minutes are no time to train; give more than 0")
    torch.manual_seed(spec.seed)
    tokens = frequent(ids, spec.vocabulary)
    layers = own.num_hidden_layers
    taps = spec.taps or usual_taps(layers)
    if not all(0 <= tap < layers for tap in taps):
        raise RecipeError(
            f"a head cannot read blocks {list(taps)}: the model's are 0 to {layers - 1}"
        )
    network = HeadNetwork(head_config(own, spec), taps, tokens)
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


def write_head(network: HeadNetwork, folder: Path, bits: Literal[8, 16] = 16) -> None:
    """Write a head in the published layout: config.json and model.safetensors.

    Args:
        network: The head.
        folder: Gets the files.
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
    """A block of the model's width.

    Raises:
        RecipeError: query heads do not share those of K and V evenly.
    """
    own = model.num_attention_heads
    heads, kv = spec.heads or own, getattr(model, "num_key_value_heads", own)
    kv = max(1, heads * kv // own)
    if heads % kv:
        raise RecipeError(f"{heads} heads do not share {kv} of K and V evenly; take another number")
    config = LlamaConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=spec.intermediate_size or model.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=heads,
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
