"""Adapters in an engine on a GPU: captured steps, tables that move, a request's own bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from inference.config import EngineConfig
from inference.engine import Engine
from inference.requests.request import SamplingParams
from tests.adapters import write_adapter, write_prefix
from tests.inference.gpu.test_gpu import checkpoint_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
TINY = Path(__file__).resolve().parents[2] / "recipes" / "tiny-python"
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=1)
PROMPTS = [[(7 + 3 * i * j) % 380 + 1 for j in range(5 + 31 * i)] for i in range(9)]
NAMES = [None, "few", "all", "few", None, "all", "all", "few", None]


@pytest.fixture
def adapters(tmp_path) -> dict[str, Path]:
    few = write_adapter(tmp_path / "few", TINY, 8, ("q_proj", "v_proj"), seed=1, scale=0.3)
    return {"few": few, "all": write_adapter(tmp_path / "all", TINY, 40, seed=2, scale=0.1)}


def engine_of(device: str, adapters: dict[str, Path], **config) -> Engine:
    sizes = EngineConfig(max_model_len=512, max_batch_size=12, **config)
    return Engine.from_pretrained(TINY, device=device, config=sizes, adapters=adapters)


def answers(engine: Engine, names: list[str | None]) -> list:
    each = [PARAMS.model_copy(update={"adapter": name}) for name in names]
    found = engine.generate(PROMPTS, each)
    engine.check_integrity()
    return [(output.token_ids, output.logprobs) for output in found]


def test_logits_are_those_of_the_cpu(adapters):
    gpu, cpu = engine_of("cuda", adapters), engine_of("cpu", adapters)
    for name in (None, *adapters):
        found, wanted = gpu.score(PROMPTS[8], name).cpu(), cpu.score(PROMPTS[8], name)
        assert (found - wanted).norm() / wanted.norm() < 0.03, name


@pytest.mark.parametrize("preset", [None, "a8w8c8", "c4"])
def test_prefixes(tmp_path, preset):
    """Of more than a block, in a crowd; what the prefix cache finds of them is theirs."""
    path = TINY if preset is None else Path(checkpoint_of(tmp_path, preset))
    own = {"p": write_prefix(tmp_path / "p", path, 70), "q": write_prefix(tmp_path / "q", path, 5)}
    sizes = EngineConfig(max_model_len=512, max_batch_size=12)
    gpu, cpu = (
        Engine.from_pretrained(path, device=device, config=sizes, adapters=own)
        for device in ("cuda", "cpu")
    )
    for name in (None, *own):
        found, wanted = gpu.score(PROMPTS[8], name).float().cpu(), cpu.score(PROMPTS[8], name)
        assert (found - wanted).norm() / wanted.norm() < (0.03 if preset is None else 0.1), name
    names = [None, "p", "q"] * 3
    found = answers(gpu, names)
    assert gpu.stats().hit_tokens > 0, "no beginning was found, not even that of a prefix"
    plain = answers(gpu, [None] * len(PROMPTS))
    changed = [a != b for a, b in zip(found, plain, strict=True)]
    assert changed == [name is not None for name in names]


def test_captured_steps_give_what_single_kernels_give(adapters):
    """Also after another adapter has moved the tables that the graphs held."""
    graphs, eager = engine_of("cuda", {}), engine_of("cuda", {}, eager=True)
    for loaded in ({"few": adapters["few"]}, {"all": adapters["all"]}):
        for engine in (graphs, eager):
            for name, path in loaded.items():
                engine.load_adapter(name, path)
        names = [name if name in graphs.adapters else None for name in NAMES]
        for _ in range(3):  # run kernel by kernel first, then captured
            found = [tokens for tokens, _ in answers(graphs, names)]
            assert found == [tokens for tokens, _ in answers(eager, names)]
    plain = [tokens for tokens, _ in answers(graphs, [None] * len(NAMES))]
    changed = [a != b for a, b in zip(found, plain, strict=True)]
    assert changed == [name is not None for name in NAMES]


def test_requests_get_alone_what_they_get_in_a_crowd(tmp_path):
    path = Path(checkpoint_of(tmp_path, "a8w8c8"))
    ranks = {"few": 8, "all": 40}
    own = {
        name: write_adapter(tmp_path / name, path, rank, seed=rank, scale=0.1)
        for name, rank in ranks.items()
    }
    sizes = EngineConfig(max_model_len=512, invariant=True, prefix_cache=False)
    engine = Engine.from_pretrained(path, device="cuda", config=sizes, adapters=own)
    together = answers(engine, NAMES)
    for prompt, name, found in zip(PROMPTS, NAMES, together, strict=True):
        params = PARAMS.model_copy(update={"adapter": name})
        alone = engine.generate([prompt], params)[0]
        assert (alone.token_ids, alone.logprobs) == found
