"""EAGLE-3 heads: what they draft is what the trained network says, and no token changes."""

import json
import shutil
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError, EngineError
from formats.residual_rotation import KEY
from inference.engine import Engine
from inference.requests.request import SamplingParams
from inference.speculate.head import HeadProposer
from kernels.numerics import dequantize
from ptq.methods.rotation import RotationSpec
from recipes.tiny_python_eagle_network import HeadNetwork
from recipes.train_tiny_python_eagle import HeadSpec, frequent, head_config, write_head
from tests.inference.engines import drafting, tokens_of
from tests.inference.speculate.requests import fork_within, run_all, some_requests, spied
from tests.ptq.methods.test_rotation import write_view

LONG = SamplingParams(max_tokens=40, ignore_eos=True)
PROMPTS = [[5 + i] * 45 + [9 + 3 * i] * i for i in range(4)]
DEPTH = 3


def engine(folder, head=None, depth: int | None = DEPTH, **config) -> Engine:
    return drafting(folder, head and "eagle", head, depth, **config)


class Reference:
    """A random head, the float model that it is for, and what both say."""

    def __init__(self, folder, head, bits: Literal[8, 16] = 16) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        torch.manual_seed(1)
        tokens = frequent(torch.arange(384).repeat(2)[: 384 + 250], 250)
        self.head = HeadNetwork(
            head_config(self.model.config, HeadSpec(heads=4, intermediate_size=256)),
            (0, 1, 2),
            tokens,
        )
        with torch.no_grad():
            for parameter in self.head.parameters():
                own = parameter + 0.1 * torch.randn_like(parameter)
                parameter.copy_((own if own.dim() == 1 else 3 * own).bfloat16())
        write_head(self.head, head, bits)
        written = Checkpoint.open(head)
        with torch.no_grad():
            for module in written.quantized_modules:
                stored = written.weight(module)
                self.head.get_parameter(f"{module}.weight").copy_(
                    dequantize(stored.q, stored.scale)
                )

    @torch.no_grad()
    def check(self, seen: list[tuple[list[int], list[int]]]) -> None:
        """Compare drafts after texts with what the network says, of its own drafts.

        Longer texts come first: what the model makes of them it makes of their beginnings.
        """
        known: list[tuple[list[int], Tensor]] = []
        for text, drafts in sorted(seen, key=lambda one: -len(one[0])):
            count, ids = len(text) - 1, text[:-1]
            hidden = next((made for longer, made in known if longer[:count] == ids), None)
            if hidden is None:
                hidden = self._hidden(ids)
                known.append((ids, hidden))
            embedded = self.model.get_input_embeddings()(torch.tensor([[*text, *drafts][1:-1]]))
            for j, logits in enumerate(self.head(embedded, hidden[:, :count], len(drafts))):
                last, place = logits[0, count - 1], int(logits[0, count - 1].argmax())
                drafted = int((drafts[j] - torch.arange(250) == self.head.d2t).nonzero())
                assert place == drafted or last[place] - last[drafted] < 1e-3, (count, j)

    def _hidden(self, ids: list[int]) -> Tensor:
        """What a head reads of the model [1, T, taps * hidden]."""
        blocks, inner = [], self.model.model
        hooks = [
            part.register_forward_pre_hook(lambda _, args: blocks.append(args[0]))
            for part in (*inner.layers, inner.norm)
        ]
        self.model(torch.tensor([ids]))
        for hook in hooks:
            hook.remove()
        return torch.cat([blocks[tap] for tap in self.head.taps], dim=-1)


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    return tmp_path_factory.mktemp("head") / "head"


@pytest.fixture(scope="module")
def reference(tiny_llama, head) -> Reference:
    return Reference(tiny_llama, head)


def check_drafts(reference: Reference, runner: Engine, prompts=PROMPTS) -> None:
    """What is drafted for answers to prompts is what the network says."""
    seen = spied(runner)
    runner.generate(prompts, LONG)
    reference.check(seen)
    assert len(seen) > 10 * len(prompts)


