"""What the tests of families with experts share beyond `tests.families`: quantized runs, MXFP4."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from formats.checkpoint.read import Checkpoint
from inference.config import EngineConfig
from inference.engine import Engine
from ptq.convert.convert import convert
from ptq.pipeline.driver import quantize_tokens
from tests.families import METHODS, distance, transformers_logits
from tests.ptq.quantizing import edit_model, make_plan, random_tokens

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def check_quantized_experts(folder: Path, out: Path, preset: str) -> Checkpoint:
    """A quantized checkpoint runs here, near the float model and what its weights stand for.

    transformers has experts in parameters that compressed-tensors does not quantize, and opens the
    float model that the checkpoint stands for.
    """
    methods, bound = METHODS[preset]
    plan = make_plan(folder, out / "run", preset, methods=methods)
    path = quantize_tokens(plan, random_tokens(), progress=False).checkpoint
    convert(path, out / "float", "float", dtype="float32", progress=False)
    ids = random_tokens().sequences()[1]
    engine = Engine.from_pretrained(path, config=EngineConfig(), quantized_kv=False)
    ours = engine.score(ids.tolist())
    assert distance(ours, transformers_logits(folder, ids)) < bound
    exact = plan.recipe.scheme.activations is None
    assert distance(ours, transformers_logits(out / "float", ids)) < (2e-4 if exact else bound)
    return Checkpoint.open(path, verify=True)


def to_mxfp4(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rounded to the nearest element, by the OCP specification: blocks, scales, what they stand for.

    Args:
        values: [E, outputs, inputs].

    Returns:
        (uint8 [E, outputs, groups, 16], uint8 [E, outputs, groups], fp32 of `values`' shape).
    """
    groups = values.float().unflatten(-1, (-1, 32))
    exponent = groups.abs().amax(-1, keepdim=True).log2().floor() - 2
    elements, table = groups / 2**exponent, torch.tensor(E2M1)
    codes = (elements.abs().clamp(max=6)[..., None] - table).abs().argmin(-1)
    held = table[codes] * elements.sign() * 2**exponent
    codes = codes | ((elements < 0).int() << 3)  # -0 among them
    blocks = codes[..., ::2] | (codes[..., 1::2] << 4)
    scales = (exponent[..., 0] + 127).to(torch.uint8)
    return blocks.to(torch.uint8), scales, held.flatten(-2)


def publish_mxfp4(source: Path, target: Path) -> tuple[Path, Path]:
    """A gpt-oss model as it is published, and the bf16 model that it stands for."""
    exact: dict[str, Tensor] = {}

    def store(tensors: dict[str, Tensor]) -> None:
        for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
            blocks, scales, held = to_mxfp4(tensors.pop(name).mT)
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
            exact[name] = held.mT.to(torch.bfloat16).contiguous()

    published = edit_model(source, target / "mxfp4", store)
    config = json.loads((published / "config.json").read_text())
    config["quantization_config"] = {
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
        "quant_method": "mxfp4",
    }
    (published / "config.json").write_text(json.dumps(config))
    return published, edit_model(source, target / "float", lambda tensors: tensors.update(exact))


def stored(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's weight files, by their names there."""
    files = sorted(folder.glob("model*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}
