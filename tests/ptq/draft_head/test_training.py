"""Heads are trained: they learn, and what is written drafts for the model and for quantized ones."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from formats.checkpoint.read import Checkpoint
from formats.command import run_command
from formats.errors import RecipeError
from inference.config import EngineConfig, SpeculateConfig
from inference.engine import Engine
from inference.requests.request import SamplingParams
from ptq.commands import train_head
from ptq.draft_head import training
from ptq.draft_head.network import HeadNetwork
from ptq.draft_head.own_text import continued_by_model
from ptq.draft_head.training import HeadSpec, frequent, head_config

MODEL = Path(__file__).parents[3] / "recipes" / "tiny-python"
SMALL = ("--vocabulary", "300", "--heads", "2", "--intermediate-size", "64", "--quiet")


def test_passes_see_the_first_one_and_themselves(make_model):
    """Pass j of a text is what the block says of it, run token by token on its own output."""
    config = head_config(AutoConfig.from_pretrained(make_model("llama")), HeadSpec(heads=2))
    torch.manual_seed(0)
    network = HeadNetwork(config, (0, 1), torch.arange(384))
    embedded, hidden = torch.randn(1, 12, 128), torch.randn(1, 10, 256)
    with torch.no_grad():
        whole = list(network(embedded, hidden, 3))
        for end in (1, 4, 10):  # what comes behind a token changes nothing of it
            part = network(embedded[:, : end + 2], hidden[:, :end], 3)
            for ours, theirs in zip(part, whole, strict=True):
                torch.testing.assert_close(ours, theirs[:, :end])
        changed = embedded.clone()
        changed[:, 5] += 1  # pass j reads it at token 5 - j, and those behind that
        for j, logits in enumerate(network(changed, hidden, 3)):
            first = (logits - whole[j]).abs().amax(-1)[0].nonzero()[0]
            assert int(first) == 5 - j


def test_loss_is_over_what_can_be_drafted(make_model):
    config = head_config(AutoConfig.from_pretrained(make_model("llama")), HeadSpec())
    tokens = frequent(torch.tensor([[7, 7, 7, 9, 9, 3]]), 2)
    assert tokens.tolist() == [7, 9]
    network = HeadNetwork(config, (0,), tokens)
    wanted = torch.full((1, 3, 384), -10.0)
    wanted[0, 0, 7] = wanted[0, 1, 9] = wanted[0, 2, 3] = 10.0
    said = torch.tensor([[[10.0, -10.0], [10.0, -10.0], [10.0, -10.0]]])
    nats, right = network.loss(said, wanted)
    assert nats.item() == pytest.approx(10.0)  # 0 of the first, 20 of the second
    assert right.item() == pytest.approx(1 / 3)


def test_a_trained_head_drafts(tmp_path, capsys):
    model, head = str(MODEL), tmp_path / "head"
    given = ("--sequences", "64", "--sequence-length", "64", "--blocks", "2", "4", "7", *SMALL)
    assert run_command(train_head.main, [model, str(head), *given]) == 0
    assert str(head) in capsys.readouterr().out
    config = json.loads((head / "config.json").read_text())
    assert config["draft_vocab_size"] == 300
    assert load_file(head / "model.safetensors")["lm_head.weight"].shape == (300, 256)
    own = SpeculateConfig(method="eagle", path=str(head), depth=3)
    runner = Engine.from_pretrained(model, config=EngineConfig(speculate=own))
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    got = runner.generate(["import os\n", "class Node:\n"], params)
    wanted = Engine.from_pretrained(model).generate(["import os\n", "class Node:\n"], params)
    assert [o.token_ids for o in got] == [o.token_ids for o in wanted]
    assert runner.speculation is not None
    assert runner.speculation.accepted.sum() > 0


def test_a_head_is_trained_on_what_the_model_writes(tmp_path):
    """A text's beginnings stay; what follows is greedy in every other sequence, else drawn."""
    ids = torch.arange(3 * 64).view(3, 64) + 300
    written = continued_by_model(Checkpoint.open(MODEL), ids, "cpu")
    assert written.shape == ids.shape
    assert torch.equal(written[:, :8], ids[:, :8])
    params = SamplingParams(max_tokens=56, ignore_eos=True)
    greedy = Engine.from_pretrained(MODEL).generate([ids[0, :8].tolist()], params)
    assert written[0, 8:].tolist() == list(greedy[0].token_ids)
    given = ("--sequences", "8", "--sequence-length", "32", "--own-text", *SMALL)
    assert run_command(train_head.main, [str(MODEL), str(tmp_path / "head"), *given]) == 0
    assert (tmp_path / "head" / "model.safetensors").is_file()


def test_it_learns(make_model):
    """More of its drafts are right after training than before."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 60, (8, 4), generator=generator).repeat(1, 12)  # four tokens again
    shares = []
    for epochs in (1, 12):
        network = training.train_head(model, ids, HeadSpec(batch=2, epochs=epochs), progress=False)
        with torch.no_grad():
            said = model(ids, output_hidden_states=True)
            hidden = torch.cat([said.hidden_states[tap] for tap in network.taps], dim=-1)
            (logits,) = network(model.get_input_embeddings()(ids)[:, 1:-1], hidden[:, :-2], 1)
            shares.append(float(network.loss(logits, said.logits[:, 1:-1])[1]))
    assert shares[1] > shares[0] + 0.2
    assert shares[1] > 0.6


def test_it_ends_in_time_with_the_learning_rate_at_zero(monkeypatch):
    """By its clock a step takes a minute: three of the many that the epochs would take."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    clock, rates, steps = iter(range(0, 10**6, 60)), [], []
    rate = training._share_of_rate
    monkeypatch.setattr(training.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(training, "_share_of_rate", lambda done: rates.append(done) or rate(done))
    step = training._step
    monkeypatch.setattr(training, "_step", lambda *given: steps.append(1) or step(*given))
    ids = torch.randint(5, 60, (8, 16), generator=torch.Generator().manual_seed(0))
    training.train_head(model, ids, HeadSpec(batch=2, epochs=99, minutes=3), progress=False)
    assert len(steps) == 3
    assert rates == pytest.approx([0, 1 / 3, 2 / 3])
    assert rate(1.0) == pytest.approx(0)
    assert rate(0.03) == 1


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (("--blocks", "2", "8"), r"cannot read blocks \[2, 8\]: the model's are 0 to 7"),
        (("--minutes", "0"), "0 minutes are no time to train"),
        (("--sequence-length", "8"), "sequences of 8 tokens are too short"),
    ],
)
def test_what_cannot_be_trained_is_told(tmp_path, capsys, given, told):
    head = tmp_path / "head"
    arguments = [str(MODEL), str(head), "--sequences", "8", *SMALL]
    assert run_command(train_head.main, [*arguments, "--sequence-length", "64", *given]) == 2
    assert re.search(told, capsys.readouterr().err)
    assert not head.exists()


def test_a_quantized_model_is_refused(tmp_path, tiny_llama, make_quantized, capsys):
    folder = make_quantized(tiny_llama, "a8w8c8")
    assert run_command(train_head.main, [str(folder), str(tmp_path / "head"), *SMALL]) == 2
    assert "train the head on the float model" in capsys.readouterr().err


def test_heads_that_do_not_share_evenly_are_refused():
    model = LlamaConfig(num_attention_heads=8, num_key_value_heads=4)
    with pytest.raises(RecipeError, match="3 heads|5 heads"):
        head_config(model, HeadSpec(heads=5))
