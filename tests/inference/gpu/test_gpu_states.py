"""Models that keep a recurrent state on the GPU's engine without a GPU: its kernels interpreted."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from inference.beam_search import BeamParams, beam_search
from inference.engine import Engine
from inference.requests.request import SamplingParams
from tests.inference.gpu.test_gpu import engine_of, prompt
from tests.inference.transformers_code.test_states import write_small
from tests.kernels.triton_lab import interpreted

GREEDY = SamplingParams(max_tokens=5, ignore_eos=True)


def check_greedy(exact: Engine, ids: list[int], tokens: Sequence[int], near: float) -> None:
    """Each token is the likeliest by the logits of another engine, or next to it.

    Args:
        exact: The other engine.
        ids: A prompt.
        tokens: What follows it.
        near: How far logits may be off, in standard deviations of a row.
    """
    logits = exact.score([*ids, *tokens])[len(ids) - 1 : -1].cpu()
    gap = logits.amax(-1) - logits.gather(1, torch.tensor([*tokens])[:, None])[:, 0]
    assert (gap <= near * logits.std(-1)).all(), gap / logits.std(-1)


def distances(engine: Engine, exact: Engine, ids: list[int]) -> torch.Tensor:
    """Relative distance of two engines' logits of each token [T]."""
    found, wanted = (one.score(ids).cpu() for one in (engine, exact))
    return (found - wanted).norm(dim=-1) / wanted.norm(dim=-1)


@pytest.mark.parametrize("kind", ["qwen3_next", "bamba"])
def test_logits_and_tokens_are_those_of_the_cpu(tmp_path, kind):
    near_the_cpu(str(write_small(kind, tmp_path)))


@interpreted
def near_the_cpu(path: str):
    exact, engine = engine_of(path, triton=False), engine_of(path, max_batched_tokens=64)
    off = distances(engine, exact, prompt(80))
    assert off.median() < 0.005
    assert off.mean() < 0.02  # a router that hardly knows may choose another expert
    prompts = [prompt(5), prompt(70, 1), prompt(1, 2)]
    for _ in range(2):
        for ids, output in zip(prompts, engine.generate(prompts, GREEDY), strict=True):
            check_greedy(exact, ids, output.token_ids, 0.2)
        engine.check_integrity()
    assert engine.stats().hit_tokens == 64  # restored from the state that was kept there


def test_random_requests_are_those_of_the_cpu(tmp_path):
    random_requests(str(write_small("mamba2", tmp_path)))


@interpreted
def random_requests(path: str):
    """With chunks, hits, preemption, aborts, few snapshots, and a text scored among them.

    Layers are a CPU's here, which take a hundredth of the time.
    """
    from inference.cpu.backend import CpuBackend
    from inference.cpu.loop import CodeStep as OnCpu
    from inference.gpu.backend import TritonBackend
    from inference.gpu.code_step import CodeStep

    sizes: dict[str, Any] = {"kv_blocks": 5, "state_snapshots": 3, "max_batched_tokens": 70}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CodeStep, "norm", OnCpu.norm)
        patch.setattr(TritonBackend, "linear", lambda _, stored: CpuBackend().linear(stored))
        check_states(
            engine_of(path, triton=False), engine_of(path, torch.float32, **sizes), 1e-3, 16
        )


def check_states(exact: Engine, engine: Engine, near: float, count: int) -> None:
    """Requests, beams and a text that is scored, against another engine.

    Args:
        exact: The other engine, of the same model.
        engine: The engine, with few blocks.
        near: As in `check_greedy`.
        count: Of requests.
    """
    check_random_requests(exact, engine, count, near)
    beams, params = [], BeamParams(beam_width=3, max_tokens=6)
    for one in (exact, engine):
        beams.append(beam_search(one, [prompt(70)], params)[0][0])
        one.check_integrity()
    assert beams[1].cumulative_logprob == pytest.approx(beams[0].cumulative_logprob, abs=6 * near)
    check_scored_among_others(exact, engine, near / 8)


def check_random_requests(exact: Engine, engine: Engine, count: int, near: float) -> None:
    """So many requests at any times, some aborted; each is greedy by another engine's logits."""
    rng, wanted, done = random.Random(7), dict[str, list[int]](), dict[str, list[int]]()
    while count or engine.has_unfinished:
        if count and rng.random() < 0.5:
            count -= 1
            ids = prompt(rng.choice((1, 64, 110))) + prompt(rng.randrange(16), count)
            params = SamplingParams(max_tokens=rng.randrange(1, 60), ignore_eos=True)
            wanted[engine.add_request(ids, params)] = ids
        if wanted and rng.random() < 0.02:
            engine.abort(rng.choice(list(wanted)))
        for output in engine.step():
            if output.finish_reason == "length":
                done[output.request_id] = list(output.token_ids)
        engine.check_integrity()
    assert engine.stats().preemptions > 0
    assert engine.stats().hit_tokens > 0
    assert len(done) > len(wanted) / 2
    for name, tokens in done.items():
        check_greedy(exact, wanted[name], tokens, near)


def check_scored_among_others(exact: Engine, engine: Engine, near: float) -> None:
    """A text that is scored in several steps keeps its state while others, fewer than a step is
    padded to, get their next tokens."""
    names = [engine.add_request(prompt(n), GREEDY) for n in (3, 4, 5)]
    for _ in range(2):
        engine.step()
    parts = []
    for part in engine.score_parts(prompt(90)):
        parts.append(part.cpu())
        engine.step()
    for name in names:
        engine.abort(name)
    found, wanted = torch.cat(parts), exact.score(prompt(90)).cpu()
    assert len(parts) > 1
    assert (found - wanted).norm() < near * wanted.norm()


def test_quantized_layers_and_caches(tmp_path: Path):
    from tests.ptq.quantizing import make_plan, quantize_tokens, random_tokens

    plan = make_plan(write_small("lfm2", tmp_path), tmp_path / "out", "a8w8c8")
    quantized_near_the_cpu(str(quantize_tokens(plan, random_tokens(), progress=False).checkpoint))


@interpreted
def quantized_near_the_cpu(path: str):
    exact, engine = engine_of(path, triton=False), engine_of(path, max_batched_tokens=64)
    assert engine.pools[0].k.dtype == torch.int8
    assert distances(engine, exact, prompt(40)).mean() < 0.1
