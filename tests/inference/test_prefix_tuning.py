"""Prefix tuning: an engine gives what transformers gives with the same keys and values cached."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from formats.errors import CheckpointError, EngineError, RecipeError, RequestError
from inference.beam_search import BeamParams, beam_search
from inference.config import SpeculateConfig
from inference.requests.request import SamplingParams
from kernels.cpu import native
from ptq.api import quantize
from tests.adapters import prefix_logits as expected
from tests.adapters import write_prefix
from tests.inference.engines import engine_of, ids
from tests.tiny_families import TINY

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True, adapter="p")


@pytest.fixture
def prefix(tmp_path, tiny_llama) -> Path:
    return write_prefix(tmp_path / "p", tiny_llama, 70)


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3", "glm4"])
def test_logits(tmp_path, make_model, family):
    """Channels that lie otherwise when they run, windows, norms of keys."""
    base = make_model(family, **TINY.get(family, {}))
    path = write_prefix(tmp_path / "p", base, 9)
    engine, tokens = engine_of(base, {"p": path}), ids(40)
    wanted = expected(base, path, tokens)
    assert (engine.score(tokens, "p") - wanted).abs().max() < 2e-4
    assert (engine.score(tokens) - wanted).abs().max() > 0.05
    engine.check_integrity()


def test_without_compiled_kernels(tiny_llama, prefix, monkeypatch):
    monkeypatch.setattr(native, "library", lambda: None)
    engine = engine_of(tiny_llama, {"p": prefix})
    wanted = expected(tiny_llama, prefix, ids(20))
    assert (engine.score(ids(20), "p") - wanted).abs().max() < 2e-4


def test_tokens_and_log_probabilities_of_prompts_and_answers(tiny_llama, prefix):
    engine = engine_of(tiny_llama, {"p": prefix})
    params = PARAMS.model_copy(update={"logprobs": 1, "prompt_logprobs": 1})
    (found,) = engine.generate([ids(30)], params)
    text = [*found.prompt_token_ids, *found.token_ids]
    assert found.prompt_token_ids == ids(30)
    logs = expected(tiny_llama, prefix, text).log_softmax(1)
    assert found.token_ids == logs[29:-1].argmax(1).tolist()
    told = [*found.prompt_logprobs[1:], *found.logprobs]
    own = [row[token] for row, token in zip(told, text[1:], strict=True)]
    assert found.prompt_logprobs[0] is None
    assert torch.tensor(own).sub(logs[range(41), text[1:]]).abs().max() < 2e-4


def test_beams(tiny_llama, prefix):
    engine = engine_of(tiny_llama, {"p": prefix})
    params = BeamParams(beam_width=3, max_tokens=6, adapter="p")
    best = beam_search(engine, [ids(20)], params)[0][0]
    logs = expected(tiny_llama, prefix, [*ids(20), *best.token_ids]).log_softmax(1)
    total = sum(logs[19 + i, token].item() for i, token in enumerate(best.token_ids))
    assert best.cumulative_logprob == pytest.approx(total, abs=1e-3)
    engine.check_integrity()


def test_damaged_files_are_refused(tiny_llama, tmp_path):
    path = write_prefix(tmp_path / "p", tiny_llama, 4)
    weights, settings = path / "adapter_model.safetensors", path / "adapter_config.json"
    found = load_file(weights)["prompt_embeddings"]
    for change, words in (
        ({"prompt_embeddings": found.index_fill(1, torch.tensor(3), torch.nan)}, "NaN or infinity"),
        ({"prompt_embeddings": found[:3]}, r"is \[3, .*needed is \[4, "),
        ({"other": found}, r"is \[0\]; needed is"),
    ):
        save_file({name: x.contiguous() for name, x in change.items()}, weights)
        with pytest.raises(CheckpointError, match=words):
            engine_of(tiny_llama, {"p": path})
    settings.write_text('{"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 0}')
    with pytest.raises(CheckpointError, match="num_virtual_tokens"):
        engine_of(tiny_llama, {"p": path})


def test_refusals(tiny_llama, tmp_path, prefix, make_model):
    engine = engine_of(tiny_llama, {"p": prefix})
    with pytest.raises(RequestError, match="leave no room"):
        engine.add_request(ids(engine.config.max_model_len - 70), PARAMS)
    other = make_model("llama", hidden_size=128, num_hidden_layers=3)
    with pytest.raises(CheckpointError, match=r"prompt_embeddings is \[70, .*needed is"):
        engine_of(other, {"p": prefix})
    with pytest.raises(
        RecipeError, match=r"(?s)prefix tuning, which changes no weights.*--adapter"
    ):
        quantize("w4_gptq", model=tiny_llama, adapter=prefix, output=tmp_path / "o", progress=False)
    speculate = SpeculateConfig(method="draft", path=str(tiny_llama))
    with pytest.raises(EngineError, match="drafts of draft come from a network"):
        engine_of(tiny_llama, {"p": prefix}, speculate=speculate)
