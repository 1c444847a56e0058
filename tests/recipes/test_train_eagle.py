"""Heads are trained: they learn, and what is written drafts for the model and for quantized ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from formats.command import run_command
from inference.config import EngineConfig, SpeculateConfig
from inference.engine import Engine
from inference.requests.request import SamplingParams
from recipes import train_tiny_python_eagle as training
from recipes.tiny_python_eagle_network import HeadNetwork
from recipes.train_tiny_python_eagle import HeadSpec, continued_by_model, frequent, head_config

MODEL = Path(__file__).parents[2] / "recipes" / "tiny-python"


def test_passes_see_the_first_one_and_themselves(make_model):
    """Pass j of a text is what the block says of it, run token by token on its own output."""
    config = head_config(
        AutoConfig.from_pretrained(make_model("llama")), HeadSpec(heads=2, intermediate_size=64)
    )
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
    config = head_config(AutoConfig.from_pretrained(make_model("llama")), HeadSpec(heads=2))
    tokens = frequent(torch.tensor([[7, 7, 7, 9, 9, 3]]), 2)
    assert tokens.tolist() == [7, 9]
    network = HeadNetwork(config, (0,), tokens)
    wanted = torch.full((1, 3, 384), -10.0)
    wanted[0, 0, 7] = wanted[0, 1, 9] = wanted[0, 2, 3] = 10.0
    said = torch.tensor([[[10.0, -10.0], [10.0, -10.0], [10.0, -10.0]]])
    nats, right = network.loss(said, wanted)
    assert nats.item() == pytest.approx(10.0)  # 0 of the first, 20 of the second
    assert right.item() == pytest.approx(1 / 3)


@pytest.mark.ci  # trains a head
def test_a_trained_head_drafts(tmp_path):
    """The script makes a head of the shipped one's shape, whose drafts are accepted."""
    head, text = tmp_path / "head", Path(json.__file__).parent
    small = ("--sequences", "16", "--minutes", "0.05")
    assert run_command(training.main, [str(text), str(head), *small]) == 0
    config, shipped = (
        json.loads((folder / "config.json").read_text())
        for folder in (head, MODEL.with_name("tiny-python-eagle"))
    )
    assert config | {"draft_vocab_size": 3072} == shipped
    tensors, others = (
        load_file(folder / "model.safetensors")
        for folder in (head, MODEL.with_name("tiny-python-eagle"))
    )
    assert {n: t.dtype for n, t in tensors.items()} == {n: t.dtype for n, t in others.items()}
    assert len(tensors["d2t"]) == config["draft_vocab_size"]
    own = SpeculateConfig(method="eagle", path=str(head), depth=3)
    runner = Engine.from_pretrained(MODEL, config=EngineConfig(speculate=own))
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    got = runner.generate(["import os\n", "class Node:\n"], params)
    wanted = Engine.from_pretrained(MODEL).generate(["import os\n", "class Node:\n"], params)
    assert [o.token_ids for o in got] == [o.token_ids for o in wanted]
    assert runner.speculation is not None
    assert runner.speculation.accepted.sum() > 0


def test_a_head_is_trained_on_what_the_model_writes():
    """A text's beginnings stay; what follows is greedy in every other sequence, else drawn."""
    ids = torch.arange(3 * 64).view(3, 64) + 300
    written = continued_by_model(MODEL, ids, "cpu")
    assert written.shape == ids.shape
    assert torch.equal(written[:, :8], ids[:, :8])
    params = SamplingParams(max_tokens=56, ignore_eos=True)
    greedy = Engine.from_pretrained(MODEL).generate([ids[0, :8].tolist()], params)
    assert written[0, 8:].tolist() == list(greedy[0].token_ids)


@pytest.mark.ci  # trains a head
def test_it_learns(make_model):
    """More of its drafts are right after training than before."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 60, (8, 4), generator=generator).repeat(1, 12)  # four tokens again
    shares = []
    for epochs in (1, 12):
        network = training.train_head(
            model, ids, HeadSpec(batch=2, epochs=epochs, learning_rate=2e-3), progress=False
        )
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


def test_too_little_text_is_refused(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("word " * 4000)
    arguments = [str(tmp_path), str(tmp_path / "head"), "--sequences", "2"]
    assert run_command(training.main, arguments) == 2
    assert "2 whole sequences of 512 tokens; a step takes 16" in capsys.readouterr().err
    assert not (tmp_path / "head").exists()