def test_drafts_are_those_of_the_network(tiny_llama, reference, head):
    """Also behind what is found, of shared blocks, of forks, and after a sequence gave way."""
    runner = engine(tiny_llama, head, max_batch_size=3, max_model_len=192, max_batched_tokens=50)
    seen = spied(runner)
    outputs = runner.generate(PROMPTS, LONG)
    runner.generate([[*tokens_of(o), 7 + i] for i, o in enumerate(outputs)])
    assert runner.stats().hit_tokens > 0
    shared = [*range(30, 94)]  # one block; what follows it differs
    for other in (7, 9, 7):
        runner.generate([[*shared, other, 8]], LONG)
    fork_within(runner, [*range(100, 150)])
    hits = runner.stats().hit_tokens
    prompt = [*range(100, 150), *range(30, 39)]
    for rest in ([31], [32, 39, 40, 41, 42, 43, 44, 45, 6]):
        runner.generate([[*prompt, *rest]], LONG)
    assert runner.stats().hit_tokens > hits
    tight = engine(tiny_llama, head, kv_blocks=3, max_model_len=192)
    also = spied(tight)
    tight.generate(PROMPTS, LONG)
    assert tight.stats().preemptions > 0
    assert all(drafts for _, drafts in [*seen, *also])
    reference.check([*seen, *also])
    assert len(seen) > 200


def test_what_a_head_made_of_drafts_is_made_again_of_what_came(tiny_llama, reference, head):
    """All drafts come, and yet the head's K and V are those that the model's hidden states give:
    with one draft a step none were ever made of its own output."""
    params = SamplingParams(max_tokens=16, ignore_eos=True, logit_bias={7: 100})
    held = []
    for depth in (1, 4):
        runner = engine(tiny_llama, head, depth)
        own = runner.speculation.proposer
        assert isinstance(own, HeadProposer)
        logits, favoured = own._head.logits, torch.nn.functional.one_hot(torch.tensor(7), 384)
        own._head.logits = lambda y, logits=logits, f=favoured: logits(y) + 1e6 * f
        (output,) = runner.generate([[*range(30, 70)]], params)
        assert output.token_ids == [7] * 16
        assert runner.speculation.accepted.tolist() == runner.speculation.proposed.tolist()
        assert runner.speculation.accepted[-1] > 2
        (pool,) = own._pools
        (block,) = {i for i, k in enumerate(pool.k) if k.any()}
        held.append((pool.k[block, :, :48].float(), pool.v[block, :, :48].float()))
    for one, other in zip(*held, strict=True):  # without tokens of the last steps' drafts
        assert torch.allclose(one, other, atol=1e-4)


def test_a_head_serves_a_rotated_model(tiny_llama, reference, head, tmp_path):
    """Rotated twice: what it reads is turned back. A head of the rotated model reads it as it is."""
    once = write_view(tiny_llama, tmp_path / "once", RotationSpec(seed=3), torch.float32)
    twice = write_view(once, tmp_path / "twice", RotationSpec(seed=5), torch.float32)
    check_drafts(reference, engine(twice, head))
    own = Reference(twice, tmp_path / "head")
    assert json.loads((tmp_path / "head" / "config.json").read_text())[KEY] == [3, 5]
    check_drafts(own, engine(twice, tmp_path / "head"), PROMPTS[:1])


def test_an_int8_head_drafts_what_its_weights_say(tiny_llama, tmp_path):
    """All of its matrices are int8, the one that reads the model's hidden states too."""
    reference = Reference(tiny_llama, tmp_path / "head", bits=8)
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    assert {name for name, t in tensors.items() if t.dim() == 2 and "scale" not in name} == {
        f"{name.removesuffix('.weight')}.weight_packed"
        for name, parameter in reference.head.named_parameters()
        if parameter.dim() == 2
    }
    check_drafts(reference, engine(tiny_llama, tmp_path / "head"))


@pytest.mark.parametrize(
    ("scheme", "depth", "config"),
    [
        ("float", 3, {"max_batch_size": 4, "kv_blocks": 14, "max_model_len": 256}),
        ("a8w8c8", None, {"max_batched_tokens": 30}),
        ("a8w4c4_two_level", 2, {}),
    ],
)
def test_nothing_changes(tiny_llama, make_quantized, reference, head, scheme, depth, config):
    folder = make_quantized(tiny_llama, scheme)
    requests = some_requests(seed=2)
    wanted = run_all(engine(folder, **config), requests)
    runner = engine(folder, head, depth, **config)
    for _ in range(2):
        assert run_all(runner, requests) == wanted
    assert runner.speculation.proposed.sum() > 0


