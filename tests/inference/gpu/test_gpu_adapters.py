"""Adapters in the GPU's engine without a GPU: its kernels interpreted, its loop as it is."""

from pathlib import Path

import pytest
import torch

from formats.adapters import read_lora
from formats.families.registry import block_names
from inference.models.adapters import lay_out
from inference.requests.request import SamplingParams
from tests.adapters import write_adapter, write_prefix
from tests.inference.gpu.test_gpu import engine_of, prompt
from tests.kernels.triton_lab import interpreted


@pytest.fixture
def adapters(tmp_path, make_model) -> dict[str, Path]:
    """The second has more ranks, and layers that the first leaves as they are."""
    base = make_model("llama", layers=1)
    few = write_adapter(tmp_path / "few", base, 4, ("q_proj", "v_proj"), seed=1, scale=0.3)
    return {"few": few, "all": write_adapter(tmp_path / "all", base, 20, seed=2, scale=0.3)}


@pytest.mark.parametrize("preset", [None, "a8w8c8"])
def test_logits_are_those_of_the_cpu(make_model, make_quantized, adapters, preset):
    folder = make_model("llama", layers=1)
    folder = folder if preset is None else make_quantized(folder, preset)
    compare(str(folder), adapters, 0.03 if preset is None else 0.1)


@interpreted
def compare(path: str, adapters: dict[str, Path], bound: float):
    gpu, cpu, tokens = engine_of(path), engine_of(path, triton=False), prompt(40)
    base = gpu.score(tokens).float()
    for name, folder in adapters.items():
        for engine in (gpu, cpu):
            engine.load_adapter(name, folder)
        found, wanted = gpu.score(tokens, name).float(), cpu.score(tokens, name)
        assert (found - wanted).norm() / wanted.norm() < bound, name
        assert (found - base).norm() / base.norm() > 0.2, name
    assert torch.equal(gpu.score(tokens).float(), base)


def test_requests_of_one_batch_have_their_adapters(make_model, make_quantized, adapters):
    one_batch(str(make_quantized(make_model("llama", layers=1), "a8w8c8")), adapters)


@interpreted
def one_batch(path: str, adapters: dict[str, Path]):
    engine = engine_of(path)
    for name, folder in adapters.items():
        engine.load_adapter(name, folder)
    prompts = [prompt(5 + 7 * i, seed=i) for i in range(5)]
    names = (None, "few", "all", "few", None)
    params = SamplingParams(max_tokens=4, ignore_eos=True, logprobs=1)
    each = [params.model_copy(update={"adapter": name}) for name in names]
    together = engine.generate(prompts, each)
    engine.check_integrity()
    for tokens, own, found in zip(prompts, each, together, strict=True):
        assert engine.generate([tokens], own)[0].token_ids == found.token_ids
    plain = engine.generate(prompts, params)
    changed = [a.logprobs != b.logprobs for a, b in zip(together, plain, strict=True)]
    assert changed == [False, True, True, True, False]


@pytest.mark.parametrize("preset", [None, "a8w8c8", "c4"])
def test_prefixes(tmp_path, make_model, make_quantized, preset):
    """Of more than a block; c4 turns keys, takes their means away, and scales each token."""
    base = make_model("llama", layers=1)
    folder = base if preset is None else make_quantized(base, preset)
    own = {"p": write_prefix(tmp_path / "p", base, 70), "q": write_prefix(tmp_path / "q", base, 5)}
    compare(str(folder), own, 0.03 if preset is None else 0.1)
    mix_prefixes(str(folder), own)


@interpreted
def mix_prefixes(path: str, own: dict[str, Path]):
    engine, params = engine_of(path), SamplingParams(max_tokens=4, ignore_eos=True, logprobs=1)
    for name, folder in own.items():
        engine.load_adapter(name, folder)
    prompts = [prompt(5 + 7 * i, seed=i) for i in range(4)]
    each = [params.model_copy(update={"adapter": name}) for name in (None, "p", "q", "p")]
    together = engine.generate(prompts, each)
    engine.check_integrity()
    for tokens, own_params, found in zip(prompts, each, together, strict=True):
        assert engine.generate([tokens], own_params)[0].token_ids == found.token_ids


def test_what_another_rank_has_no_memory_for_is_taken_back(make_model, adapters):
    taken_back(str(make_model("llama", layers=1)), adapters)


@interpreted
def taken_back(path: str, adapters: dict[str, Path]):
    engine, tokens = engine_of(path), prompt(9)
    engine.load_adapter("few", adapters["few"])
    wanted, own = engine.score(tokens, "few"), engine.loop.adapters()
    blocks = block_names(engine.checkpoint.config)
    parts = lay_out(engine.model, blocks, read_lora(adapters["all"], engine.checkpoint))

    def tables() -> dict[str, torch.Size]:
        stacks = own.of(0, torch.zeros(1), invariant=False).stacks
        return {layer: stack.a.shape for layer, stack in stacks.items()}

    before, graphs = tables(), own.version
    own.put(1, parts)
    larger, moved = tables(), own.version
    own.take_back(1)
    assert tables() == before != larger
    assert graphs < moved < own.version
    assert torch.equal(engine.score(tokens, "few"), wanted)
