"""Layers for further tokens of models with a state: drafts are what transformers' block says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError, EngineError
from inference.config import EngineConfig, SpeculateConfig
from inference.engine import Engine
from inference.requests.request import SamplingParams
from ptq.methods.rtn import RTNSpec
from ptq.pipeline.driver import quantize_tokens
from ptq.report.generated import measure_drafts
from tests.inference.speculate.methods.test_eagle import spied
from tests.inference.speculate.methods.test_mtp import _published
from tests.inference.speculate.requests import accepted, request_count, run_all, some_requests
from tests.inference.transformers_code.test_states import write_small
from tests.ptq.quantizing import make_plan, random_tokens

KINDS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
LONG = SamplingParams(max_tokens=20, ignore_eos=True)
PROMPTS = [[5 + i] * 45 + [9 + 3 * i] * i for i in range(3)]
HIDDEN, FULL = 128, 1  # the block with full attention


def engine(folder: Path, method: str | None = "mtp", path: Path | None = None, **config) -> Engine:
    own = method and SpeculateConfig(method=method, path=path and str(path), depth=3)
    sizes = {"max_model_len": 256, "max_batch_size": 3} | config
    return Engine.from_pretrained(folder, config=EngineConfig(speculate=own, **sizes))


class Reference:
    """A model with a random layer beside it, whose block is transformers' own.

    Attributes:
        tensors: The layer's, by the names that they were published under.
    """

    def __init__(self, plain: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
        own, inner = self.model.config, self.model.model
        torch.manual_seed(1)
        self.block = type(inner.layers[FULL])(own, FULL)
        self.norms = torch.nn.ModuleDict(
            {
                name: type(inner.norm)(HIDDEN, own.rms_norm_eps)
                for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
            }
        )
        self.fc = torch.nn.Linear(2 * HIDDEN, HIDDEN, bias=False)
        with torch.no_grad():
            for part in (self.block, self.norms, self.fc):
                for parameter in part.parameters():
                    parameter.copy_((0.1 * torch.randn_like(parameter)).bfloat16())
        stacked = own.model_type == "qwen3_5_moe_text"  # as these are published
        experts = getattr(own, "num_experts", 0)
        block = self.block.state_dict() if stacked else _published(self.block, experts)
        named = {f"layers.0.{name}": tensor for name, tensor in block.items()}
        named["fc.weight"] = self.fc.weight
        named |= {f"{name}.weight": norm.weight for name, norm in self.norms.items()}
        assert any(t.dim() == 3 for t in named.values()) == stacked
        self.tensors = {
            f"mtp.{name}": tensor.detach().bfloat16().contiguous() for name, tensor in named.items()
        }

    @torch.no_grad()
    def check(self, text: list[int], drafts: list[int]) -> None:
        """Compare drafts after a text with what the layer says, of its own output."""
        model, count = self.model.model, len(text)
        hidden = model(torch.tensor([text[:-1]])).last_hidden_state
        embedded = model.embed_tokens(torch.tensor([[*text, *drafts][1:-1]]))
        for j, draft in enumerate(drafts):
            read = [
                self.norms["pre_fc_norm_embedding"](embedded[:, : count - 1 + j]),
                self.norms["pre_fc_norm_hidden"](hidden),
            ]
            x = self.fc(torch.cat(read, dim=-1))
            places = torch.arange(x.shape[1])[None]
            mask = torch.full((x.shape[1],) * 2, -torch.inf).triu(1)[None, None]
            turn = model.rotary_emb(x, places)
            y = self.block(x, attention_mask=mask, position_embeddings=turn, position_ids=places)
            y = self.norms["norm"](y[0] if isinstance(y, tuple) else y)
            last = self.model.lm_head(y)[0, -1]
            assert int(last.argmax()) == draft or last.max() - last[draft] < 1e-3, (count, j)
            hidden = torch.cat([hidden, y[:, -1:]], dim=1)


def write_knowing(plain: Path, out: Path) -> Path:
    """A copy of a model whose tokens follow mostly from the one before, with a layer that knows it.

    What the blocks add is small; the layer reads the embedding, and its block is the model's last.
    """
    tensors = load_file(plain / "model.safetensors")
    for name in tensors:
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            tensors[name] *= 0.002
    block = f"model.layers.{FULL}."
    layer = {k.replace(block, "mtp.layers.0."): t for k, t in tensors.items() if block in k}
    deviation = tensors["model.embed_tokens.weight"].float().std()
    seeded = torch.Generator().manual_seed(0)
    noise = 3e-5 * torch.randn(HIDDEN, HIDDEN, generator=seeded)
    joined = torch.cat([deviation * torch.eye(HIDDEN), noise], dim=1)
    zeros = torch.zeros(HIDDEN, dtype=torch.bfloat16)  # added to 1
    layer |= {
        "mtp.fc.weight": joined.bfloat16(),
        "mtp.pre_fc_norm_embedding.weight": zeros,
        "mtp.pre_fc_norm_hidden.weight": zeros,
        "mtp.norm.weight": tensors["model.norm.weight"],
    }
    return with_layer(plain, out, tensors | {name: t.clone() for name, t in layer.items()})


def with_layer(plain: Path, out: Path, tensors: dict[str, Tensor]) -> Path:
    """A copy of a model with more tensors."""
    shutil.copytree(plain, out)
    file = out / "model.safetensors"
    save_file(load_file(file) | tensors, file, {"format": "pt"})
    return out


@pytest.fixture(scope="module", params=KINDS)
def plain(tmp_path_factory, request) -> Path:
    return write_small(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def reference(plain) -> Reference:
    return Reference(plain)


@pytest.fixture(scope="module")
def folder(plain, reference, tmp_path_factory) -> Path:
    return with_layer(plain, tmp_path_factory.mktemp("mtp") / "model", reference.tensors)


def test_drafts_are_those_of_the_layer(reference, folder):
    """After prompts in chunks, rejected drafts, and what was found in the cache."""
    runner = engine(folder, max_batched_tokens=80)
    seen = spied(runner)
    outputs = runner.generate(PROMPTS, LONG)
    runner.generate(
        [[*o.prompt_token_ids, *o.token_ids, 7 + i] for i, o in enumerate(outputs)], LONG
    )
    for rest in (range(94, 100), (7, 8), (9,)):  # one by one: each has that block to itself
        runner.generate([[*range(30, 94), *rest]], LONG)
    assert runner.stats().hit_tokens > 0
    assert len(seen) > 40
    for text, drafts in seen[::4]:
        reference.check(text, drafts)
    runner.check_integrity()


def test_nothing_changes(plain, folder):
    """Greedily and by seeds, with prompts of any kind, preemption and aborts."""
    requests = some_requests(request_count(8), seed=3)
    config = {"kv_blocks": 8, "max_batched_tokens": 70}
    wanted = run_all(engine(folder, None, **config), requests)
    assert run_all(engine(folder, **config), requests) == wanted
    beside = engine(plain, path=folder, **config)  # a checkpoint that lost the layer
    assert run_all(beside, requests) == wanted
    assert beside.speculation is not None
    assert beside.speculation.proposed.sum() > 0


def test_what_is_missing_or_of_another_model_is_named(plain, reference, tmp_path):
    with pytest.raises(EngineError, match=r"no layer that predicts further tokens \(mtp.fc\)"):
        engine(plain)
    narrow = reference.tensors | {"mtp.fc.weight": torch.zeros(HIDDEN, HIDDEN).bfloat16()}
    with pytest.raises(CheckpointError, match=r"mtp.fc.weight is \[128, 128\].*\[128, 256\]"):
        engine(with_layer(plain, tmp_path / "narrow", narrow))
    for i, name in enumerate(
        ("mtp.norm", "mtp.pre_fc_norm_hidden", "mtp.layers.0.self_attn.o_proj")
    ):
        some = {k: t for k, t in reference.tensors.items() if k != f"{name}.weight"}
        with pytest.raises(CheckpointError, match=name):
            engine(with_layer(plain, tmp_path / str(i), some))


def test_the_embedding_and_the_head_are_those_of_the_model(folder):
    runner = engine(folder)
    assert runner.speculation is not None
    layer = runner.speculation._proposer._head._layer._model
    for get in ("get_input_embeddings", "get_output_embeddings"):
        assert getattr(layer, get)() is getattr(runner.model.module, get)()


def test_a_quantized_model_has_the_layer_rounded_and_drafts_as_well(plain, tmp_path):
    model = write_knowing(plain, tmp_path / "model")
    wanted = {n: t for n, t in load_file(model / "model.safetensors").items() if "mtp." in n}
    before = accepted(engine, model)
    assert before > 3.3  # of 4
    for preset in ("w4", "a8w8c8"):
        ignore = ("lm_head", "re:.*out_proj")  # of 64 inputs here, and groups have 128
        plan = make_plan(model, tmp_path / preset, preset, methods=(RTNSpec(),), ignore=ignore)
        path = quantize_tokens(plan, random_tokens(), progress=False).checkpoint
        written = {n: t for f in path.glob("*.safetensors") for n, t in load_file(f).items()}
        checkpoint = Checkpoint.open(path)
        rounded = {n for n in checkpoint.quantized_modules if n.startswith("mtp.")}
        assert "mtp.layers.0.self_attn.q_proj" in rounded
        assert not any(checkpoint.scheme_of(name).static_input for name in rounded)
        left = [name for name in wanted if name.removesuffix(".weight") not in rounded]
        left = [name for name in left if ".experts." not in name]
        assert {"mtp.fc.weight", "mtp.norm.weight"} <= {*left}
        assert all(torch.equal(written[name], wanted[name]) for name in left)
        config = json.loads((path / "config.json").read_text())
        assert "mtp.fc" in config["quantization_config"]["ignore"]
        assert checkpoint.predicting_layers == ("mtp",)
        assert accepted(engine, path) >= 0.98 * before
    engines = (engine(folder, None) for folder in (model, path))
    told = measure_drafts(*engines, random_tokens().sequences()[:2])
    assert told is not None
    assert told.quantized >= 0.98 * told.original > 3