def test_blocks_one_by_one_tell_the_same_hidden_states(make_model, reference, head):
    """A mixture of experts has no fused call."""
    folder = make_model("qwen3_moe", moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2)
    runner = engine(folder, head)
    assert runner.generate(PROMPTS, LONG)[0].token_ids == (
        engine(folder).generate(PROMPTS, LONG)[0].token_ids
    )
    assert runner.speculation.proposed.sum() > 0


def test_the_other_layout_is_read(tiny_llama, reference, head, tmp_path):
    """That of the library speculators, with an embedding and normed residuals of its own."""
    tensors = {
        name.replace("midlayer", "layers.0"): tensor
        for name, tensor in load_file(head / "model.safetensors").items()
    }
    tensors["embed_tokens.weight"] = reference.model.get_input_embeddings().weight.bfloat16()
    save_file(tensors, tmp_path / "model.safetensors")
    own = json.loads((head / "config.json").read_text())
    settings = {
        "speculators_model_type": "eagle3",
        "transformer_layer_config": own,
        "draft_vocab_size": own.pop("draft_vocab_size"),
        "eagle_aux_hidden_state_layer_ids": own.pop("eagle_config").popitem()[1],
        "norm_before_residual": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(settings))
    block, normed = reference.head.midlayer, reference.head.midlayer.hidden_norm
    plain = block.forward

    def forward(embedded, hidden, turn, past):
        read = torch.cat([block.input_layernorm(embedded), normed(hidden)], dim=-1)
        x = normed(hidden) + block.self_attn(read, turn, past)
        return x + block.mlp(block.post_attention_layernorm(x))

    block.forward = forward
    try:
        check_drafts(reference, engine(tiny_llama, tmp_path), PROMPTS[:1])
    finally:
        block.forward = plain


def test_logits_that_are_not_finite_draft_nothing_and_leave_nothing(tiny_llama, reference, head):
    runner = engine(tiny_llama, head)
    own = runner.speculation.proposer
    assert isinstance(own, HeadProposer)
    features = own._head.features
    own._head.features = lambda hidden: features(hidden) * torch.nan
    wanted = engine(tiny_llama).generate(PROMPTS[:1], LONG)
    assert runner.generate(PROMPTS[:1], LONG)[0].token_ids == wanted[0].token_ids
    assert runner.speculation.proposed.sum() == 0
    own._head.features = features
    runner.generate([PROMPTS[2]], LONG)
    assert runner.speculation.proposed.sum() > 0
    assert all(pool.v.isfinite().all() for pool in own._pools)


def broken(head, folder, change) -> None:
    """Copy a head, with other settings or tensors."""
    shutil.copytree(head, folder)
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    change(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "error", "told"),
    [
        (lambda c, t: t.pop("fc.weight"), CheckpointError, "is no EAGLE-3 head.*draft=PATH"),
        (lambda c, t: c.update(vocab_size=300), EngineError, "its vocab_size is 300.*384"),
        (lambda c, t: c.update(target_hidden_size=64), EngineError, "another model.*64.*128"),
        (lambda c, t: c.update(num_hidden_layers=2), CheckpointError, "num_hidden_layers 2"),
        (
            lambda c, t: c.update(eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1, 9]}),
            EngineError,
            r"\[0, 1, 9\].*the model has 2",
        ),
        (lambda c, t: t.update(d2t=t["d2t"] * 0 + 380), CheckpointError, "d2t.*outside 0 to 383"),
        (
            lambda c, t: t.update({"fc.weight": t["fc.weight"][:, :256].contiguous()}),
            CheckpointError,
            r"fc.weight is \[128, 256\], and its settings want \[128, 384\]",
        ),
        (lambda c, t: t.pop("norm.weight"), CheckpointError, "norm.weight"),
    ],
)
def test_what_does_not_fit_is_named(tiny_llama, reference, head, tmp_path, change, error, told):
    broken(head, tmp_path / "head", change)
    with pytest.raises(error, match=told):
        engine(tiny_llama, tmp_path / "head")


def test_models_of_transformers_code_have_no_head(tiny_llama, reference, head):
    with pytest.raises(EngineError, match="hidden states.*Take ngram, suffix or draft=PATH"):
        engine(tiny_llama, head, transformers_code=True)
