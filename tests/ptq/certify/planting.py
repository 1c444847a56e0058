"""Faults that a certificate must find, planted in copies of a model or of a checkpoint."""

import json
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from formats.files import sha256_file
from formats.stored.folder import KV_SCALES, MANIFEST
from inference.engine import Engine
from tests.ptq.quantizing import edit_model

Tensors = dict[str, Tensor]
TABLE = "quant/scale_table.json"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def round_rows(weight: Tensor, bits: int) -> Tensor:
    """A matrix rounded to integers of so many bits, each row by its largest value."""
    most = 2 ** (bits - 1) - 1
    scale = weight.float().abs().amax(1, keepdim=True) / most
    return ((weight.float() / scale).round().clamp(-most - 1, most) * scale).to(weight.dtype)


def coarse_layer(source: Path, target: Path, layer: int, bits: int = 3) -> Path:
    """All linear layers of one block in a few bits, a scale a row."""

    def change(tensors: Tensors) -> None:
        for name in [n for n in tensors if n.startswith(f"model.layers.{layer}.")]:
            if tensors[name].dim() == 2:
                tensors[name] = round_rows(tensors[name], bits)

    return edit_model(source, target, change)


def silent_head(source: Path, target: Path, layer: int, head: int) -> Path:
    """One head's keys are zero: its queries attend to all tokens alike."""
    config = json.loads((source / "config.json").read_text())
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]

    def change(tensors: Tensors) -> None:
        weight = tensors[f"model.layers.{layer}.self_attn.k_proj.weight"]
        weight[head * size : (head + 1) * size] = 0

    return edit_model(source, target, change)


def late_end(source: Path, target: Path, token: int, by: float, text: str) -> Path:
    """The logit of a token less by a constant, in a head apart from the embedding.

    The head's row gets `by` times a vector u with u . h = 1 for the last hidden states h of a text,
    by least squares; these follow from its logits.
    """
    engine = Engine.from_pretrained(source)
    ids = engine.tokenizer(text)["input_ids"][:1500]
    embedding = load_file(source / "model.safetensors")[EMBEDDING].float()
    hidden = torch.linalg.lstsq(embedding[::8], engine.score(ids)[:, ::8].T).solution.T
    square = hidden.T @ hidden + 1e-3 * hidden.square().sum() / hidden.shape[1] * torch.eye(
        hidden.shape[1]
    )
    u = torch.linalg.solve(square, hidden.sum(0))

    def change(tensors: Tensors) -> None:
        head = tensors[EMBEDDING].clone()
        head[token] = (head[token].float() - by * u).to(head.dtype)
        tensors[HEAD] = head

    return edit_model(source, target, change, tie_word_embeddings=False)


def coarse_tokens(source: Path, target: Path, tokens: list[int], bits: int = 4) -> Path:
    """A checkpoint with embeddings of some tokens in a few bits, a scale a row."""
    shutil.copytree(source, target)
    for file in sorted(target.glob("model*.safetensors")):
        with safe_open(file, "pt") as opened:
            metadata, names = opened.metadata(), [*opened.keys()]
        if EMBEDDING in names:
            break
    tensors = load_file(file)
    tensors[EMBEDDING][tokens] = round_rows(tensors[EMBEDDING][tokens], bits)
    save_file(tensors, file, metadata=metadata)
    return hashed(target, file.name)


def wrong_cache_scales(source: Path, target: Path, times: float = 4.0) -> Path:
    """All static scales of the cache so many times as large, as the table and manifest say, too."""
    shutil.copytree(source, target)
    file = target / KV_SCALES
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    scales = {n: t * times if n.endswith("_scale") else t for n, t in load_file(file).items()}
    save_file(scales, file, metadata=metadata)
    table = json.loads((target / TABLE).read_text())
    for entry in table["entries"]:
        if entry["role"] in ("k_cache", "v_cache"):
            entry["scale_min"], entry["scale_max"] = _ends(scales[entry["tensor"]])
    (target / TABLE).write_text(json.dumps(table))
    return hashed(target, KV_SCALES, TABLE)


def hashed(target: Path, *names: str) -> Path:
    """A checkpoint whose manifest says what its files are now."""
    manifest = json.loads((target / MANIFEST).read_text())
    for name in names:
        own = target / name
        manifest["files"][name] = {"bytes": own.stat().st_size, "sha256": sha256_file(own)}
    (target / MANIFEST).write_text(json.dumps(manifest))
    return target


def _ends(scale: Tensor) -> tuple[float, float]:
    return scale.min().item(), scale.max().item()
