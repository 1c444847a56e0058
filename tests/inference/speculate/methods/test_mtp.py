"""Layers for further tokens: what they draft is what transformers' block says, and nothing changes."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from formats.errors import CheckpointError, EngineError
from formats.families.registry import BY_TYPE
from formats.residual_rotation import with_rotation
from inference.config import EngineConfig, SpeculateConfig
from inference.engine import Engine
from inference.requests.request import SamplingParams
from tests.formats.families.test_glm4_moe import SIZES as GLM
from tests.inference.speculate.methods.test_eagle import spied
from tests.inference.speculate.requests import request_count, run_all, some_requests
from tests.tiny_families import DEEPSEEK

LONG = SamplingParams(max_tokens=30, ignore_eos=True)
PROMPTS = [[5 + i] * 45 + [9 + 3 * i] * i for i in range(3)]
HIDDEN = 128
KINDS = {"deepseek_v3": DEEPSEEK["v3"][1], "glm4_moe": GLM, "mimo": {}}


def engine(folder, method: str | None = "mtp", path=None, **config) -> Engine:
    own = method and SpeculateConfig(method=method, path=path and str(path), depth=3)
    return Engine.from_pretrained(folder, config=EngineConfig(speculate=own, **config))


class Reference:
    """A random model of a family with such a layer, run by transformers' blocks.

    Attributes:
        layer: Full name of the layer.
        names: What its parts are called.
        joined_weight: Full name of the tensor of what reads both halves.
        parts: Names of parts that it cannot do without.
    """

    def __init__(self, plain, folder) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
        torch.manual_seed(1)
        own = self.model.config
        model = self.model.model
        self.block = type(model.layers[1])(own, 1)  # of a mixture of experts, if there is one
        names = BY_TYPE[own.model_type].predicting
        assert names is not None
        experts = getattr(own, "n_routed_experts", 0)
        self.layer, self.names = names.layer(2), names
        self.joined_weight = f"{self.layer}.{names.joined}.weight"
        self.parts = (names.hidden_norm, names.norm, f"mlp.{'experts.1.' * bool(experts)}up_proj")
        kinds = ("embedded_norm", "hidden_norm", "norm")
        self.norms = torch.nn.ModuleDict(
            {kind: type(model.norm)(HIDDEN, own.rms_norm_eps) for kind in kinds}
        )
        self.joined = torch.nn.Linear(2 * HIDDEN, HIDDEN, bias=False)
        parts = (self.block, self.norms, self.joined)
        with torch.no_grad():
            for parameter in (p for part in parts for p in part.parameters()):
                drawn = 0.1 * torch.randn_like(parameter)
                parameter.copy_((1 + drawn if parameter.dim() == 1 else drawn).bfloat16())
        shutil.copytree(plain, folder)
        tensors = load_file(folder / "model.safetensors")
        assert set(self.block.state_dict()) == set(model.layers[1].state_dict())
        added = _published(self.block, experts)
        added[f"{names.joined}.weight"] = self.joined.weight
        added |= {f"{getattr(names, kind)}.weight": self.norms[kind].weight for kind in kinds}
        tensors |= {
            f"{self.layer}.{name}": tensor.detach().bfloat16().contiguous()
            for name, tensor in added.items()
        }
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        config["num_nextn_predict_layers"] = 1
        (folder / "config.json").write_text(json.dumps(config))

    @torch.no_grad()
    def check(self, text: list[int], drafts: list[int]) -> None:
        """Compare drafts behind a text with what the layer says, of its own output."""
        model, count = self.model.model, len(text)
        normed, last = self._outputs(text[:-1])
        features = normed if self.names.reads_normed else last
        embedded = model.embed_tokens(torch.tensor([[*text, *drafts][1:-1]]))
        for j, draft in enumerate(drafts):
            read = [
                self.norms["embedded_norm"](embedded[:, : count - 1 + j]),
                self.norms["hidden_norm"](features),
            ]
            x = self.joined(torch.cat(read[::-1] if self.names.hidden_first else read, dim=-1))
            places = torch.arange(x.shape[1])[None]
            mask = torch.full((x.shape[1],) * 2, -torch.inf).triu(1)[None, None]
            turn = model.rotary_emb(x, places)
            y = self.block(x, attention_mask=mask, position_embeddings=turn, position_ids=places)
            last = self.model.lm_head(self.norms["norm"](y))[0, -1]
            assert int(last.argmax()) == draft or last.max() - last[draft] < 1e-3, (count, j)
            features = torch.cat([features, y[:, -1:]], dim=1)

    def _outputs(self, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """The model's output after its last norm, and before it."""
        model, seen = self.model.model, []
        hook = model.norm.register_forward_pre_hook(lambda _, read: seen.append(read[0]))
        normed = model(torch.tensor([ids])).last_hidden_state
        hook.remove()
        return normed, seen[0]


