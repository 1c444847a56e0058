"""Adapters in the GPU's engine without a GPU: its kernels interpreted, its loop as it is."""

from pathlib import Path

import pytest
import torch

from formats.adapters import read_lora
from formats.families.registry import block_names
from inference.engine import Engine
from inference.models.adapters import lay_out
from inference.requests.request import SamplingParams
from tests.adapters import write_adapter, write_prefix
from tests.families import but_in_ci
from tests.inference.gpu.test_gpu import engine_of, prompt
from tests.kernels.triton_lab import distance, interpreted

PARAMS = SamplingParams(max_tokens=4, ignore_eos=True, logprobs=1)


@pytest.fixture
def adapters(tmp_path, make_model) -> dict[str, Path]:
    """The second has more ranks, and layers that the first leaves as they are."""
    base = make_model("llama", layers=1)
    few = write_adapter(tmp_path / "few", base, 4, ("q_proj", "v_proj"), seed=1, scale=0.3)
    return {"few": few, "all": write_adapter(tmp_path / "all", base, 20, seed=2, scale=0.3)}


def adapted(path: Path, adapters: dict[str, Path], *, triton: bool = True) -> Engine:
    engine = engine_of(str(path), triton=triton)
    for name, folder in adapters.items():
        engine.load_adapter(name, folder)
    return engine


@pytest.mark.parametrize("preset", but_in_ci([None, "a8w8c8", "c4"], None))
@interpreted
def test_logits_are_those_of_the_cpu_in_any_batch(
    tmp_path, make_model, make_quantized, adapters, preset
):
    """Prefixes are of more than a block; c4 turns keys, takes their means away, and scales each
    token."""
    base, tokens = make_model("llama", layers=1), prompt(40)
    folder, near = make_quantized(base, preset), 0.03 if preset is None else 0.1
    own = {"p": write_prefix(tmp_path / "p", base, 70), "q": write_prefix(tmp_path / "q", base, 5)}
    own = own if preset == "c4" else adapters | own
    plain = engine_of(str(folder)).score(tokens).float()
    gpu, cpu = (adapted(folder, own, triton=triton) for triton in (True, False))
    for name in own:
        found = gpu.score(tokens, name).float()
        assert distance(found, cpu.score(tokens, name)) < near, name
        assert distance(found, plain) > 0.2, name
    assert torch.equal(gpu.score(tokens).float(), plain)
    names = [None, *own, next(iter(own))]
    prompts = [prompt(5 + 7 * (i % 4), seed=i) for i in range(len(names))]
    each = [PARAMS.model_copy(update={"adapter": name}) for name in names]
    together, without = gpu.generate(prompts, each), gpu.generate(prompts, PARAMS)
    gpu.check_integrity()
    for ids, params, found, other in zip(prompts, each, together, without, strict=True):
        assert gpu.generate([ids], params)[0].token_ids == found.token_ids
        assert (found.logprobs != other.logprobs) == (params.adapter is not None)


@interpreted
def test_what_another_rank_has_no_memory_for_is_taken_back(make_model, adapters):
    engine = adapted(make_model("llama", layers=1), {"few": adapters["few"]})
    tokens = prompt(9)
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