def _published(block, experts: int) -> dict[str, torch.Tensor]:
    """A block's tensors by the names of its files, which have each expert's of their own."""
    found = {}
    for name, tensor in block.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            for i in range(experts):
                gate, up = tensor[i].chunk(2)
                found[f"mlp.experts.{i}.gate_proj.weight"] = gate
                found[f"mlp.experts.{i}.up_proj.weight"] = up
        elif name.endswith("experts.down_proj"):
            for i in range(experts):
                found[f"mlp.experts.{i}.down_proj.weight"] = tensor[i]
        else:
            found[name] = tensor
    return found


@pytest.fixture(scope="module", params=KINDS)
def plain(make_model, request):
    return make_model(request.param, **KINDS[request.param])


@pytest.fixture(scope="module")
def folder(tmp_path_factory, plain):
    return tmp_path_factory.mktemp("mtp") / "model"


@pytest.fixture(scope="module")
def reference(plain, folder) -> Reference:
    return Reference(plain, folder)


def test_drafts_are_those_of_the_layer(reference, folder):
    runner = engine(folder, max_batched_tokens=50)
    seen = spied(runner)
    outputs = runner.generate(PROMPTS, LONG)
    runner.generate(
        [[*o.prompt_token_ids, *o.token_ids, 7 + i] for i, o in enumerate(outputs)], LONG
    )
    assert runner.stats().hit_tokens > 0
    assert len(seen) > 60
    for text, drafts in seen[::3]:
        reference.check(text, drafts)


def test_nothing_changes(plain, reference, folder):
    requests = some_requests(request_count(20), seed=3)
    config = {"max_batch_size": 3, "kv_blocks": 14, "max_model_len": 256}
    wanted = run_all(engine(folder, None, **config), requests)
    assert run_all(engine(folder, **config), requests) == wanted
    beside = engine(plain, path=folder, **config)  # a checkpoint that lost the layer
    assert run_all(beside, requests) == wanted
    assert beside.speculation is not None
    assert beside.speculation.proposed.sum() > 0


def test_models_without_one_are_named(plain, tiny_llama):
    for model in (plain, tiny_llama):
        with pytest.raises(EngineError, match=r"no layer that predicts further tokens.*mtp=PATH"):
            engine(model)


def test_a_layer_of_another_width_is_named(reference, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    name = reference.joined_weight
    tensors[name] = tensors[name][:, :HIDDEN].contiguous()
    save_file(tensors, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"_proj.weight is \[128, 128\].*needs \[128, 256\]"):
        engine(tmp_path / "model")


@pytest.mark.parametrize("part", range(3))
def test_a_layer_that_lacks_a_part_is_not_run_without_it(reference, folder, tmp_path, part):
    """What no file fills would be random, and no draft would ever come."""
    name = f"{reference.layer}.{reference.parts[part]}"
    shutil.copytree(folder, tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    del tensors[f"{name}.weight"]
    save_file(tensors, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=name):
        engine(tmp_path / "model")


def test_a_rotated_model_and_a_layer_that_is_not_are_named(plain, reference, folder, tmp_path):
    """Every draft would be wrong."""
    shutil.copytree(plain, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(with_rotation(config, 0)))
    with pytest.raises(EngineError, match="is rotated, and the layer.*residual: false"):
        engine(tmp_path / "model", path=folder)
